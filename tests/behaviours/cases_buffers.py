"""Buffers: rank 0's count, whatever they are and whoever assigned them, and nothing else is written
to.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .harness import DIM, Block, Case, Chain, Run, case


class Synchronized(Case):
    """After a backward all ranks have rank 0's buffers, and see them."""

    pitfalls = (39,)

    def between(self, run: Run) -> None:
        run.begin_forward()
        for buffer in list(run.model.buffers()):
            if run.is_reference:
                value = buffer.detach().resolve_conj().clone().contiguous()
                dist.broadcast(value, 0)
                with torch.inference_mode():
                    buffer.copy_(value)
            run.log(buffer.detach().clone())


class OfBlocks(Synchronized):
    """Three blocks of the class `Kept`."""

    def model(self):
        return Chain(*(self.Kept() for _ in range(3)))


class Statistic(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))


# ---- assigned --------------------------------------------------------------------------------


class Remembering(nn.Linear):
    """A layer that keeps its last output."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.register_buffer("last", torch.zeros(4, DIM), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = y.detach()
        return y


@case
class BufferThatIsAnOutput(Case):
    """A buffer is assigned `output.detach()`: the outputs that a rank keeps stay its own"""

    pitfalls = (39,)

    def model(self):
        model = Chain()
        model.head = Remembering()
        return model

    def train(self, run):
        kept = []

        def loss(model, step):
            kept.append(model(self.batch(step, run.rank)))
            return kept[-1].square().mean()

        for step in range(self.steps):
            run.train_step(lambda model, step=step: loss(model, step))
        run.log(*kept)


@case
class BufferThatIsTheBatch(Case):
    """A buffer is assigned the batch, whose memory is the data set's: the data stay a rank's own"""

    pitfalls = (39,)

    class Kept(nn.Linear):
        def __init__(self):
            super().__init__(DIM, DIM)
            self.register_buffer("last", torch.zeros(4, DIM), persistent=False)

        def forward(self, x):
            self.last = x
            return super().forward(x)

    def model(self):
        model = Chain()
        model.stem = self.Kept()
        return model

    def train(self, run):
        data = [self.batch(step, run.rank) for step in range(2)]
        for step in range(4):
            run.train_step(lambda model, step=step: self.loss(model, data[step % 2]))
        run.log(*data)


class Scaled(OfBlocks):
    class Kept(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.scale = self.scale * 0.9 + x.detach().abs().mean() * 0.1
            return super().forward(x / self.scale)


@case
class BufferAssignedTwoBackwards(Scaled):
    """A buffer assigned in forward, which autograd saves, and two backwards of one output"""

    def train(self, run):
        for step in range(self.steps):
            self.clear(run)
            (output,) = run.step(lambda model, step=step: [model(self.batch(step, run.rank))])
            losses = output.square().mean(), output.mean()
            for loss in losses:
                with run.backward():
                    loss.backward(retain_graph=True)
            run.log(*losses)
            self.between(run)
            run.optimizer.step()


@case
class BufferAssignedTwoForwards(Scaled):
    """A buffer assigned in forward, which autograd saves: the forwards of two micro-batches, then
    their backwards
    """

    def train(self, run):
        for step in range(self.steps):
            self.clear(run)
            batches = [self.batch(2 * step + micro, run.rank) for micro in range(2)]
            losses = [
                run.step(lambda model, batch=batch: self.loss(model, batch)) for batch in batches
            ]
            for loss in losses:
                with run.backward():
                    loss.backward()
            run.log(*losses)
            self.between(run)
            run.optimizer.step()


@case
class BufferAssignedAndShared(OfBlocks):
    """One tensor assigned to a buffer of several modules, of which one writes it in place"""

    class Kept(Statistic):
        def forward(self, x):
            return super().forward(x) + self.mean.clone()

    def loss(self, model, batch):
        mean = model.blocks[0].mean + batch.mean(0)
        for block in model.blocks:
            block.mean = mean
        loss = super().loss(model, batch)
        model.blocks[1].mean *= 0.5
        return loss

    def between(self, run):
        run.begin_forward()
        mean = run.model.blocks[0].mean
        if run.is_reference:
            dist.broadcast(mean, 0)
        run.log(mean.clone(), all(block.mean is mean for block in run.model.blocks))


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return x + self.mean


@case
class BufferAssignedByAScript(OfBlocks):
    """A buffer that a scripted module assigns"""

    timeout = 60.0

    class Kept(Block):
        def __init__(self):
            super().__init__()
            self.smoothed = torch.jit.script(Smoothed())

        def forward(self, x):
            return super().forward(self.smoothed(x))


# ---- registered late -------------------------------------------------------------------------


@case
class BufferOfNone(OfBlocks):
    """A buffer registered as None, and assigned in the first forward"""

    class Kept(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", None)

        def forward(self, x):
            mean = x.detach().mean(0)
            self.mean = mean if self.mean is None else self.mean * 0.9 + mean
            return super().forward(x) + self.mean * 0.1


@case
class BufferRegisteredInForward(OfBlocks):
    """A buffer registered in the first forward, and written in place"""

    class Kept(Block):
        def forward(self, x):
            if not hasattr(self, "mean"):
                self.register_buffer("mean", torch.zeros(DIM))
            self.mean += x.detach().mean(0)
            return super().forward(x) + self.mean * 0.1


@case
class BufferRegisteredOnOneRank(OfBlocks):
    """A buffer that one rank registers a step before the others: each rank's own until all have
    it
    """

    class Kept(BufferRegisteredInForward.Kept):
        steps = 0

        def forward(self, x):
            self.steps += 1
            if dist.get_rank() == 0 and self.steps == 1:
                return Block.forward(self, x)
            return super().forward(x)

    def between(self, run):
        if run.model.blocks[0].steps > 1:
            super().between(run)


@case
class BuffersOfALateModule(Synchronized):
    """A batch norm without parameters that is added to the model between steps, and later
    replaced
    """

    def train(self, run):
        def loss(model, step):
            y = model(self.batch(step, run.rank))
            return (model.norm(y) if step else y).abs().mean()

        for step in range(4):
            if step in (1, 3):
                run.model.norm = nn.BatchNorm1d(DIM, affine=False)
            run.train_step(lambda model, step=step: loss(model, step))


# ---- written unseen --------------------------------------------------------------------------


@case
class BufferAssignedInInferenceMode(OfBlocks):
    """A buffer assigned in an evaluation under `inference_mode`, and written in place in the next
    ones
    """

    class Kept(Statistic):
        def forward(self, x):
            if self.mean.is_inference():
                if not self.training:
                    self.mean += x.mean(0)
            elif not self.training:
                self.mean = self.mean + x.mean(0)
            return super().forward(x) + self.mean.clone() * 0.1

    def train(self, run):
        for step in range(4):
            run.model.eval()
            with torch.inference_mode():
                run.step(lambda model, step=step: model(self.batch(50 + step, run.rank)))
            run.model.train()
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
