"""Layers of researchers: weights that are read, replaced, merged, shared or stored in other ways
than torch's own layers do.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn import functional as F

from .cases_outputs import Blocks, NoneOutput
from .harness import DIM, Block, Case, Chain, case

# ---- parametrizations --------------------------------------------------------------------------


# ---- weights made of weights -------------------------------------------------------------------


@case
class LowRankMerged(Case):
    """Low-rank adapters merged into `weight.data` in evaluation and taken out again in training, in
    the forward
    """

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(DIM, DIM).requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, DIM))
            self.b = nn.Parameter(torch.zeros(DIM, 2))
            self.merged = False

        def forward(self, x):
            if self.merged == self.training:
                sign = -1 if self.training else 1
                self.layer.weight.data += sign * (self.b @ self.a).detach()
                self.merged = not self.merged
            out = self.layer(x)
            return x + torch.tanh(
                out if self.merged else out + F.linear(F.linear(x, self.a), self.b)
            )

    def model(self):
        return Chain(*(self.Adapter() for _ in range(4)))

    def optimizers(self, model):
        return [
            torch.optim.SGD(
                [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
            )
        ]

    def train(self, run):
        for _ in range(2):
            super().train(run)
            run.model.eval()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    run.log(run.step(lambda model: self.loss(model, self.batch(7, 0))).clone())
            run.model.train()
        super().train(run)


@case
class ViewKeptFromTheStart(Case):
    """A view of a weight made in `__init__`, kept as an attribute and used in the step"""

    refused = refused_on_one = "'decoder' and 'stem.weight' share memory.*clone"

    def model(self):
        model = Chain()
        model.decoder = model.stem.weight.t()
        return model

    def loss(self, model, batch):
        return (model(batch) @ model.decoder).square().mean()


@case
class CodebookAsParameter(Case):
    """A codebook in a frozen parameter, that a forward moves by statistics of all ranks (`.data`,
    `index_add_`)
    """

    class Codebook(Block):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(6, DIM), requires_grad=False)

        def forward(self, x):
            index = torch.cdist(x, self.codes).argmin(-1)
            quantized = x + (self.codes[index] - x).detach()
            if self.training:
                sums = torch.zeros(6, DIM).index_add_(0, index, x.detach())
                dist.all_reduce(sums)
                self.codes.data.mul_(0.9).add_(sums, alpha=0.01)
            return super().forward(quantized)

    def model(self):
        return Chain(*(self.Codebook() for _ in range(3)))

    def optimizers(self, model):
        return [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]

    def train(self, run):
        super().train(run)
        run.model.eval()
        with torch.no_grad():
            run.log(run.step(lambda model: self.loss(model, self.batch(7, 0))))
        run.model.train()
        super().train(run)


# ---- parameters as numbers, indices, masks -----------------------------------------------------


@case
class SparseValues(Blocks):
    """Parameters as the values of a sparse matrix, in their own forward, the result left in an
    attribute
    """

    def run(self, block, x):
        index = torch.stack([torch.arange(DIM), torch.arange(DIM).flip(0)])
        matrix = torch.sparse_coo_tensor(index, block.norm.weight, (DIM, DIM))
        block.result = Block.forward(block, x) + torch.sparse.mm(matrix, x.t()).t()

    loss = NoneOutput.loss


@case
class SparseRowsOfValues(Blocks):
    """Parameters as the values of a sparse matrix in rows (CSR), in their own forward"""

    def run(self, block, x):
        rows, columns = torch.arange(DIM + 1), torch.arange(DIM).flip(0)
        matrix = torch.sparse_csr_tensor(rows, columns, block.norm.weight, (DIM, DIM))
        block.result = Block.forward(block, x) + (matrix @ x.t()).t()

    loss = NoneOutput.loss


# ---- modules called, copied and found in other ways ----------------------------------------------


class Uncounted(Case):
    """Buffers written so that torch does not count it, from each rank's own batch; the next forward
    reads rank 0's
    """

    pitfalls = (39,)

    class Kept(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(DIM))
            self.register_buffer("variance", torch.ones(DIM))

        def forward(self, x):
            return super().forward(self.note(x)) + self.mean * self.variance

    def model(self):
        return Chain(*(self.Kept() for _ in range(3)))

    def between(self, run):
        run.begin_forward()
        if run.is_reference:
            for buffer in run.model.buffers():
                dist.broadcast(buffer, 0)
        run.log(*run.model.buffers())


@case
class BuffersWrittenByData(Uncounted):
    """Buffers written by `buffer.data`, as codebooks often are"""

    class Kept(Uncounted.Kept):
        def note(self, x):
            values = x.detach().float()
            self.mean.data.lerp_(values.mean(0), 0.1)
            self.variance.data = self.variance.data * 0.9 + values.var(0) * 0.1
            return x


@case
class BuffersWrittenByDataCompiled(BuffersWrittenByData):
    """Buffers written by `buffer.data` in a compiled block (aot_eager)"""

    timeout = 60.0

    def model(self):
        model = super().model()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model


@case
class BuffersWrittenAsArrays(Uncounted):
    """Buffers written as arrays of numpy"""

    on_host = True

    class Kept(Uncounted.Kept):
        def note(self, x):
            mean = self.mean.numpy()
            mean += x.detach().float().mean(0).numpy()
            return x


@case
class BuffersOfFunctionalBatchNorm(Uncounted):
    """Buffers that are running statistics of `F.batch_norm` and `torch.native_batch_norm`, twice in
    a forward
    """

    class Kept(Uncounted.Kept):
        def note(self, x):
            x = F.batch_norm(x, self.mean, self.variance, training=True)
            return torch.native_batch_norm(
                x + x.square(), None, None, self.mean, self.variance, True, 0.1, 1e-5
            )[0]


@case
class BuffersOfAScript(Uncounted):
    """Buffers that a scripted module writes by `.data` and `F.batch_norm`"""

    timeout = 60.0

    class Kept(Uncounted.Kept):
        def __init__(self):
            super().__init__()
            self.note = torch.jit.script(Noting())


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))
        self.register_buffer("variance", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.add_(x.detach().mean(0))
        return F.batch_norm(x, self.mean, self.variance, training=True) + self.mean


@case
class BuffersOfFusedObservers(Uncounted):
    """Ranges and scales of quantization-aware training (`FusedMovingAvgObsFakeQuantize`)"""

    class Kept(Uncounted.Kept):
        def __init__(self):
            super().__init__()
            self.note = FusedMovingAvgObsFakeQuantize(quant_min=0, quant_max=255)
