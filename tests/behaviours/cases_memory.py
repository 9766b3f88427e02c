"""Ways to the memory of a weight past torch's dispatcher and autograd."""

import ctypes

import torch
from torch import as_tensor, asarray, nn, tensor

from .cases_layers import Uncounted
from .cases_outputs import Blocks, NoneOutput
from .harness import DIM, Block, Case, case

KEPT = r"A view .* of parameter 'blocks\.\d\.up\.bias' \(unit blocks\.\d\) was kept after.*clone"
TAKEN = r"would touch the memory of parameter 'blocks\.0\.up\.weight'.*read `parameter\.detach\(\)`"
A_NUMBER = (
    r"argument '{}' .*not parameter 'blocks\.0\.{}' \(unit blocks\.0\), which is sharded.*give its"
    r" `\.item\(\)`"
)


class KeptBias(Blocks):
    """Every block keeps a view of its bias, which `use` sees after the model's forward"""

    pitfalls = (7,)

    def use(self, out, kept):
        raise NotImplementedError

    def run(self, block, x):
        block.kept = block.up.bias.view(2, DIM)
        return Block.forward(block, x)

    def loss(self, model, batch):
        out = model(batch)
        for block in model.blocks:
            out = self.use(out, block.kept)
        return out.square().mean()


@case
class KeptViewAdded(KeptBias):
    """A view of a weight kept by the module and added after its forward"""

    def use(self, out, kept):
        return out + kept[0]


@case
class KeptViewReadWithoutGradients(KeptBias):
    """A view of a weight kept by the module and read under `no_grad` after its forward"""

    def use(self, out, kept):
        with torch.no_grad():
            factor = kept.square().sum()
        return out * factor


@case
class KeptViewAddedInAnotherUnit(KeptBias):
    """A view of a weight kept by a module and added in the forward of another, which has its memory
    then
    """

    def run(self, block, x):
        self.kept.append(block.up.bias.view(2, DIM))
        return Block.forward(block, x + self.kept[0][0])

    def loss(self, model, batch):
        self.kept = []
        return Case.loss(self, model, batch)


@case
class PassedViewAdded(KeptBias):
    """A view of a weight left in a dict by a module, and taken from it and added in the forward of
    another
    """

    def run(self, block, x):
        if "bias" not in self.left:
            self.left["bias"] = block.up.bias.view(2, DIM)
        elif block is self.last:
            x = x + self.left.pop("bias")[0]
        return Block.forward(block, x)

    def loss(self, model, batch):
        self.left, self.last = {}, model.blocks[-1]
        return Case.loss(self, model, batch)


@case
class KeptViewWritten(KeptBias):
    """A view of a weight kept by the module and written to after its forward"""

    refused = KEPT

    def use(self, out, kept):
        with torch.no_grad():
            kept.zero_()
        return out


@case
class KeptArray(KeptBias):
    """A numpy array of a weight kept by the module and read after its forward"""

    on_host = True
    refused = KEPT

    def run(self, block, x):
        block.kept = block.up.bias.detach().numpy()
        return Block.forward(block, x)

    def use(self, out, kept):
        return out * float(kept.sum())


@case
class WrittenAsNumpy(Blocks):
    """A weight written as a numpy array in its own forward"""

    on_host = True

    def run(self, block, x):
        block.up.bias.detach().numpy()[:] = 0.5
        return Block.forward(block, x)


@case
class WrittenByNumbers(Blocks):
    """A weight written by `apply_`, `map_` and `map2_` in its own forward"""

    on_host = True

    def run(self, block, x):
        ones, bias = torch.ones(DIM), block.norm.bias.detach()
        bias.apply_(lambda number: number - 0.5)
        bias.map_(ones, lambda number, one: number * 0.5 + one)
        block.norm.weight.detach().map2_(ones, ones, lambda number, one, other: 0.5 * number)
        return Block.forward(block, x)


@case
class WrittenByFusedKernel(Blocks):
    """Weights stepped by fused kernels of optimizers, and by a fused optimizer of their own, in
    their forward
    """

    def run(self, block, x):
        weight, bias = block.norm.weight, block.norm.bias.detach()
        factors = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
        kinds = {"nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_([bias], [torch.ones(DIM)], [], **factors, **kinds)
        own = torch.optim.AdamW([weight], lr=0.1, fused=True)
        weight.grad = torch.ones(DIM)
        own.step()
        weight.grad = None
        return Block.forward(block, x)


@case
class WrittenByDlpack(Blocks):
    """A weight written by DLPack in its own forward"""

    def run(self, block, x):
        torch.from_dlpack(block.norm.weight.detach()).mul_(0.5)
        torch.from_dlpack(torch.to_dlpack(block.norm.bias.detach())).fill_(0.5)
        return Block.forward(block, x)


@case
class WrittenByAddress(Blocks):
    """A weight written at its address (`data_ptr`), as a kernel of one's own would, in its own
    forward
    """

    on_host = True

    def run(self, block, x):
        (ctypes.c_float * (2 * DIM)).from_address(block.up.bias.data_ptr())[:] = [0.5] * (2 * DIM)
        return Block.forward(block, x)


class Taken(Case):
    """`read` takes the memory of a weight outside its unit's forward"""

    refused = TAKEN

    def read(self, weight):
        raise NotImplementedError

    def loss(self, model, batch):
        out = model(batch)
        return out.square().mean() + self.read(model.blocks[0].up.weight).sum() / 8


@case
class DataOfAnotherTensor(Taken):
    """`other.data = weight` outside its unit's forward, then read"""

    def read(self, weight):
        other = torch.empty(0)
        other.data = weight
        return other


@case
class SetToWeight(Taken):
    """`other.set_(weight)` outside its unit's forward, then read"""

    def read(self, weight):
        with torch.no_grad():
            return torch.empty(0).set_(weight)


@case
class NewOfWeight(Taken):
    """`other.new(weight)` outside its unit's forward"""

    def read(self, weight):
        return torch.empty(0).new(weight)


@case
class LegacyConstructor(Taken):
    """`torch.Tensor(weight)`, the constructor of old, outside its unit's forward"""

    on_host = True

    def read(self, weight):
        return torch.Tensor(weight)


@case
class FrozenNumber(Case):
    """A frozen 0-dim weight as a number (`torch.add(x, y, alpha=weight)`) outside its unit's
    forward
    """

    refused = A_NUMBER.format("alpha", "scale")

    def model(self):
        model = super().model()
        for k, block in enumerate(model.blocks):
            block.scale = nn.Parameter(torch.tensor(0.2 + k), requires_grad=False)
        return model

    def loss(self, model, batch):
        out = model(batch)
        return torch.add(out, out, alpha=model.blocks[0].scale).square().mean()


@case
class FilledWithFrozenNumber(FrozenNumber):
    """`torch.full_like(weight, scale)` and `weight.new_full(size, scale)` with a frozen 0-dim
    weight, outside their forward
    """

    refused = None

    def loss(self, model, batch):
        weight, scale = model.head.weight, model.blocks[0].scale
        return (
            (
                model(batch) @ torch.full_like(weight, scale).t()
                + weight.new_full((len(weight),), scale)
            )
            .square()
            .mean()
        )


@case
class NewTensorOfWeight(Taken):
    """`other.new_tensor(weight)` outside its unit's forward"""

    refused = None

    def read(self, weight):
        return torch.empty(0).new_tensor(weight)


@case
class FunctionKeepingView(Blocks):
    """A custom Function that keeps a view of a weight on `ctx`, the result left in an attribute"""

    pitfalls = (7, 13)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.x, ctx.view = x, weight.t()
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            return grad @ ctx.view.t(), grad.t() @ ctx.x

    def run(self, block, x):
        block.result = x + block.down(self.Product.apply(x, block.up.weight))

    loss = NoneOutput.loss


@case
class FunctionCalledByAlias(FunctionKeepingView):
    """A custom Function that keeps a view of a weight on `ctx`, called by a name for its `apply`,
    in place on a view
    """

    class Product(FunctionKeepingView.Product):
        @staticmethod
        def forward(ctx, y, x, weight):
            ctx.x, ctx.view = x, weight.t()
            ctx.mark_dirty(y)
            return y.add_(x @ weight.t())

        @staticmethod
        def backward(ctx, grad):
            return grad, grad @ ctx.view.t(), grad.t() @ ctx.x

    product = Product.apply  # before any model is sharded

    def run(self, block, x):
        y = torch.zeros(len(x), 4 * DIM) * x.sum()
        type(self).product(y[:, : 2 * DIM], x, block.up.weight)
        block.result = x + block.down(y[:, : 2 * DIM])


@case
class FunctionKeepingOthers(FunctionKeepingView):
    """A custom Function that keeps views on `ctx` in a dict that layers share, and returns the
    outputs of earlier ones
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, shared):
            ctx.x, ctx.shared, ctx.number = x, shared, len(shared)
            shared[ctx.number] = weight.t()
            earlier = {"outputs": list(shared.get("outputs", ()))}
            return earlier, x @ weight.t()

        @staticmethod
        def backward(ctx, _, grad):
            ctx.shared["visits"] = ctx.shared.get("visits", 0) + 1
            return grad @ ctx.shared[ctx.number].t(), grad.t() @ ctx.x, None

    def run(self, block, x):
        _, y = self.Product.apply(x, block.up.weight, self.shared)
        self.shared.setdefault("outputs", []).append(y)
        block.result = x + block.down(y)

    def loss(self, model, batch):
        self.shared = {}
        loss = super().loss(model, batch)
        assert loss.grad_fn is not None
        return loss


class PenalizedProduct(torch.autograd.Function):
    """Keeps what it was given, which has a graph that leads to the weight."""

    @staticmethod
    def forward(ctx, x, turned):
        ctx.x, ctx.turned = x, turned
        return x @ turned

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.turned.t(), ctx.x.t() @ grad


@case
class FunctionDifferentiatedTwice(Blocks):
    """A custom Function that keeps a view of a weight on `ctx`, under a gradient penalty"""

    def run(self, block, x):
        return x + block.down(torch.tanh(PenalizedProduct.apply(x, block.up.weight.t())))

    def loss(self, model, batch):
        batch.requires_grad_()
        out = model(batch).square().mean()
        (grad,) = torch.autograd.grad(out, batch, create_graph=True)
        return out + grad.square().sum()


@case
class FunctionLeftAndDifferentiatedTwice(FunctionDifferentiatedTwice):
    """A custom Function that keeps a view of a weight on `ctx`, under a gradient penalty, the
    result left in an attribute
    """

    def run(self, block, x):
        block.result = super().run(block, x)

    def loss(self, model, batch):
        batch.requires_grad_()
        loss = NoneOutput.loss(self, model, batch)
        (grad,) = torch.autograd.grad(loss, batch, create_graph=True)
        return loss + grad.square().sum()


@case
class TypedConstructor(Taken):
    """`torch.FloatTensor(weight)` outside its unit's forward"""

    on_host = True

    def read(self, weight):
        return torch.FloatTensor(weight)


@case
class FunctionKeepingViews(FunctionKeepingView):
    """A custom Function that keeps views of a weight in a list in a dict on `ctx`, differentiated
    twice
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.x, ctx.views = x, {"parts": [weight[:DIM], weight.detach()[DIM:]], "scale": 1.0}
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            return grad @ torch.cat(ctx.views["parts"]) * ctx.views["scale"], grad.t() @ ctx.x

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        torch.autograd.grad(loss, model.stem.weight, retain_graph=True)
        return loss


@case
class ValueSharedByDlpack(Taken):
    """`torch.from_dlpack(weight.detach()).mul_()` outside its unit's forward"""

    refused = (
        "`__dlpack__` would share the memory of a copy of the value of parameter"
        " 'blocks.0.up.weight'.*clone"
    )

    def read(self, weight):
        return torch.from_dlpack(weight.detach()).mul_(0.5)


@case
class ValueStorageWritten(Taken):
    """`weight.detach().untyped_storage().fill_()` outside its unit's forward"""

    worlds = (2,)  # on one rank it is that of other weights, too
    refused = (
        "`untyped_storage` would share the memory of a copy of the value of parameter"
        " 'blocks.0.up.weight'.*clone"
    )

    def read(self, weight):
        weight.detach().untyped_storage().fill_(0)
        return weight


@case
class LentToAnotherTensor(Taken):
    """`other.data = weight.detach()` outside its unit's forward, then written"""

    refused = (
        r"`parameter\.data = \.\.\.` would share the memory of a copy of the value of parameter"
        r" 'blocks.0.up.weight'.*clone"
    )

    def read(self, weight):
        other = torch.empty(0)
        other.data = weight.detach()
        return other.mul_(0.5)


@case
class BuffersWrittenByNumbers(Uncounted):
    """Buffers written by `apply_` and `map_`"""

    on_host = True

    class Kept(Uncounted.Kept):
        def note(self, x):
            shift = float(x.detach().float().mean())
            self.mean.apply_(lambda number: 0.9 * number + shift)
            self.variance.map_(torch.ones(DIM), lambda number, one: number + shift * one)
            return x


@case
class BuffersWrittenByDlpack(Uncounted):
    """Buffers written by DLPack"""

    class Kept(Uncounted.Kept):
        def note(self, x):
            torch.from_dlpack(self.mean).add_(x.detach().float().mean(0))
            torch.from_dlpack(torch.to_dlpack(self.variance)).mul_(0.9)
            return x


@case
class TensorByName(Taken):
    """`tensor`, `as_tensor` and `asarray`, imported by their names, of a weight outside its unit's
    forward
    """

    refused = None

    def read(self, weight):
        # Up to torch 2.12 `asarray` would set `requires_grad` of the weight itself to False.
        return tensor(weight) + as_tensor(weight) + asarray(weight, requires_grad=True)


@case
class NumberInList(FrozenNumber):
    """`torch.tensor([scale, 1.0])` with a frozen 0-dim weight, outside its forward"""

    refused = None

    def loss(self, model, batch):
        scale = model.blocks[0].scale
        return (model(batch).square().mean() * torch.tensor([scale, 1.0])).sum()


@case
class IntNumber(FrozenNumber):
    """`x.roll(n, 0)`, `torch.arange(n)` and `[...][n]` with a frozen 0-dim weight of integers,
    outside its forward
    """

    refused = None

    def model(self):
        model = super().model()
        for k, block in enumerate(model.blocks):
            block.count = nn.Parameter(torch.tensor(1 + k), requires_grad=False)
        return model

    def loss(self, model, batch):
        out, n = model(batch), model.blocks[0].count
        return (
            (torch.roll(out, n, 0) * batch * torch.arange(n + 1)[n] * [1.0, 2.0, 3.0][n])
            .square()
            .mean()
        )


@case
class KeptNumber(FrozenNumber):
    """A number kept by a module (`weight.detach()[0]`), as a number (`torch.add(x, y, alpha=kept)`)
    after its forward
    """

    refused = (
        r"argument 'alpha' .*not a view .* of parameter 'blocks\.0\.norm\.weight'.*give its"
        r" `\.item\(\)`"
    )

    def prepare(self, model):
        first = model.blocks[0]
        first.register_forward_pre_hook(
            lambda block, _: setattr(block, "kept", block.norm.weight.detach()[0])
        )

    def loss(self, model, batch):
        out = model(batch)
        return torch.add(out, out, alpha=model.blocks[0].kept).square().mean()


@case
class KeptNumberAsked(KeptNumber):
    """A number kept by a module (`weight.detach()[0]`), asked for its value and size, and computed
    with, after its forward
    """

    refused = None

    def loss(self, model, batch):
        out, kept = model(batch), model.blocks[0].kept
        assert kept.shape == () and kept.numel() == 1
        return (out * kept).square().mean() * kept.item()


@case
class StorageInItsForward(Blocks):
    """`weight.untyped_storage().fill_()` in its own forward"""

    refused = refused_on_one = (
        r"`untyped_storage` of parameter 'blocks\.0\.norm\.bias' .* would give the memory of"
        r" others.*clone"
    )

    def run(self, block, x):
        block.norm.bias.untyped_storage().fill_(0)
        return Block.forward(block, x)


@case
class WrittenBySecondTensors(Blocks):
    """Weights written in their forward as `other` (`other.data = weight`, `other.set_(weight)`,
    `other.new(weight)`, ...)
    """

    on_host = True

    def run(self, block, x):
        others = torch.empty(0), torch.empty(0)
        others[0].data = block.norm.weight
        with torch.no_grad():
            others[1].set_(block.norm.bias)
            for other in (
                *others,
                torch.empty(0).new(block.up.bias),
                torch.Tensor(block.down.bias),
            ):
                other.mul_(0.9)
            torch.FloatTensor(block.down.weight).mul_(0.9)
        return Block.forward(block, x)


@case
class NumberFrozenAtRest(FrozenNumber):
    """A 0-dim weight that is frozen between steps, as a number (`torch.add(x, y, alpha=weight)`)
    outside its unit's forward
    """

    refused = A_NUMBER.format("alpha", "scale")

    def model(self):
        model = super().model()
        for block in model.blocks:
            block.scale.requires_grad_()
        return model

    def between(self, run):
        run.model.blocks[0].scale.requires_grad_(False)

    def loss(self, model, batch):
        if model.blocks[0].scale.requires_grad:
            return model(batch).square().mean()
        return super().loss(model, batch)
