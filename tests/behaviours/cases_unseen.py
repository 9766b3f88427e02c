"""Ways to the memory of a weight past torch's dispatcher and autograd: without `debug` zero3 sees none of them.

A row whose program becomes right or an error loses its `unseen`, and may move to another file.
"""

import torch

from .cases_outputs import Blocks, NoneOutput
from .harness import DIM, NAN, Block, Case, case

WRITTEN_AT_REST = r"The memory of unit blocks\.\d was written while its parameters rested.*gathered\(module, modify=True\)"
WRITTEN_IN_USE = r"Parameters of unit blocks\.\d \(blocks\.\d\.up\.bias\) were changed through a raw alias.*torch.no_grad"


class KeptBias(Blocks):
    """Every block keeps a view of its bias, which `use` sees after the model's forward"""

    unseen = NAN
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
    """A view of a weight kept by a module and added in the forward of another, which has its memory then"""

    def run(self, block, x):
        self.kept.append(block.up.bias.view(2, DIM))
        return Block.forward(block, x + self.kept[0][0])

    def loss(self, model, batch):
        self.kept = []
        return Case.loss(self, model, batch)


@case
class KeptViewWritten(KeptBias):
    """A view of a weight kept by the module and written to after its forward"""

    unseen = WRITTEN_AT_REST

    def use(self, out, kept):
        with torch.no_grad():
            kept.zero_()
        return out


@case
class WrittenAsNumpy(Blocks):
    """A weight written as a numpy array, or by a pointer, in its own forward"""

    unseen = WRITTEN_IN_USE

    def run(self, block, x):
        block.up.bias.detach().numpy()[:] = 0.5
        return Block.forward(block, x)


@case
class DataOfAnotherTensor(Case):
    """`other.data = weight` outside its unit's forward, then read"""

    unseen = NAN

    def read(self, weight):
        other = torch.empty(0)
        other.data = weight
        return other

    def loss(self, model, batch):
        out = model(batch)
        return out.square().mean() + self.read(model.blocks[0].up.weight).square().mean()


@case
class NewTensorOfWeight(DataOfAnotherTensor):
    """`other.new_tensor(weight)` outside its unit's forward"""

    def read(self, weight):
        return torch.empty(0).new_tensor(weight)


@case
class FunctionKeepingView(Blocks):
    """A custom Function that keeps a view of a weight on `ctx`, the result left in an attribute"""

    unseen = r"NaN"
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
