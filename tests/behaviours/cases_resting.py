"""Other ways to read, write or reach a parameter whose unit is not in use: none of them may be
lost, or hit another unit.
"""

import copy
import io

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .harness import DIM, Case, Chain, case

# ---- between steps ---------------------------------------------------------------------------


class Between(Case):
    """Something done to parameters between steps"""

    def touch(self, run, weight):
        raise NotImplementedError

    def train(self, run):
        super().train(run)
        with torch.no_grad():
            self.touch(run, run.model.head.weight)
        super().train(run)


@case
class ForeachBetweenSteps(Between):
    """`torch._foreach_mul_` on a list of parameters between steps"""

    def touch(self, run, weight):
        torch._foreach_mul_([weight, run.model.stem.weight], 0.5)


@case
class ElementSetBetweenSteps(Between):
    """`p[0] = 0` between steps"""

    def touch(self, run, weight):
        weight[0] = 0


@case
class OutBetweenSteps(Between):
    """`torch.mul(..., out=p)` between steps"""

    def touch(self, run, weight):
        torch.mul(torch.eye(DIM), 2, out=weight)


@case
class VectorToParameters(Between):
    """`vector_to_parameters` between steps"""

    def touch(self, run, weight):
        parameters = list(run.model.parameters())
        vector_to_parameters(
            torch.linspace(-0.1, 0.1, sum(p.numel() for p in parameters)), parameters
        )


@case
class VectorToParametersWhenGathered(VectorToParameters):
    """`parameters_to_vector` and `vector_to_parameters` inside `gathered(modify=True)`"""

    refused = None

    def touch(self, run, weight):
        with run.gathered(run.model, modify=True):
            vector_to_parameters(
                0.5 * parameters_to_vector(run.model.parameters()), run.model.parameters()
            )


@case
class PointerBetweenSteps(Between):
    """`p.data_ptr()` between steps"""

    refused = (
        r"would touch the memory of parameter 'head\.weight'.*strategy.gathered\(module,"
        r" modify=True\)"
    )

    def touch(self, run, weight):
        assert weight.data_ptr() % 4 == 0


@case
class NumpyBetweenSteps(Between):
    """`p.detach().numpy()` between steps"""

    on_host = True

    def touch(self, run, weight):
        run.log(float(weight.detach().numpy().sum()))


# ---- in a step, outside their unit -----------------------------------------------------------


class Outside(Case):
    """Something done to `head.weight` in a step, before the head's forward"""

    def touch(self, run, weight):
        raise NotImplementedError

    def train(self, run):
        def loss(model, step):
            with torch.no_grad():
                self.touch(run, model.head.weight)
            return self.loss(model, self.batch(step, run.rank))

        for step in range(2):
            run.train_step(lambda model, step=step: loss(model, step))


# What works there, and what works after the step.
REMEDY = (
    r" would touch the memory of parameter 'head\.weight'.*Inside a step read"
    r" `parameter\.detach\(\)` and change the parameter "
    r"itself, under `torch\.no_grad\(\)` \(`parameter\.copy_\(\.\.\.\)`\); between steps"
    r" \(`on_train_batch_end`\).*"
    r"gathered\(module, modify=True\)"
)


@case
class DataReadOutsideItsUnit(Outside):
    """`weight.data` in a step, outside the weight's unit's forward"""

    def touch(self, run, weight):
        run.log(weight.data.sum())


@case
class ChangedOutsideItsUnit(Outside):
    """`weight.mul_()`, `weight *= 0.5`, `weight[0] = 0` and the like in a step, outside the
    weight's unit's forward
    """

    def touch(self, run, weight):
        assert weight.mul_(1.5).add_(run.model.head.bias, alpha=0.1) is weight
        same = weight
        same *= 0.5
        same.add_(same)
        assert same is weight
        run.model.head.weight -= 0.01
        weight[0] = 0
        run.model.head.bias.lerp_(run.model.stem.bias, 0.3)
        torch.mul(weight, 0.9, out=weight)
        torch._foreach_mul_([weight, run.model.stem.weight, run.model.head.bias], 0.9)
        run.log(weight, *run.parameters().values())


@case
class ReadAndCopiedIntoOutsideItsUnit(Outside):
    """What `weight.data` is used for, by `weight.detach()` and `weight.copy_(...)`, outside its
    unit's forward
    """

    def touch(self, run, weight):
        value = weight.detach() * 0.5
        value[0] = 0
        weight.copy_(value)
        run.log(
            weight.detach().sum(), torch.func.vmap(lambda row: row.sum())(weight.detach().clone())
        )


@case
class ChangedAfterTheStep(Outside):
    """`weight.data`, `vmap` and changes in place inside `gathered(modify=True)`, between steps"""

    def touch(self, run, weight):
        weight.mul_(0.5)
        weight[0] = 0
        weight.data.add_(0.1)
        run.log(weight.data.sum(), torch.func.vmap(lambda row: row.sum())(weight))

    def train(self, run):
        for _ in range(2):
            Case.train(self, run)
            with run.gathered(run.model, modify=True), torch.no_grad():
                self.touch(run, run.model.head.weight)


@torch.library.custom_op("zero3_behaviours::halve", mutates_args=("values",))
def halve(values: torch.Tensor) -> None:
    """An operator whose name does not tell that it writes"""
    values.mul_(0.5)


@case
class OperatorOutsideItsUnit(Outside):
    """`torch.ops.aten.mul_.Tensor(weight, ...)` outside the weight's unit's forward"""

    def touch(self, run, weight):
        torch.ops.aten.mul_.Tensor(weight, torch.tensor(0.5))


@case
class SentOutsideItsUnit(Outside):
    """`torch.distributed.all_gather(..., weight)` outside the weight's unit's forward"""

    def touch(self, run, weight):
        parts = [torch.empty(DIM, DIM) for _ in range(run.world_size)]
        dist.all_gather(parts, weight)
        run.log(*parts)


@case
class InitializedOutsideItsUnit(Outside):
    """`nn.init.constant_(weight, ...)` in a step, outside the weight's unit's forward"""

    def touch(self, run, weight):
        nn.init.constant_(weight, 0.3)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


@case
class CopiesOfAliases(Case):
    """`deepcopy`, `pickle`, numpy and arithmetic of `weight.detach()` outside its unit's forward"""

    on_host = True

    def loss(self, model, batch):
        weight = model.head.weight
        kept = copy.deepcopy(
            {
                "weight": weight.detach(),
                "row": weight[0].detach(),
                "rows": [r.detach() for r in weight],
            }
        )
        alone = copy.deepcopy(weight.detach()).mul_(2.0)
        loaded = torch.load(io.BytesIO(_saved(weight.detach())))
        rows = torch.stack([row * 2 for row in weight.detach()])
        values = (
            kept["weight"].sum()
            + kept["row"].sum()
            + kept["rows"][1].sum()
            + loaded.sum()
            + alone.norm()
        )
        values = (
            values
            + float(weight.detach().numpy()[1].sum())
            + float(np.asarray(weight.detach()).copy().max())
        )
        return super().loss(model, batch) + values * rows.sum()


def _saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@case
class AliasesInOperations(Case):
    """`weight.detach()` of one unit and weights of others in one operation, aliases that require
    gradients
    """

    def loss(self, model, batch):
        alias, view = model.head.weight.detach(), model.head.weight.t()
        other = model.blocks[1].down.bias
        mixed = (
            torch.add(alias, other).square().mean() + torch.cat([view, model.stem.weight]).norm()
        )
        mixed = (
            mixed
            + torch.where(view > 0, model.stem.weight, view).sum()
            + (alias @ model.blocks[2].up.weight.t()).mean()
        )
        leaf = model.stem.weight.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf * alias).square().sum(), leaf)
        (through,) = torch.autograd.grad(F.linear(model(batch), view).square().sum(), view)
        return super().loss(model, batch) * mixed + (gradient * leaf).mean() + through.mean()


@case
class DoubleBackwardOfViews(Case):
    """Double backward through views of weights outside their unit's forward"""

    pitfalls = (46,)

    def loss(self, model, batch):
        view = model.head.weight.t()
        out = F.linear(model(batch), view).square().mean()
        (grad,) = torch.autograd.grad(out, view, create_graph=True)
        return out + grad.square().sum()


@case
class VmapOverViews(Case):
    """`torch.func.vmap` over the rows of a view of a weight, and with a whole weight, outside their
    unit's forward
    """

    pitfalls = (46,)

    def loss(self, model, batch):
        rows = torch.func.vmap(lambda row: (row * batch).sum(-1))(model.head.weight.clone())
        views = torch.func.vmap(lambda row, whole: whole @ row, in_dims=(0, None))(
            model.head.weight.t(), model.stem.weight
        )
        return super().loss(model, batch) + rows.square().mean() + views.square().mean()


@case
class CompiledFunctionOfViews(Case):
    """A compiled function of views of weights outside their unit's forward (aot_eager)"""

    pitfalls = (41,)
    timeout = 60.0

    def prepare(self, model):
        self.penalty = torch.compile(lambda a, b: (a @ b * 2).square().mean(), backend="aot_eager")

    def views(self, model):
        return model.head.weight.t(), model.stem.weight.detach()

    def loss(self, model, batch):
        return super().loss(model, batch) + self.penalty(*self.views(model))


# ---- in use ----------------------------------------------------------------------------------


@case
class MovedToWhereItIs(Case):
    """`model.to(device)` that changes nothing, between steps"""

    def between(self, run):
        run.model.to(torch.get_default_device())
        run.model.to(next(run.model.parameters()).dtype)


@case
class MovedWhenGathered(Case):
    """`model.to(...)` that changes nothing, inside `gathered`"""

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            # to "cpu:0" from "cpu" torch would copy
            run.model.float().to(next(run.model.parameters()).device)
        super().train(run)


@case
class Averaged(Case):
    """An average of weights kept by hand: `lerp_` of `weight.detach()` in a step"""

    pitfalls = (34,)

    def train(self, run):
        torch.manual_seed(0)
        averages = [p.detach().clone() for p in self.model().parameters()]

        def loss(model):
            with torch.no_grad():
                for average, p in zip(averages, model.parameters(), strict=True):
                    average.lerp_(p.detach(), 0.3)
                    average.mul_(0.99).add_(p, alpha=0.01)
                torch._foreach_lerp_(averages, [p.detach() for p in model.parameters()], 0.1)
            return self.loss(model, self.batch(0, run.rank))

        for _ in range(2):
            run.train_step(loss)
        run.log(*averages)


@case
class RootWeightAveraged(Averaged):
    """The same of parameters that the model itself has"""

    def model(self):
        model = Chain(depth=2)
        model.scale = nn.Parameter(torch.ones(DIM))
        return model

    def loss(self, model, batch):
        return (model(batch) * model.scale).square().mean()


@case
class KindAsked(Between):
    """Dtype, device and layout of a parameter asked for by functions of torch, between steps and in
    one, by rank 0 alone
    """

    refused = None

    def model(self):
        model = Chain()
        model.head.double()
        return model

    def ask(self, run, p):
        x = torch.ones(3)
        run.log(
            x.type_as(p),
            x.to(p),
            x.to(p, copy=True),
            torch.zeros(()).double().to(run.model.stem.weight),
        )
        assert (
            p.type().endswith("DoubleTensor")
            and torch.typename(p) == p.type()
            and p.grad_dtype is torch.float64
        )
        assert torch.result_type(x, p) is torch.result_type(p, x) is torch.float64
        assert (
            torch.result_type(torch.ones((), dtype=torch.float64), run.model.stem.weight)
            is torch.float32
        )
        assert (
            p.dim_order() == (0, 1)
            and p.dense_dim() == 2
            and p.sparse_dim() == 0
            and not p.is_distributed()
        )
        assert str(p) == f"{p}" == format(p)

    def touch(self, run, weight):
        if run.rank == 0:
            self.ask(run, weight)

    def loss(self, model, batch):
        return model.head(batch.double()).square().mean()

    def train(self, run):
        def loss(model, step):
            self.touch(run, model.head.weight)
            return self.loss(model, self.batch(step, run.rank))

        for step in range(2):
            run.train_step(lambda model, step=step: loss(model, step))
        self.touch(run, run.model.head.weight)
