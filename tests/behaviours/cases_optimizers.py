"""Optimizers, their groups and what is done to them during training."""

import copy

import torch
from torch import nn

from .cases_root import Scaled
from .harness import DIM, STEPS, Block, Case, Chain, case


def _optimizer_case(cls, **options):
    class Optimizer(Case):
        def optimizers(self, model):
            return [cls(model.parameters(), **options)]

    Optimizer.__name__ = f"Optimizer{cls.__name__}" + "".join(
        k.title().replace("_", "") for k, v in options.items() if v is True
    )
    Optimizer.__doc__ = f"`torch.optim.{cls.__name__}`" + "".join(
        f", {k}" for k, v in options.items() if v is True
    )
    return case(Optimizer)


_optimizer_case(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
_optimizer_case(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
_optimizer_case(torch.optim.Adam, lr=0.01, amsgrad=True)
_optimizer_case(torch.optim.Adam, lr=0.01, fused=True)
_optimizer_case(torch.optim.AdamW, lr=0.01, foreach=True)
_optimizer_case(torch.optim.Adagrad, lr=0.01)
_optimizer_case(torch.optim.Adadelta, lr=0.1)
_optimizer_case(torch.optim.Adamax, lr=0.01)
_optimizer_case(torch.optim.ASGD, lr=0.01)
_optimizer_case(torch.optim.NAdam, lr=0.01)
_optimizer_case(torch.optim.RAdam, lr=0.01).steps = 8  # it rectifies from the sixth on
_optimizer_case(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True)
_optimizer_case(torch.optim.Rprop, lr=0.01)
_optimizer_case(torch.optim.Adafactor, lr=0.01)
_optimizer_case(
    torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True
)
_optimizer_case(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True)
_optimizer_case(torch.optim.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
_optimizer_case(torch.optim.AdamW, lr=0.01, amsgrad=True, maximize=True)
_optimizer_case(torch.optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
_optimizer_case(
    torch.optim.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1, foreach=True
)
_optimizer_case(torch.optim.Adamax, lr=0.01, weight_decay=0.1, maximize=True)
_optimizer_case(torch.optim.ASGD, lr=0.01, lambd=0.1, t0=1, foreach=True)


@case
class OptimizerMuon(Case):
    """`torch.optim.Muon` on matrices, with SGD for the rest"""

    pitfalls = (22,)
    worlds = (1, 2, 3)

    def optimizers(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.SGD(rest, lr=0.01)]


@case
class OptimizerMuonAndAdamw(OptimizerMuon):
    """`torch.optim.Muon` and AdamW, `nesterov` off, weight decay, some parameters unused in some
    steps
    """

    pitfalls = (2, 22)

    def optimizers(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        halves = [{"params": matrices[::2]}, {"params": matrices[1::2], "lr": 0.03}]
        return [
            torch.optim.Muon(halves, lr=0.01, nesterov=False, weight_decay=0.2),
            torch.optim.AdamW(rest, lr=0.01),
        ]

    def train(self, run):
        for step in range(2 * STEPS):
            blocks = slice(0, 2) if step % 2 else slice(1, 4)
            run.train_step(
                lambda model, step=step, blocks=blocks: self.part(
                    model, blocks, self.batch(step, run.rank)
                )
            )

    def part(self, model, blocks, x):
        x = model.stem(x)
        for block in model.blocks[blocks]:
            x = block(x)
        return model.head(x).square().mean()


class NormalizedSgd(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def norm(self, p):
        return p.grad.norm()

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.grad = p.grad / self.norm(p)
        super().step()
        with torch.no_grad():
            for p in [p for group in self.param_groups for p in group["params"]]:
                p.div_(p.norm().clamp_min(1))  # after the inner step
        return loss


class GloballyNormalizedSgd(NormalizedSgd):
    def norm(self, p):
        return torch.stack(
            [
                q.grad.norm()
                for group in self.param_groups
                for q in group["params"]
                if q.grad is not None
            ]
        ).norm()


@case
class OptimizerOfNorms(Case):
    """An optimizer of the user's own that divides each gradient by its norm"""

    pitfalls = (22,)
    compare_gradients = False  # the optimizer replaced those of the reference

    def optimizers(self, model):
        return [NormalizedSgd(model.parameters(), lr=0.01, momentum=0.9)]


@case
class OptimizerOfGlobalNorms(Case):
    """An optimizer of the user's own that divides each gradient by the norm of all"""

    pitfalls = (22,)
    refused = refused_on_one = "GloballyNormalizedSgd combines several parameters.*Use an optimizer"

    def optimizers(self, model):
        return [GloballyNormalizedSgd(model.parameters(), lr=0.01)]


class FiniteSgd(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        if not all(
            torch.isfinite(p.grad).all()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ):
            return None
        return super().step(closure)


@case
class OptimizerOfFiniteSteps(Case):
    """An optimizer of the user's own that skips a step if any gradient is not finite"""

    pitfalls = (22,)
    refused = refused_on_one = (
        "FiniteSgd combines several parameters.*skips when any gradient.*Use an optimizer"
    )

    def optimizers(self, model):
        return [FiniteSgd(model.parameters(), lr=0.1)]


@case
class Closure(Case):
    """`optimizer.step(closure)`"""

    def train(self, run):
        for step in range(STEPS):

            def closure(step=step):
                self.clear(run)
                loss = run.step(lambda model: self.loss(model, self.batch(step, run.rank)))
                self.backward(run, loss)
                return loss

            run.log(run.optimizer.step(closure))


class ClosureOnSameData(Closure):
    """An optimizer that looks at the loss: the reference's has that of its rank."""

    pitfalls = (22,)

    def batch(self, step, rank):
        return super().batch(step, 0)


@case
class OptimizerLbfgs(ClosureOnSameData):
    """`torch.optim.LBFGS` with a closure that runs the model again"""

    worlds = (1, 2, 3)
    # Its steps depend on scalar products over all parameters, which the ranks add up in another
    # order.
    rtol = 2e-5

    def optimizers(self, model):
        return [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)]


@case
class OptimizerLbfgsLineSearch(ClosureOnSameData):
    """`torch.optim.LBFGS` with a line search and a short history"""

    rtol = OptimizerLbfgs.rtol

    def optimizers(self, model):
        return [
            torch.optim.LBFGS(
                model.parameters(), max_iter=3, history_size=2, line_search_fn="strong_wolfe"
            )
        ]


@case
class OptimizerAdafactorClosure(ClosureOnSameData):
    """`torch.optim.Adafactor` with a closure"""

    def optimizers(self, model):
        return [torch.optim.Adafactor(model.parameters(), lr=0.01)]


class GroupsByShape(Case):
    """Weight decay for matrices only"""

    def optimizers(self, model):
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0, "lr": 0.05},
        ]
        return [torch.optim.SGD(groups, lr=0.1, momentum=0.9)]


@case
class ParamGroups(GroupsByShape):
    """Param groups with their own weight decay and learning rate"""

    pitfalls = (21,)
    worlds = (1, 2, 3)


@case
class ParamGroupOfFewElements(Case):
    """A param group of twelve elements in four units, which some ranks own nothing of, with fused
    AdamW
    """

    pitfalls = (48,)
    worlds = (1, 2, 4)

    class Scaled(Block):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]))

        def forward(self, x):
            return super().forward(x * self.scale.sum())

    def model(self):
        return Chain(*(self.Scaled() for _ in range(4)))

    def optimizers(self, model):
        scales = [block.scale for block in model.blocks]
        rest = [p for name, p in model.named_parameters() if "scale" not in name]
        return [
            torch.optim.AdamW(
                [{"params": rest}, {"params": scales, "lr": 0.02}], lr=0.01, eps=1e-3, fused=True
            )
        ]

    def train(self, run):
        super().train(run)
        if run.refuses and run.world_size == 4:
            scales = [
                (unit.chunks[0].layout, unit.entries.index(entry))
                for unit in run.engine.units
                for entry in unit.entries
                if "scale" in entry.name
            ]
            owners = {
                rank
                for rank in range(4)
                if any(layout.span(index, rank) for layout, index in scales)
            }
            assert len(owners) < 4, "each rank owns a part"


@case
class ParamGroupEdits(GroupsByShape):
    """Learning rates and weight decay edited by a scheduler and by hand"""

    pitfalls = (21,)

    def train(self, run):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            scheduler.step()
            run.optimizer.param_groups[1]["weight_decay"] += 0.1


@case
class ParametersWithoutOptimizer(Case):
    """Parameters that require gradients and that no optimizer has; their gradients are not looked
    at
    """

    pitfalls = (24,)
    compare_gradients = False

    def optimizers(self, model):
        return [torch.optim.SGD(model.blocks[1:].parameters(), lr=0.1, momentum=0.9)]


@case
class GradientsWithoutOptimizer(ParametersWithoutOptimizer):
    """Gradients of parameters that no optimizer has, as in a hand-written SGD and in
    `clip_grad_norm_`
    """

    refused = refused_on_one = (
        r"The gradient of parameter 'stem.weight', which no optimizer has, was not kept.*Give the"
        r" parameter to an optimizer"
    )
    compare_gradients = False  # those of the optimizer alone are looked at

    def train(self, run):
        super().train(run)
        for p in run.model.parameters():
            p.grad = None
        loss = run.step(lambda model: self.loss(model, self.batch(7, run.rank)))
        with run.backward():
            loss.backward()
        run.log(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        with torch.no_grad():
            for p in (*run.model.stem.parameters(), *run.model.head.parameters()):
                p.sub_(0.1 * p.grad)


@case
class UnfrozenWithoutOptimizer(Case):
    """Parameters without an optimizer, unfrozen during training"""

    pitfalls = (23,)
    compare_gradients = False

    def prepare(self, model):
        model.blocks[0].requires_grad_(False)

    def optimizers(self, model):
        return [torch.optim.SGD(model.blocks[1:].parameters(), lr=0.1, momentum=0.9)]

    def train(self, run):
        super().train(run)
        run.model.blocks[0].requires_grad_()
        super().train(run)
        if run.refuses and run.world_size > 1:
            with torch._C.DisableTorchFunctionSubclass():
                its_own = torch.Tensor.grad.__get__  # past the engine's property
                assert all(its_own(p) is None for p in run.model.blocks[0].parameters()), (
                    "whole gradients stay on every rank"
                )


@case
class FlatTensorsClamped(Case):
    """Tensors of `optimizer.param_groups` changed in place between steps, and inside of one"""

    pitfalls = (21, 31)

    def train(self, run):
        def clamp(low):
            with torch.no_grad():
                for p in (p for group in run.optimizer.param_groups for p in group["params"]):
                    p.clamp_(low, 0.2)

        def evaluate(model):
            with torch.no_grad():
                run.log(model(self.batch(9, 0)))

        def both(model):
            evaluate(model)
            clamp(-0.15)
            evaluate(model)

        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            run.step(evaluate)
            clamp(-0.2)
            run.step(evaluate)
            run.step(both)


@case
class FlatTensorsOfUnusedClamped(FlatTensorsClamped):
    """The same where some parameters have no gradient, in a model with parameters of its own"""

    def model(self):
        return Scaled()

    def loss(self, model, batch):
        x = model.blocks[1](model.stem(batch))
        return (x * model.scale).square().mean()


@case
class ForeignTensor(Case):
    """An optimizer that holds a tensor that is not in the model"""

    pitfalls = (24,)
    refused = refused_on_one = (
        "holds a tensor of shape.*is not a parameter of Chain.*named_parameters"
    )

    def optimizers(self, model):
        self.scale = nn.Parameter(torch.ones(DIM))
        return [torch.optim.SGD([*model.parameters(), self.scale], lr=0.1)]

    def loss(self, model, batch):
        return (model(batch) * self.scale).square().mean()


class HalfTrained(Case):
    """An optimizer that has some of the parameters"""

    compare_gradients = False  # of the others the reference keeps gradients that nobody asked for

    def optimizers(self, model):
        return [torch.optim.SGD(model.blocks[1:].parameters(), lr=0.1, momentum=0.9)]

    def added(self, model):
        return {"params": [*model.head.parameters(), model.blocks[0].up.weight], "lr": 0.05}

    def train(self, run):
        super().train(run)
        for p in run.model.parameters():
            p.grad = None
        run.optimizer.add_param_group(self.added(run.model))
        super().train(run)


@case
class AddParamGroup(HalfTrained):
    """`add_param_group` during training"""

    pitfalls = (21, 24)
    worlds = (1, 2, 3)


@case
class AddParamGroupAdam(HalfTrained):
    """`add_param_group` during training, state with step counts"""

    pitfalls = (21, 24)

    def optimizers(self, model):
        unused = [p for p in model.blocks[1:].parameters() if p.ndim == 1]
        matrices = [p for p in model.blocks[1:].parameters() if p.ndim == 2]
        return [torch.optim.NAdam([{"params": matrices}, {"params": unused, "lr": 0.02}], lr=0.01)]

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 2:  # the second block has half the steps of the others
            return model(batch).square().mean()
        x = model.stem(batch)
        for block in (model.blocks[0], *model.blocks[2:]):
            x = block(x)
        return model.head(x).square().mean()

    def train(self, run):
        self.calls = 0
        super().train(run)


@case
class AddParamGroupAdafactor(HalfTrained):
    """`add_param_group` during training, state with whole tensors"""

    pitfalls = (21, 22)
    worlds = (1, 2, 3)

    def optimizers(self, model):
        return [torch.optim.Adafactor(model.blocks[1:].parameters(), lr=0.01)]


@case
class AddParamGroupTwice(HalfTrained):
    """`add_param_group` twice, and a group taken away again"""

    pitfalls = (21,)

    def train(self, run):
        super().train(run)
        run.optimizer.zero_grad()
        run.optimizer.add_param_group({"params": run.model.stem.weight, "momentum": 0.5})
        for p in run.model.parameters():
            p.grad = None
        Case.train(self, run)
        del run.optimizer.param_groups[1]
        Case.train(self, run)


@case
class AddParamGroupThenZeros(HalfTrained):
    """`add_param_group`, `zero_grad(set_to_none=False)`, and a backward"""

    def train(self, run):
        Case.train(self, run)
        run.optimizer.add_param_group(self.added(run.model))
        for step in range(STEPS):
            run.optimizer.zero_grad(set_to_none=False)
            loss = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            with run.backward():
                loss.backward()
            run.optimizer.step()


@case
class AddParamGroupAfterBackward(HalfTrained):
    """`add_param_group` between backward and `optimizer.step()`"""

    refused = refused_on_one = (
        "A parameter of param group 1 of SGD was added after the last.*between steps"
    )

    def train(self, run):
        Case.train(self, run)
        loss = run.step(lambda model: self.loss(model, self.batch(0, run.rank)))
        with run.backward():
            loss.backward()
        run.optimizer.add_param_group(self.added(run.model))
        run.optimizer.step()


@case
class TwoOptimizers(Case):
    """Two optimizers on two halves, each with its loss (a GAN)"""

    pitfalls = (14, 23)

    def model(self):
        model = nn.Module()
        model.make, model.judge = Chain(depth=3), Chain(depth=3)
        return model

    def optimizers(self, model):
        make = torch.optim.SGD(model.make.parameters(), lr=0.1, momentum=0.9)
        return [make, torch.optim.Adam(model.judge.parameters(), lr=0.01)]

    def units(self, model):
        return [*model.make.blocks, *model.judge.blocks, model.make, model.judge]

    def train(self, run):
        make, judge = run.optimizers
        for step in range(STEPS):
            batch = self.batch(step, run.rank)
            loss = run.step(lambda model, batch=batch: model.judge(model.make(batch)).mean())
            make.zero_grad()
            judge.zero_grad()
            with run.backward():
                loss.backward()
            make.step()
            run.log(loss)
            loss = run.step(
                lambda model, batch=batch: model.judge(model.make(batch).detach()).square().mean()
            )
            make.zero_grad()
            judge.zero_grad()
            with run.backward():
                loss.backward()
            judge.step()
            run.log(loss)


@case
class TwoOptimizersToggled(TwoOptimizers):
    """Two optimizers, the other's parameters switched off (`toggle_optimizer`)"""

    pitfalls = (23,)

    def train(self, run):
        for step in range(2 * STEPS):
            batch = self.batch(step, run.rank)
            on, off = run.optimizers if step % 2 else reversed(run.optimizers)
            for p in [p for g in off.param_groups for p in g["params"]]:
                p.requires_grad = False
            on.zero_grad()
            loss = run.step(
                lambda model, batch=batch: model.judge(model.make(batch)).square().mean()
            )
            with run.backward():
                loss.backward()
            on.step()
            run.log(loss)
            for p in [p for g in off.param_groups for p in g["params"]]:
                p.requires_grad = True
                p.grad = None


@case
class TwoOptimizersToggledInOneStep(TwoOptimizers):
    """Two optimizers that take turns inside one step, switched off and on as `toggle_optimizer`
    does it
    """

    manual = True
    pitfalls = (23, 26)

    def train(self, run):
        for step in range(STEPS):
            run.step(lambda model, step=step: self.both(run, model, self.batch(step, run.rank)))

    def both(self, run, model, batch):
        for sign, optimizer in zip((1, -1), run.optimizers, strict=True):
            others = [
                p
                for o in run.optimizers
                if o is not optimizer
                for g in o.param_groups
                for p in g["params"]
            ]
            before = [(p, p.requires_grad) for p in others]
            for p in others:
                p.requires_grad = False
            loss = sign * model.judge(model.make(batch)).square().mean()
            optimizer.zero_grad()
            with run.backward():
                loss.backward()
            optimizer.step()
            for p, requires_grad in before:
                p.requires_grad = requires_grad
            run.log(loss)


@case
class TwoOptimizersOneGraph(TwoOptimizers):
    """Two optimizers, the second loss through what was made before the first step (torch's DCGAN
    tutorial)
    """

    manual = True
    pitfalls = (14, 26)

    def train(self, run):
        for step in range(STEPS):
            run.step(lambda model, step=step: self.both(run, model, self.batch(step, run.rank)))

    def both(self, run, model, batch):
        make, judge = run.optimizers
        made = model.make(batch)
        losses = (
            lambda: model.judge(made.detach()).square().mean() - model.judge(batch).mean(),
            lambda: model.judge(made).mean(),
        )
        for optimizer, loss in zip((judge, make), losses, strict=True):
            optimizer.zero_grad()
            value = loss()
            with run.backward():
                value.backward()
            optimizer.step()
            run.log(value)


@case
class RootsOfTwoOptimizers(TwoOptimizersOneGraph):
    """torch's DCGAN tutorial with networks that both have parameters of their own: these are one
    unit
    """

    def model(self):
        model = nn.Module()
        model.make, model.judge = Scaled(depth=2), Scaled(depth=2)
        return model


@case
class OneUnitOfTwoOptimizers(TwoOptimizersOneGraph):
    """torch's DCGAN tutorial with networks so small that they are one unit"""

    small_numel = 1 << 18


@case
class OneUnitOfTwoOptimizersToggled(TwoOptimizersToggled):
    """Two optimizers of one unit, the other's parameters switched off"""

    small_numel = 1 << 18


@case
class OneLayerOfTwoOptimizers(TwoOptimizers):
    """A layer that two optimizers have, each with its loss (a shared encoder)"""

    pitfalls = (14,)

    def optimizers(self, model):
        shared = list(model.make.parameters())
        judge = torch.optim.Adam([*shared, *model.judge.parameters()], lr=0.01)
        return [torch.optim.SGD(shared, lr=0.1, momentum=0.9), judge]


@case
class OneOptimizerSteps(TwoOptimizers):
    """Two optimizers stepped at different intervals, gradients of the other kept"""

    pitfalls = (14,)

    def train(self, run):
        make, judge = run.optimizers
        for step in range(2 * STEPS):
            loss = run.step(
                lambda model, step=step: (
                    model.judge(model.make(self.batch(step, run.rank))).square().mean()
                )
            )
            with run.backward():
                loss.backward()
            make.step()
            make.zero_grad()
            if step % 2:
                judge.step()
                judge.zero_grad()
            run.log(loss)


@case
class OneUnitSteppedAtIntervals(OneOptimizerSteps):
    """Two optimizers of one unit stepped at different intervals, gradients of the other kept"""

    small_numel = 1 << 18


@case
class GradientsKeptWhileGroupsChange(TwoOptimizers):
    """`add_param_group` on one optimizer while another keeps its gradients"""

    pitfalls = (14, 21)

    def optimizers(self, model):
        make = torch.optim.SGD(
            [p for p in model.make.parameters() if p.ndim == 2], lr=0.1, momentum=0.9
        )
        return [make, torch.optim.Adam(model.judge.parameters(), lr=0.01)]

    compare_gradients = False

    def train(self, run):
        make, judge = run.optimizers
        for step in range(2 * STEPS):
            if step == STEPS:  # the judge has gradients of one step, and will get those of a second
                make.add_param_group(
                    {"params": [p for p in run.model.make.parameters() if p.ndim == 1]}
                )
            loss = run.step(
                lambda model, step=step: (
                    model.judge(model.make(self.batch(step, run.rank))).square().mean()
                )
            )
            for p in run.model.make.parameters():
                p.grad = None
            with run.backward():
                loss.backward()
            make.step()
            if step % 2:
                judge.step()
                judge.zero_grad()
            run.log(loss)


@case
class ZeroGradKeepsTensors(Case):
    """`zero_grad(set_to_none=False)`"""

    def clear(self, run):
        run.optimizer.zero_grad(set_to_none=False)


@case
class ModelZeroGrad(Case):
    """`model.zero_grad()` instead of the optimizer's"""

    def clear(self, run):
        run.model.zero_grad()


@case
class GradientsNeverCleared(Case):
    """Steps without `zero_grad`"""

    def clear(self, run):
        """Not at all."""


@case
class StepTwice(Case):
    """`optimizer.step()` twice on the same gradients"""

    def train(self, run):
        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            run.optimizer.step()


@case
class OptimizerStateReset(Case):
    """The optimizer's state cleared during training"""

    def train(self, run):
        super().train(run)
        run.optimizer.state.clear()
        super().train(run)


@case
class OptimizerStateCopied(Case):
    """A deep copy of `optimizer.state_dict()`, loaded some steps later; one of the optimizer, which
    steps nothing
    """

    def optimizers(self, model):
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]

    def train(self, run):
        super().train(run)
        kept = copy.deepcopy(run.optimizer.state_dict())
        super().train(run)
        copied = copy.deepcopy(run.optimizer)
        copied.step()
        run.optimizer.load_state_dict(kept)
        super().train(run)
