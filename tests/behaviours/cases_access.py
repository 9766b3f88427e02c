"""Where a parameter's value is read, written and copied; what kinds of parameter there are."""

import copy
import io
import pickle

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from .harness import DIM, STEPS, Block, Case, Chain, Run, case

NOT_HERE = "is sharded over the ranks.*strategy.gathered"


# ---- reading ---------------------------------------------------------------------------------


@case
class Plain(Case):
    """An ordinary model"""

    worlds = (1, 2, 3)


@case
class WeightReadOutsideItsUnit(Case):
    """A weight read outside its unit's forward"""

    pitfalls = (25,)

    def loss(self, model, batch):
        return (
            (
                model(batch) * model.head.weight.norm()
                + F.linear(batch, model.blocks[1].up.weight).sum()
            )
            .square()
            .mean()
        )


@case
class MethodOtherThanForward(Case):
    """A method other than `forward`"""

    methods = ("encode", "decode")
    pitfalls = (25, 26)

    class Coder(Block):
        def encode(self, x):
            return F.linear(self.norm(x), self.up.weight, self.up.bias)

        def decode(self, x):
            return self.down(torch.tanh(x))

    def model(self):
        return Chain(*(self.Coder() for _ in range(4)))

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = x + block.decode(block.encode(x))
        return model.head(x).square().mean()


@case
class PenaltyOverParameters(Case):
    """An L2 term over `parameters()`"""

    pitfalls = (25,)

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


@case
class PenaltyOnly(Case):
    """A loss of parameters alone, no forward"""

    def loss(self, model, batch):
        return sum((p * batch.mean()).square().sum() for p in model.parameters())


@case
class FunctionsOfSeveralParameters(Case):
    """`torch.cat`, `stack` and indexing of parameters of several units"""

    def loss(self, model, batch):
        stacked = torch.stack([b.up.weight for b in model.blocks]).mean(0)
        rows = torch.cat([model.head.weight[:2], model.stem.weight[2:]])
        return (
            F.linear(batch, stacked).square().mean() + F.linear(batch, rows.t()).square().mean()
        ) / stacked.norm()


@case
class QuestionsOutsideAStep(Case):
    """Names, shapes, dtypes and devices asked for at any time"""

    def train(self, run):
        super().train(run)
        for name, p in run.model.named_parameters():
            run.log(
                name,
                tuple(p.shape),
                p.numel(),
                str(p.dtype),
                str(p.device),
                p.requires_grad,
                p.ndim,
                p.is_leaf,
            )
            run.log(
                p.is_contiguous(),
                p.is_floating_point(),
                p.element_size(),
                p.itemsize,
                p.nbytes,
                len(p),
                p.stride(),
            )
            run.log(
                isinstance(p, nn.Parameter),
                p in {p: 0},
                tuple(torch.empty_like(p, device="meta").shape),
            )
        run.log(
            sorted(run.model.state_dict(keep_vars=True))
            == sorted(n for n, _ in run.model.named_parameters())
        )
        run.log(sum(p.numel() for p in run.model.parameters()))


@case
class ReadOutsideAStep(Case):
    """A value read outside a step"""

    def train(self, run):
        super().train(run)
        run.log(run.model.head.weight.detach().sum())


@case
class ReadWhenGathered(Case):
    """Values read inside `gathered`"""

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            run.log(*(p for p in run.model.parameters()))
            run.log(*run.model.state_dict().values())
        with run.gathered(run.model.blocks[1]):
            run.log(run.model.blocks[1].up.weight @ torch.ones(DIM))
        with run.gathered(run.model.blocks[1].up.weight):
            run.log(run.model.blocks[1].up.weight)
        with run.gathered([run.model.head.weight, run.model.blocks[1].up.bias]):
            run.log(run.model.head.weight, run.model.blocks[1].up.bias)
        super().train(run)


@case
class GatheredTwice(Case):
    """A tied weight named twice in `gathered`, to be read and to be changed"""

    pitfalls = (6,)

    def model(self):
        model = super().model()
        model.head.weight = model.stem.weight
        return model

    def train(self, run):
        super().train(run)
        with run.gathered([run.model.stem.weight, run.model.head.weight]):
            run.log(run.model.stem.weight)
        super().train(run)
        tied = [*run.model.stem.parameters(), *run.model.head.parameters()]
        with run.gathered((p for p in tied), modify=True), torch.no_grad():
            run.model.head.weight.mul_(0.5)
        super().train(run)


@case
class WriteWithoutModify(Case):
    """A write inside `gathered` without `modify=True`"""

    refused = "'head.weight' was changed inside `gathered`, and the change is lost"

    def train(self, run):
        super().train(run)
        with run.gathered(run.model), torch.no_grad():
            run.model.head.weight.mul_(2.0)
        super().train(run)


@case
class WriteToDataWithoutModify(WriteWithoutModify):
    """A write to `.data` inside `gathered` without `modify=True`"""

    def train(self, run):
        Case.train(self, run)
        with run.gathered(run.model):
            run.model.head.weight.data.mul_(2.0)
        Case.train(self, run)


@case
class ForwardWhenGathered(Case):
    """A forward inside `gathered`"""

    def train(self, run):
        super().train(run)
        with run.gathered(run.model), torch.no_grad():
            run.log(run.model(self.batch(0, 0)))
        super().train(run)


@case
class StateDictWhenGathered(Case):
    """`state_dict` saved and loaded inside `gathered`"""

    pitfalls = (32, 33)

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            state = {k: v.clone() for k, v in run.model.state_dict().items()}
        run.log(*state.values())
        super().train(run)
        with run.gathered(run.model, modify=True):
            run.model.load_state_dict(state)
        super().train(run)


@case
class LoadStateDict(Case):
    """`load_state_dict` at any time"""

    pitfalls = (31, 33)

    def train(self, run):
        super().train(run)
        torch.manual_seed(5)
        run.model.load_state_dict(self.model().state_dict())
        super().train(run)


@case
class LoadStateDictAssign(Case):
    """`load_state_dict(assign=True)`"""

    pitfalls = (33,)
    refused = refused_on_one = (
        "was added, replaced or removed after the model was sharded.*configure_model"
    )

    def train(self, run):
        super().train(run)
        torch.manual_seed(5)
        run.model.load_state_dict(self.model().state_dict(), assign=True)
        for p in run.model.parameters():
            p.requires_grad_()
        super().train(run)


@case
class FunctionalCall(Case):
    """`torch.func.functional_call` with other values for some parameters"""

    def loss(self, model, batch):
        values = {"blocks.1.up.weight": model.blocks[1].up.weight * 2, "head.bias": torch.ones(DIM)}
        return torch.func.functional_call(model, values, (batch,)).square().mean()


# ---- writing ---------------------------------------------------------------------------------


@case
class InitializedAfterSetUp(Case):
    """`init.normal_`, `zero_`, `fill_` after set-up"""

    def train(self, run):
        with torch.no_grad():
            nn.init.constant_(run.model.head.weight, 0.3)
            run.model.blocks[0].up.bias.zero_()
            run.model.stem.weight.fill_(0.1)
        super().train(run)


@case
class CopiedInto(Case):
    """`copy_` into a parameter, between steps and in a step"""

    pitfalls = (31,)

    def train(self, run):
        super().train(run)
        with torch.no_grad():
            run.model.head.weight.copy_(torch.eye(DIM))
            run.model.blocks[2].up.bias.copy_(torch.tensor(0.5))
        super().train(run)

        def loss(model):
            with torch.no_grad():
                model.stem.weight.copy_(model.head.weight)
            return self.loss(model, self.batch(7, run.rank))

        run.train_step(loss)


@case
class SurgeryWhenGathered(Case):
    """Any writing inside `gathered(modify=True)`"""

    def train(self, run):
        super().train(run)
        with run.gathered(run.model, modify=True), torch.no_grad():
            run.model.head.weight.mul_(2).clamp_(-0.5, 0.5)
            run.model.blocks[0].up.weight[3] = 0
            run.model.blocks[1].up.weight.data = torch.eye(2 * DIM, DIM)
            nn.init.ones_(run.model.blocks[1].norm.weight)
        super().train(run)


@case
class MultipliedInPlace(Case):
    """`p.mul_()` between steps"""

    def train(self, run):
        super().train(run)
        with torch.no_grad():
            run.model.head.weight.mul_(0.5)
        super().train(run)


@case
class DataReplaced(Case):
    """`p.data = ...` between steps"""

    def train(self, run):
        super().train(run)
        run.model.head.weight.data = torch.eye(DIM)
        super().train(run)


@case
class ClampedInForward(Case):
    """A weight clamped in its own forward"""

    class Clamped(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def model(self):
        return Chain(*(self.Clamped() for _ in range(4)))


@case
class DataClampedInForward(ClampedInForward):
    """A weight's `.data` clamped in its own forward"""

    class Clamped(Block):
        def forward(self, x):
            self.up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)


class Doubled(nn.Module):
    def forward(self, halves):
        return 2 * halves

    def right_inverse(self, weight):
        return weight / 2


@case
class DataClampedAfterUse(ClampedInForward):
    """A weight's `.data` clamped at the end of its own forward, when autograd has saved the
    weight
    """

    class Clamped(Block):
        def forward(self, x):
            x = super().forward(x)
            self.up.weight.data.clamp_(-0.1, 0.1)
            return x


@case
class DataClampedInCompiledForward(ClampedInForward):
    """A weight's `.data` clamped in a compiled forward (aot_eager)"""

    pitfalls = (41,)
    timeout = 60.0

    def model(self):
        model = Chain(*(DataClampedInForward.Clamped() for _ in range(4)))
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model


@case
class DataAssignedInForward(ClampedInForward):
    """`p.data = ...` in the forward of its unit"""

    class Clamped(Block):
        def forward(self, x):
            self.up.weight.data = self.up.weight.data.clamp(-0.1, 0.1)
            return super().forward(x)


class Square(Block):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.square(super().forward(x))


@case
class DataTransposedInForward(ClampedInForward):
    """`p.data = p.data.t()` of a square weight in the forward of its unit"""

    class Clamped(Square):
        def forward(self, x):
            self.square.weight.data = self.square.weight.data.t()
            return super().forward(x)


@case
class CopiedInForward(ClampedInForward):
    """A module deep-copied in its own forward"""

    class Clamped(Block):
        def forward(self, x):
            copied = copy.deepcopy(self.up)
            copied.weight.data = copied.weight.data[:4]
            assert type(copied.weight) is nn.Parameter
            return super().forward(x) + copied.weight.detach().sum()


@case
class ParameterReplaced(Case):
    """A parameter replaced by another after set-up"""

    pitfalls = (24,)
    refused = refused_on_one = (
        "was added, replaced or removed after the model was sharded.*configure_model"
    )

    def train(self, run):
        super().train(run)
        run.model.head.weight = nn.Parameter(torch.eye(DIM))
        super().train(run)


@case
class ParameterAdded(Case):
    """A module added after set-up"""

    pitfalls = (24,)
    refused = refused_on_one = (
        "was added, replaced or removed after the model was sharded.*configure_model"
    )

    def train(self, run):
        super().train(run)
        run.model.blocks.append(Block())
        super().train(run)


# ---- copies ----------------------------------------------------------------------------------


@case
class DeepcopyBefore(Case):
    """`copy.deepcopy` before set-up"""

    pitfalls = (34,)

    def model(self):
        return copy.deepcopy(super().model())

    def train(self, run):
        teacher = copy.deepcopy(self.model())
        run.log(*(p.detach() for p in teacher.parameters()))
        super().train(run)


@case
class DeepcopyAfter(Case):
    """`copy.deepcopy` after set-up"""

    pitfalls = (34,)

    def train(self, run):
        super().train(run)
        run.log(*(p.detach() for p in copy.deepcopy(run.model).parameters()))


@case
class DeepcopyWhenGathered(Case):
    """`copy.deepcopy` inside `gathered`; the copy is an ordinary module"""

    pitfalls = (34,)

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            teacher = copy.deepcopy(run.model)
        if run.rank == 0:
            teacher(self.batch(0, 0))  # without the others
        super().train(run)
        run.log(teacher(self.batch(0, 0)), *(p.detach() for p in teacher.parameters()))
        teacher(self.batch(0, 0)).sum().backward()
        run.log(*(p.grad for p in teacher.parameters()))


@case
class AveragedModelBefore(Case):
    """`AveragedModel` made before set-up, updated in `gathered`"""

    pitfalls = (34,)

    def prepare(self, model):
        self.averaged = AveragedModel(model)

    def train(self, run):
        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            with run.gathered(run.model):
                self.averaged.update_parameters(run.model)
        run.log(*(p.detach() for p in self.averaged.parameters()))


@case
class AveragedModelUngathered(AveragedModelBefore):
    """`AveragedModel` made before set-up, updated between steps without `gathered`"""

    def train(self, run):
        Case.train(self, run)
        self.averaged.update_parameters(run.model)
        run.log(*(p.detach() for p in self.averaged.parameters()))


@case
class AveragedModelAfter(Case):
    """`AveragedModel` made after set-up"""

    pitfalls = (34,)

    def train(self, run):
        averaged = AveragedModel(run.model)
        super().train(run)
        run.log(*(p.detach() for p in averaged.parameters()))


@case
class PickleBefore(Case):
    """Pickling before set-up"""

    pitfalls = (34,)

    def model(self):
        return pickle.loads(pickle.dumps(super().model()))


@case
class PickleAfter(Case):
    """Pickling after set-up"""

    pitfalls = (34,)

    def train(self, run):
        super().train(run)
        file = io.BytesIO()
        torch.save(run.model, file)
        file.seek(0)
        run.log(*(p.detach() for p in torch.load(file, weights_only=False).parameters()))


@case
class PickleWhenGathered(Case):
    """Pickling inside `gathered`"""

    pitfalls = (34,)

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            data = pickle.dumps(run.model)
        copied = pickle.loads(data)
        run.log(*(p.detach() for p in copied.parameters()))
        if run.rank == 0:
            copied(self.batch(0, 0))  # without the others
        super().train(run)


# ---- sharing ---------------------------------------------------------------------------------


@case
class TiedAcrossUnits(Case):
    """A weight tied across units"""

    pitfalls = (6,)

    def model(self):
        model = Chain()
        model.head.weight = model.stem.weight
        return model


@case
class TiedBlocks(Case):
    """One block used at several depths"""

    pitfalls = (6, 15)

    def model(self):
        shared = Block()
        return Chain(shared, Block(), shared, Block(), shared)


@case
class TiedInsideBlocks(Case):
    """A sub-module shared by all blocks"""

    pitfalls = (6,)

    def model(self):
        model = Chain()
        for block in model.blocks:
            block.norm = model.blocks[0].norm
        return model

    def units(self, model):
        return [model.blocks[0].norm, *model.blocks]


@case
class TiedTransposed(Case):
    """A weight used transposed by another module"""

    pitfalls = (6, 7)

    def loss(self, model, batch):
        hidden = model(batch)
        return F.linear(hidden, model.stem.weight.t()).square().mean()


# ---- kinds of parameter ----------------------------------------------------------------------


class Kinds(Case):
    """Parameters that `extra` makes, in every block"""

    def extra(self) -> nn.Parameter:
        raise NotImplementedError

    def mix(self, x, extra):
        return x * extra

    def model(self):
        outer = self

        class Special(Block):
            def __init__(self):
                super().__init__()
                self.extra = outer.extra()

            def forward(self, x):
                return outer.mix(super().forward(x), self.extra)

        return Chain(*(Special() for _ in range(4)))


@case
class ScalarParameter(Kinds):
    """0-dim parameters"""

    pitfalls = (35,)

    def extra(self):
        return nn.Parameter(torch.tensor(0.5))


@case
class EmptyParameter(Kinds):
    """Parameters without elements"""

    pitfalls = (35,)

    def extra(self):
        return nn.Parameter(torch.empty(0, 3))

    def mix(self, x, extra):
        return x + extra.sum()


@case
class NonContiguousParameter(Kinds):
    """Non-contiguous parameters"""

    pitfalls = (35,)

    def extra(self):
        return nn.Parameter(0.1 * torch.randn(DIM, 2 * DIM).t()[::2])

    def mix(self, x, extra):
        return x @ extra


@case
class TransposedParameter(Kinds):
    """Parameters stored transposed"""

    pitfalls = (35,)

    def extra(self):
        return nn.Parameter(0.1 * torch.randn(DIM, DIM).t())

    def mix(self, x, extra):
        return x @ extra


@case
class ChannelsLastParameter(Kinds):
    """channels-last convolution weights"""

    pitfalls = (35,)

    def extra(self):
        return nn.Parameter(torch.randn(2, 2, 3, 3).to(memory_format=torch.channels_last))

    def mix(self, x, extra):
        return F.conv2d(x.view(1, 2, 4, 4), extra, padding=1).reshape(x.shape)


@case
class ComplexParameter(Kinds):
    """Complex parameters beside fp32 ones"""

    pitfalls = (37,)

    def extra(self):
        return nn.Parameter(torch.randn(DIM, dtype=torch.complex64))

    def mix(self, x, extra):
        return torch.view_as_real(x * extra).sum(-1)


@case
class ComplexModel(Case):
    """A model of complex parameters alone"""

    pitfalls = (37,)

    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(DIM, DIM, dtype=torch.complex64)

        def forward(self, x):
            return x + torch.tanh(self.up(x))

    def model(self):
        model = Chain(*(self.Rotated() for _ in range(4)))
        model.stem, model.head = (nn.Linear(DIM, DIM, dtype=torch.complex64) for _ in range(2))
        return model

    def loss(self, model, batch):
        return model(batch.to(torch.complex64)).abs().square().mean()


@case
class IntegerParameter(Kinds):
    """Integer parameters beside trained ones"""

    pitfalls = (36,)

    def extra(self):
        return nn.Parameter(torch.randint(0, 5, (DIM,)), requires_grad=False)


@case
class BoolParameter(Kinds):
    """Boolean parameters beside trained ones"""

    pitfalls = (36,)

    def extra(self):
        return nn.Parameter(torch.arange(DIM) % 2 == 0, requires_grad=False)


@case
class MixedDtypes(Kinds):
    """Trained parameters of several dtypes in one unit"""

    pitfalls = (36,)

    def extra(self):
        return nn.Parameter(torch.randn(DIM, dtype=torch.float64))

    def mix(self, x, extra):
        return x * extra.float()


@case
class Bfloat16Parameter(Kinds):
    """bfloat16 parameters beside fp32 ones"""

    pitfalls = (36,)

    def extra(self):
        return nn.Parameter(torch.ones(DIM, dtype=torch.bfloat16))


@case
class Float8Parameter(Kinds):
    """Frozen float8 parameters beside trained ones"""

    pitfalls = (36,)

    def extra(self):
        return nn.Parameter(
            torch.linspace(0.5, 1.5, DIM).to(torch.float8_e4m3fn), requires_grad=False
        )

    def mix(self, x, extra):
        return x * extra.float()


class NotDense(Kinds):
    """A frozen parameter that is added to the input"""

    pitfalls = (36,)

    def mix(self, x, extra):
        return x + extra.to_dense().sum()


@case
class SparseParameter(NotDense):
    """Parameters with a sparse layout"""

    refused = refused_on_one = (
        r"'blocks\.0\.extra' is a Parameter with layout torch\.sparse_coo; only dense.*buffer"
    )

    def extra(self):
        return nn.Parameter(torch.eye(DIM).to_sparse(), requires_grad=False)


class Scaled(torch.Tensor):
    """A tensor that wraps another, as quantized weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = [2 * arg.inner if isinstance(arg, cls) else arg for arg in args]
        result = func(*unwrapped, **(kwargs or {}))
        return (
            cls(result / 2)
            if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
            else result
        )


@case
class WrappedParameter(NotDense):
    """Parameters that are tensor subclasses around other tensors (quantized weights)"""

    refused = refused_on_one = (
        r"'blocks\.0\.extra' is a Scaled with layout torch\.strided; only dense.*buffer"
    )

    def extra(self):
        return nn.Parameter(Scaled(torch.eye(DIM)), requires_grad=False)

    def mix(self, x, extra):
        return x + extra.sum()


@case
class ParameterContainers(Kinds):
    """`ParameterList` and `ParameterDict`"""

    def extra(self):
        inner = nn.ParameterDict(
            {"a": nn.Parameter(torch.randn(DIM)), "b": nn.Parameter(torch.randn(DIM))}
        )
        return nn.ModuleList([nn.ParameterList([torch.randn(DIM), torch.randn(DIM)]), inner])

    def mix(self, x, extra):
        return x * extra[0][0] + extra[0][1] * extra[1]["a"] - extra[1]["b"]


@case
class RootParameter(Case):
    """A parameter of the model itself, beside its layers"""

    def model(self):
        model = Chain()
        model.scale = nn.Parameter(torch.randn(DIM))
        return model

    def loss(self, model, batch):
        return (model(batch) * model.scale).square().mean()


@case
class OwnParameterClass(Kinds):
    """A subclass of `nn.Parameter`"""

    class Tagged(nn.Parameter):
        pass

    def extra(self):
        return self.Tagged(torch.randn(DIM))

    def train(self, run: Run):
        super().train(run)
        if run.refuses:
            run.step(lambda model: run.log(type(model.blocks[0].extra + 1)))
            assert run.logged.pop() is torch.Tensor


@case
class UnregisteredParameter(Case):
    """A parameter in a plain list"""

    def model(self):
        model = Chain()
        model.hidden = [nn.Parameter(torch.ones(DIM))]
        return model

    def loss(self, model, batch):
        return (model(batch) * model.hidden[0]).square().mean()


@case
class SharedMemory(Case):
    """Two parameters whose `.data` is the same"""

    refused = refused_on_one = "'head.weight' and 'stem.weight' share memory.*the same parameter"

    def model(self):
        model = Chain()
        model.head.weight.data = model.stem.weight.data
        return model


@case
class BufferOfAParameter(Case):
    """A buffer that shares memory with a parameter"""

    refused = refused_on_one = "'copy' and 'stem.weight' share memory.*clone"

    def model(self):
        model = Chain()
        model.register_buffer("copy", model.stem.weight.detach())
        return model


@case
class SiblingWrittenInGathered(Case):
    """Inside `gathered` of one parameter, with an evaluation before, another of the same layer
    written by `load_state_dict`
    """

    def between(self, run):
        model = run.model
        with torch.no_grad():
            run.step(lambda model: self.loss(model, self.batch(9, run.rank)))
        with run.gathered([model.head.weight], modify=True), torch.no_grad():
            model.head.load_state_dict({"bias": torch.linspace(0.1, 0.8, DIM)}, strict=False)
            model.head.weight.mul_(0.9)
            run.log(model.head.weight.clone())


@case
class TargetNetwork(Case):
    """A frozen copy that follows the weights by `copy_` in the step"""

    def model(self):
        model = Chain()
        model.target = copy.deepcopy(model.blocks).requires_grad_(False)
        return model

    def optimizers(self, model):
        return [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]

    def loss(self, model, batch):
        wanted = batch
        with torch.no_grad():
            for slow, fast in zip(
                model.target.parameters(), model.blocks.parameters(), strict=True
            ):
                slow.copy_(0.9 * slow + 0.1 * fast)
            for block in model.target:
                wanted = block(wanted)
        return (model(batch) - wanted).square().mean()


@case
class TargetNetworkInOneUnit(TargetNetwork):
    """A small frozen copy, in one unit with what it follows, that is changed by `copy_` after the
    other's forward
    """

    pitfalls = (34,)
    small_numel = 1 << 18

    def loss(self, model, batch):
        out = wanted = model(batch)
        with torch.no_grad():
            for slow, fast in zip(
                model.target.parameters(), model.blocks.parameters(), strict=True
            ):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            for block in model.target:
                wanted = block(wanted)
        return (out - wanted).square().mean()
