"""Ways to the memory of a weight past torch's dispatcher and autograd."""

import torch
from torch import nn

from .cases_layers import Uncounted
from .cases_outputs import Blocks, NoneOutput
from .harness import DIM, Block, Case, case

KEPT = r"'blocks\.\d\.up\.bias' was changed in place after its unit's use"
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


class KeptArray(KeptBias):
    """A numpy array of a weight kept by the module and read after its forward"""

    on_host = True
    refused = KEPT

    def run(self, block, x):
        block.kept = block.up.bias.detach().numpy()
        return Block.forward(block, x)

    def use(self, out, kept):
        return out * float(kept.sum())


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
class NumberInList(FrozenNumber):
    """`torch.tensor([scale, 1.0])` with a frozen 0-dim weight, outside its forward"""

    refused = None

    def loss(self, model, batch):
        scale = model.blocks[0].scale
        return (model(batch).square().mean() * torch.tensor([scale, 1.0])).sum()


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
