"""What a forward returns and what becomes of it; who is called, when and how often."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from .harness import DIM, STEPS, Block, Case, Chain, case, seeded


class Blocks(Case):
    """A chain of blocks whose forward is `run`"""

    def run(self, block: Block, x: Any) -> Any:
        raise NotImplementedError

    def model(self):
        outer = self

        class Special(Block):
            def forward(self, x):
                return outer.run(self, x)

        return Chain(*(Special() for _ in range(4)))


@case
class ViewThenInPlace(Blocks):
    """A view as output, then changed in place by the caller"""

    pitfalls = (11,)

    def run(self, block, x):
        return Block.forward(block, x).view(2, 2, DIM)

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = block(x).mul_(1.5).add_(1).view(4, DIM)
            x += 1
        return model.head(x).square().mean()


@case
class ViewOfWeight(Blocks):
    """A view of a weight as output"""

    pitfalls = (7,)

    def run(self, block, x):
        return Block.forward(block, x), block.up.weight.t()

    def loss(self, model, batch):
        x, kept = model.stem(batch), []
        for block in model.blocks:
            x, weight = block(x)
            kept.append(weight)
        return (model.head(x) @ sum(kept)).square().mean()


@case
class DistributionAsOutput(Blocks):
    """A `torch.distributions` object around a weight as output, asked for a probability and for a
    sample
    """

    def run(self, block, x):
        return Block.forward(block, x), torch.distributions.Normal(block.up.bias[:DIM], 0.5)

    def loss(self, model, batch):
        x, loss = model.stem(batch), 0
        for block in model.blocks:
            x, distribution = block(x)
            loss = loss - distribution.log_prob(x).mean() + distribution.rsample().mean()
        return loss


@case
class WeightAsOutput(Blocks):
    """A parameter itself as output"""

    def run(self, block, x):
        return Block.forward(block, x), block.up.weight

    def loss(self, model, batch):
        x, kept = model.stem(batch), []
        for block in model.blocks:
            x, weight = block(x)
            kept.append(weight)
        return (model.head(x) @ sum(kept).t()).square().mean()

    def train(self, run):
        super().train(run)
        run.log(*(len(p._backward_hooks or ()) for p in run.model.parameters()))


class KeptWeight(Blocks):
    def keep(self, weight):
        raise NotImplementedError

    def run(self, block, x):
        block.kept = self.keep(block.up.weight)
        return Block.forward(block, x)

    def loss(self, model, batch):
        x = model(batch)
        for block in model.blocks:
            x = torch.tanh(x @ block.kept)[:, :DIM]
        return x.square().mean()


@case
class KeptViewOfWeight(KeptWeight):
    """A view of a weight kept by the module and multiplied with after its forward"""

    pitfalls = (7,)

    def keep(self, weight):
        return weight.t()


@case
class KeptDetachedWeight(KeptWeight):
    """`weight.detach()` kept by the module and multiplied with after its forward"""

    pitfalls = (7,)

    def keep(self, weight):
        return weight.detach().t()


@case
class KeptViewInAnotherUnit(KeptViewOfWeight):
    """A view of a weight kept by a module and multiplied with in the forward of another, which has
    its memory then
    """

    def run(self, block, x):
        self.kept.append(block.up.weight.t())
        if len(self.kept) == 3:  # blocks 0 and 2 share memory
            x = torch.tanh(x @ self.kept[0])[:, :DIM]
        return Block.forward(block, x)

    def loss(self, model, batch):
        self.kept = []
        return Case.loss(self, model, batch)


@case
class KeptWeightItself(KeptWeight):
    """A weight itself kept by the module and read after its forward"""

    pitfalls = (7,)

    def keep(self, weight):
        return [weight]

    def loss(self, model, batch):
        x = model(batch)
        for block in model.blocks:
            x = torch.tanh(x @ block.kept[0].t())[:, :DIM]
        return x.square().mean()


@case
class TupleOutput(Blocks):
    """Tuples, with `None` and other objects in them"""

    pitfalls = (12,)

    def run(self, block, x):
        y = Block.forward(block, x[0])
        return (y, None, "text", [y * 2, {"three": y * 3}])

    def loss(self, model, batch):
        x = (model.stem(batch),)
        for block in model.blocks:
            x = block(x)
        return model.head(x[0] + x[3][0] + x[3][1]["three"]).square().mean()


@case
class DictOutput(Blocks):
    """Dicts"""

    pitfalls = (12,)

    def run(self, block, x):
        return {"out": Block.forward(block, x["out"]), "none": None}

    def loss(self, model, batch):
        x = {"out": model.stem(batch)}
        for block in model.blocks:
            x = block(x)
        return model.head(x["out"]).square().mean()


@dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Named(NamedTuple):
    hidden: Tensor
    extra: Any = None


class Opaque:
    """Nothing that an engine could know how to look into."""

    def __init__(self, hidden):
        self._hidden = hidden


@case
class DataclassOutput(Blocks):
    """Dataclasses"""

    pitfalls = (12,)
    container = Output

    def run(self, block, x):
        return type(self).container(Block.forward(block, x))

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = block(x).hidden
        return model.head(x).square().mean()


@case
class NamedTupleOutput(DataclassOutput):
    """Named tuples"""

    container = Named


@case
class OpaqueOutput(DataclassOutput):
    """Objects of a class of the user's own"""

    container = Opaque

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = block(x)._hidden
        return model.head(x).square().mean()


@case
class NoneOutput(Blocks):
    """`None`, the result left in an attribute"""

    pitfalls = (12, 13)

    def run(self, block, x):
        block.result = Block.forward(block, x)

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            block(x)
            x = block.result
        return model.head(x).square().mean()


@case
class GeneratorOutput(Blocks):
    """A generator, which runs after the forward has returned"""

    def run(self, block, x):
        y = block.norm(x)
        return (layer(y) for layer in (block.up,))

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = next(block(x))[:, :DIM]
        return model.head(x).square().mean()


@case
class InputAsOutput(Blocks):
    """The input as output"""

    def run(self, block, x):
        return x if block.training else Block.forward(block, x)


@case
class InPlaceOnInput(Blocks):
    """Blocks that change their input in place"""

    def run(self, block, x):
        x.mul_(1.5)
        return x + block.down(torch.relu_(block.up(x)))


@case
class LossOnIntermediate(Blocks):
    """A loss on an intermediate value"""

    pitfalls = (13,)

    def run(self, block, x):
        block.cached = torch.tanh(block.up(x))
        return x + block.down(block.cached)

    def loss(self, model, batch):
        return model(batch).square().mean() + sum(b.cached.abs().mean() for b in model.blocks)


@case
class LossOnIntermediateOnly(LossOnIntermediate):
    """A loss on stored activations alone"""

    def loss(self, model, batch):
        model(batch)
        return sum(b.cached.square().mean() for b in model.blocks)


@case
class LossOnHookedActivation(Case):
    """A loss on activations stored by forward hooks"""

    pitfalls = (13,)

    def loss(self, model, batch):
        stored = []
        handles = [
            b.up.register_forward_hook(lambda m, i, o: stored.append(o)) for b in model.blocks
        ]
        out = model(batch)
        for handle in handles:
            handle.remove()
        return out.square().mean() + sum(o.square().mean() for o in stored)


@case
class ActivationKeptAcrossSteps(Case):
    """A detached state carried from step to step"""

    def train(self, run):
        state = torch.zeros(4, DIM)
        for step in range(STEPS):
            kept = []

            def loss(model, state=state, kept=kept, step=step):
                kept.append(model(self.batch(step, run.rank) + state))
                return kept[0].square().mean()

            run.train_step(loss)
            state = kept[0].detach()


@case
class GraphKeptOverAStep(Case):
    """Backward through a graph of before the optimizer step, which raises, then continuing"""

    def train(self, run):
        old = run.step(lambda model: self.loss(model, self.batch(0, run.rank)))
        run.train_step(lambda model: self.loss(model, self.batch(1, run.rank)))
        # Torch's reason is the same: the weights changed in place.
        text = "modified by an inplace operation"
        with pytest.raises(RuntimeError, match=text), run.backward():
            old.backward()
        run.recover()
        super().train(run)


# ---- calls -----------------------------------------------------------------------------------


@case
class CalledTwice(Case):
    """A module called twice"""

    pitfalls = (15,)

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = block(block(x))
        return model.head(model.blocks[0](x)).square().mean()


@case
class CalledRecursively(Case):
    """A module that calls itself"""

    pitfalls = (15,)

    class Recursive(Block):
        def forward(self, x, depth=2):
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    def model(self):
        return Chain(*(self.Recursive() for _ in range(3)))


@case
class BlockCallsAnother(Case):
    """A block that calls another block, which is also called by itself"""

    pitfalls = (15,)

    class Caller(Block):
        def forward(self, x):
            for friend in self.friends:
                x = friend(x)
            return super().forward(x)

    def model(self):
        model = Chain(*(self.Caller() for _ in range(4)))
        for i, block in enumerate(model.blocks):
            block.friends = list(model.blocks[:i])
        return model


@case
class NestedUnits(Case):
    """Repeated blocks inside repeated blocks, with parameters at both levels"""

    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(2))
            self.gain = nn.Parameter(torch.ones(DIM))

        def forward(self, x):
            for block in self.inner:
                x = block(x) * self.gain
            return x

    def model(self):
        return Chain(*(self.Stage() for _ in range(3)))


@case
class TwoForwardsOneBackward(Case):
    """Two forwards before one backward"""

    pitfalls = (15,)

    def loss(self, model, batch):
        return (model(batch) * model(batch + 1)).mean()


@case
class TwoStepsTwoBackwards(Case):
    """Two forwards, then their two backwards"""

    pitfalls = (14, 15)

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            first = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            second = run.step(
                lambda model, step=step: self.loss(model, self.batch(step + 50, run.rank))
            )
            for loss in (first, second):
                with run.backward():
                    loss.backward()
            run.log(first, second)
            run.optimizer.step()


@case
class RetainGraph(Case):
    """`retain_graph` and a second backward"""

    pitfalls = (14,)

    def backward(self, run, loss):
        with run.backward():
            loss.backward(retain_graph=True)
        with run.backward():
            (loss * 2).backward()


@case
class SeveralLosses(Case):
    """Several losses of one forward, each with its backward"""

    pitfalls = (14,)

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            out = run.step(lambda model, step=step: model(self.batch(step, run.rank)))
            losses = [out.square().mean(), out.abs().mean(), out[0].sum()]
            for loss in losses:
                with run.backward():
                    loss.backward(retain_graph=True)
            run.log(*losses)
            run.optimizer.step()


@case
class SeveralLossesOneBackward(Case):
    """Several backward calls in one backward of the strategy"""

    pitfalls = (14,)

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            out = run.step(lambda model, step=step: model(self.batch(step, run.rank)))
            with run.backward():
                out.square().mean().backward(retain_graph=True)
                out.abs().mean().backward()
            run.log(out)
            run.optimizer.step()


@case
class BackwardInsideStep(Case):
    """Backward called inside the step (manual optimization)"""

    manual = True
    pitfalls = (26,)

    def train(self, run):
        for step in range(STEPS):

            def work(model, step=step):
                run.optimizer.zero_grad()
                loss = self.loss(model, self.batch(step, run.rank))
                with run.backward():
                    loss.backward()
                run.log(loss)
                run.optimizer.step()
                return model(self.batch(step, run.rank)).detach()

            run.log(run.step(work))


@case
class PlainBackward(Case):
    """`loss.backward()` called without the strategy"""

    pitfalls = (14, 26)

    def backward(self, run, loss, **options):
        with run.backward() if run.is_reference else nullcontext():
            loss.backward(**options)


@case
class PlainBackwardTwice(PlainBackward):
    """`loss.backward()` called twice without the strategy"""

    def backward(self, run, loss):
        super().backward(run, loss, retain_graph=True)
        super().backward(run, loss * 2)


@case
class PlainBackwardTwiceOfThePenalty(PlainBackwardTwice):
    """`loss.backward()` of a loss of parameters alone, called twice without the strategy"""

    def loss(self, model, batch):
        return sum(p.square().sum() for p in model.parameters())


@case
class SubModuleBeforeRoot(Case):
    """A sub-module called before the model"""

    pitfalls = (27,)

    def loss(self, model, batch):
        hint = model.blocks[2](batch)
        return (model(batch) + hint).square().mean()


@case
class SubModuleOnly(Case):
    """Only a sub-module called"""

    pitfalls = (2, 27)

    def loss(self, model, batch):
        return model.blocks[2](batch).square().mean()


@case
class OtherOrderEveryStep(Case):
    """Blocks called in another order in every step"""

    def train(self, run):
        for step in range(STEPS + 1):

            def loss(model, step=step):
                x = model.stem(self.batch(step, run.rank))
                for i in torch.randperm(4, generator=seeded(step)).tolist():
                    x = model.blocks[i](x)
                return model.head(x).square().mean()

            run.train_step(loss)


@case
class GradientAccumulation(Case):
    """Gradient accumulation over micro-batches"""

    pitfalls = (16,)
    worlds = (1, 2, 3)

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            for micro in range(3):
                loss = run.step(
                    lambda model, s=step * 10 + micro: self.loss(model, self.batch(s, run.rank)) / 3
                )
                with run.backward():
                    loss.backward()
                run.log(loss)
            run.optimizer.step()


@case
class EvaluationBetweenSteps(Case):
    """Evaluation between training steps, which must see the new weights"""

    pitfalls = (30, 31)

    def train(self, run):
        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            run.model.eval()
            with torch.no_grad():
                run.log(run.step(lambda model, step=step: model(self.batch(step + 20, run.rank))))
            with torch.inference_mode():
                run.log(
                    run.step(
                        lambda model, step=step: model(self.batch(step + 30, run.rank))
                    ).clone()
                )
            run.model.train()


@case
class FirstForwardInInferenceMode(Case):
    """The first forward under `inference_mode`"""

    pitfalls = (1,)

    def train(self, run):
        with torch.inference_mode():
            run.log(run.step(lambda model: model(self.batch(0, run.rank))).clone())
        super().train(run)


@case
class NoGradPart(Case):
    """Some blocks under `no_grad`, others not"""

    def loss(self, model, batch):
        with torch.no_grad():
            target = model(batch + 1)
            x = model.blocks[0](model.stem(batch))
        for block in model.blocks[1:]:
            x = block(x)
        return (model.head(x) - target).square().mean()


@case
class DetachedMiddle(Case):
    """A graph cut in the middle by `detach`"""

    def loss(self, model, batch):
        x = model.blocks[1](model.blocks[0](model.stem(batch)))
        y = model.blocks[3](model.blocks[2](x.detach()))
        return model.head(y).square().mean() + x.mean()


# ---- not all of it, not by all ---------------------------------------------------------------


@case
class UnusedOnOneRank(Case):
    """Parameters unused on one rank"""

    pitfalls = (2, 3)

    def train(self, run):
        def loss(model, step):
            x = model.stem(self.batch(step, run.rank))
            for i, block in enumerate(model.blocks):
                y = block(x)  # every rank gathers it, not every loss depends on it
                x = x if i == 1 and run.rank == 0 else y
            return model.head(x).square().mean()

        for step in range(STEPS):
            run.train_step(lambda model, step=step: loss(model, step))


@case
class LayerUnusedOnOneRank(Case):
    """One layer inside a block unused on one rank"""

    pitfalls = (2, 3)

    class Optional(Block):
        use = True

        def forward(self, x):
            return super().forward(x) if self.use else self.norm(x)

    def model(self):
        return Chain(*(self.Optional() for _ in range(4)))

    def train(self, run):
        run.model.blocks[run.rank].use = False
        super().train(run)


@case
class BlocksSkippedByTheirForward(Case):
    """Blocks whose forward returns its input on some ranks, others in each step (stochastic depth,
    LayerDrop)
    """

    pitfalls = (2, 3)

    class Skipped(Block):
        def forward(self, x):
            return x if next(self.draws) else super().forward(x)

    def model(self):
        return Chain(*(self.Skipped() for _ in range(4)))

    def train(self, run):
        for index, block in enumerate(run.model.blocks):
            block.draws = iter(
                [(index + run.rank + step * (1 + index % 2)) % 2 for step in range(STEPS)]
            )
        super().train(run)


@case
class FirstBlockSkippedOnOneRank(Case):
    """The first block returns its input, which needs no gradient, on one rank, and is detached on
    the other
    """

    pitfalls = (2, 3)

    class Skipped(Block):
        skip = detach = False

        def forward(self, x):
            y = x if self.skip else super().forward(x)
            return y.detach() if self.detach else y

    def model(self):
        return Chain(*(self.Skipped() for _ in range(4)))

    def train(self, run):
        run.model.blocks[0].skip = run.rank == 0
        run.model.blocks[1].detach = run.rank == 1
        super().train(run)

    def loss(self, model, batch):
        x = batch
        for block in model.blocks:
            x = block(x)
        return model.head(x).square().mean()


@case
class ReadByAllUsedByOneRank(Case):
    """A weight that all ranks read outside its unit's forward, and only one rank's loss depends
    on
    """

    pitfalls = (2, 3)
    worlds = (2,)
    refused = r"The ranks run different things: .*unit blocks\.1.*Look for what one rank does"

    def train(self, run):
        def loss(model, step):
            penalty = model.blocks[1].up.weight.square().sum()
            out = self.loss(model, self.batch(step, run.rank))
            return out + penalty if run.rank == 0 else out

        for step in range(STEPS):
            run.train_step(lambda model, step=step: loss(model, step))


@case
class UnusedOnAllRanks(Case):
    """Parameters unused on all ranks"""

    pitfalls = (2, 3)

    def loss(self, model, batch):
        return model.head(model.blocks[2](model.blocks[0](model.stem(batch)))).square().mean()


@case
class UnusedInSomeSteps(Case):
    """Parameters unused in some steps"""

    pitfalls = (2, 3)
    worlds = (1, 2, 3)

    def train(self, run):
        def loss(model, step):
            x = model.stem(self.batch(step, run.rank))
            for i, block in enumerate(model.blocks):
                x = block(x) if i % 3 != step % 3 else x
            return model.head(x).square().mean()

        for step in range(6):
            run.train_step(lambda model, step=step: loss(model, step))


@case
class UnusedLayersInSomeSteps(Case):
    """Single layers of a block unused in some steps, with Adam's state"""

    pitfalls = (2, 3)

    def model(self):
        return Chain(*(LayerUnusedOnOneRank.Optional() for _ in range(4)))

    def optimizers(self, model):
        return [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)]

    def train(self, run):
        for step in range(6):
            for i, block in enumerate(run.model.blocks):
                block.use = (i + step) % 3 != 0
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))


@case
class LossWithoutTheModel(Case):
    """A loss on one rank that depends on no parameter"""

    pitfalls = (2,)

    def train(self, run):
        for step in range(STEPS):

            def loss(model, step=step):
                value = self.loss(model, self.batch(step, run.rank))
                return (
                    torch.ones((), requires_grad=True) * 2 if run.rank == 0 and step == 1 else value
                )

            run.train_step(loss)


@case
class OtherBranchPerRank(Case):
    """Ranks that take different branches of equal units"""

    worlds = (2,)
    pitfalls = (29,)
    refused = "The ranks run different things: rank .* unit blocks.*Look for what one rank"

    def train(self, run):
        def loss(model, step):
            x = model.stem(self.batch(step, run.rank))
            x = model.blocks[run.rank](x)
            return model.head(model.blocks[3](x)).square().mean()

        for step in range(STEPS):
            run.train_step(lambda model, step=step: loss(model, step))


@case
class OneRankSkipsABlock(Case):
    """One rank does not run a block that the others run"""

    worlds = (2,)
    pitfalls = (29,)
    refused = "The ranks run different things: rank .* unit blocks.*Look for what one rank"

    def train(self, run):
        def loss(model, step):
            x = model.stem(self.batch(step, run.rank))
            for i, block in enumerate(model.blocks):
                x = x if run.rank == 0 and i == 2 else block(x)
            return model.head(x).square().mean()

        for step in range(STEPS):
            run.train_step(lambda model, step=step: loss(model, step))


@case
class SavedActivationChanged(Case):
    """An activation that backward needs changed in place, which raises, then continuing"""

    pitfalls = (8, 11)

    def train(self, run):
        def broken(model):
            x = torch.tanh(model.stem(self.batch(9, run.rank)))
            y = model.head(model.blocks[0](x))
            with torch.no_grad():
                x.add_(1)
            return y.square().mean()

        super().train(run)
        run.optimizer.zero_grad()
        loss = run.step(broken)
        with (
            pytest.raises(RuntimeError, match="modified (by an inplace operation|inplace)"),
            run.backward(),
        ):
            loss.backward()
        run.recover()
        super().train(run)


class WeightChangedAfterUse(Blocks):
    """What happens to a weight in its forward after autograd has saved it"""

    broken = False

    def touch(self, weight):
        raise NotImplementedError

    def run(self, block, x):
        x = Block.forward(block, x)
        if self.broken:
            with torch.no_grad():
                self.touch(block.up.weight)
        return x

    def train(self, run):
        super().train(run)
        run.optimizer.zero_grad()
        self.broken = True
        loss = run.step(lambda model: self.loss(model, self.batch(9, run.rank)))
        self.broken = False
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), run.backward():
            loss.backward()
        run.recover()
        super().train(run)


@case
class SavedWeightChanged(WeightChangedAfterUse):
    """A weight changed in its forward after autograd has saved it, which raises, then continuing"""

    pitfalls = (8,)

    def touch(self, weight):
        weight.mul_(0.5)


@case
class SavedWeightChangedByAlias(WeightChangedAfterUse):
    """The same through `weight.detach()`"""

    pitfalls = (8,)

    def touch(self, weight):
        weight.detach()[0].zero_()


@case
class SavedWeightChangedAfterGathered(SavedWeightChanged):
    """The same after `gathered`, in which `weight.data` was read"""

    def train(self, run):
        with run.gathered(run.model):
            assert all(p.data.isfinite().all() for p in run.model.parameters())
        super().train(run)


@case
class ForwardInAnotherThread(OpaqueOutput):
    """Objects of a class of the user's own, from a forward in another thread"""

    pitfalls = (7,)

    def loss(self, model, batch):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().loss, model, batch).result()


@case
class GraphDroppedWithoutBackward(Case):
    """A graph dropped without backward, whose memory must be free at once"""

    def train(self, run):
        def loss(model):
            x = torch.exp(model.blocks[0](model.stem(self.batch(0, run.rank))))
            self.kept = weakref.ref(x)
            return model.head(x).sum()

        super().train(run)
        gc.disable()
        try:
            run.step(loss)
            run.log(self.kept() is None)
        finally:
            gc.enable()
        super().train(run)


# ---- going wrong -----------------------------------------------------------------------------


@case
class ExceptionInForward(Case):
    """An exception in forward, then a `KeyboardInterrupt`, and continuing after each"""

    pitfalls = (28,)

    def train(self, run):
        def broken(model):
            x = model.blocks[0](model.stem(self.batch(9, run.rank)))
            model.blocks[1](x[:, :3])

        def interrupted(model):
            def interrupt(module, args):
                raise KeyboardInterrupt("in a layer of a block")

            x = model.blocks[0](model.stem(self.batch(9, run.rank)))
            handle = model.blocks[1].down.register_forward_pre_hook(interrupt)
            try:
                model.blocks[1](x)
            finally:
                handle.remove()

        super().train(run)
        for function in (broken, interrupted) * 2:
            try:
                run.step(function)
            except (RuntimeError, KeyboardInterrupt) as error:
                run.log(repr(error))
            run.recover()
            super().train(run)


@case
class ExceptionInBackward(Case):
    """An exception in backward, then a `KeyboardInterrupt`, and continuing after each"""

    pitfalls = (28,)

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, error):
            ctx.error = error
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ctx.error

    def train(self, run):
        def broken(model, error):
            x = model.blocks[1](model.blocks[0](model.stem(self.batch(9, run.rank))))
            return model.head(model.blocks[2](self.Fail.apply(x, error))).square().mean()

        super().train(run)
        for planned in (ValueError("no gradient today"), KeyboardInterrupt("enough")) * 2:
            run.optimizer.zero_grad()
            loss = run.step(lambda model, planned=planned: broken(model, planned))
            try:
                with run.backward():
                    loss.backward()
            except (ValueError, KeyboardInterrupt) as error:
                run.log(repr(error))
            run.recover()
            super().train(run)


class FailedSecondBackward(Case):
    """One that an exception ends before it adds anything."""

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            for fails in (False, True):
                loss = run.step(
                    lambda model, step=step: self.loss(model, self.batch(step, run.rank))
                )
                loss = (
                    ExceptionInBackward.Fail.apply(loss, ValueError("no gradient today"))
                    if fails
                    else loss
                )
                try:
                    with run.backward():
                        loss.backward()
                except ValueError as error:
                    run.log(repr(error))
                    run.recover()
            self.afterwards(run)
            run.optimizer.step()


@case
class ClippedAfterFailedBackward(FailedSecondBackward):
    """A second backward that fails at once, then the gradients of the first are clipped and
    changed
    """

    def afterwards(self, run):
        run.log(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1))
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


@case
class ClearedAfterFailedBackward(FailedSecondBackward):
    """A second backward that fails at once, then `module.zero_grad()` and `optimizer.step()`"""

    def afterwards(self, run):
        run.model.zero_grad()
        run.log(*(float(p.grad is None) for p in run.model.parameters()))


class FailsInTheMiddle(Case):
    """Has a loss whose backward raises when half of the gradients are there."""

    def broken(self, model, rank):
        x = model.blocks[1](model.blocks[0](model.stem(self.batch(9, rank))))
        x = ExceptionInBackward.Fail.apply(x, ValueError("no gradient today"))
        return model.head(model.blocks[2](x)).square().mean()


@case
class AssignedAfterFailedBackward(FailsInTheMiddle):
    """An exception in the middle of the first backward, then gradients are assigned, and another
    backward adds to them
    """

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            loss = run.step(lambda model: self.broken(model, run.rank))
            with suppress(ValueError), run.backward():
                loss.backward()
            run.recover()
            for p in run.model.parameters():
                p.grad = torch.full(p.shape, 0.01)
            loss = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            with run.backward():
                loss.backward()
            run.optimizer.step()


@case
class PostAccumulateHookRaises(Case):
    """A post-accumulate hook that raises, then gradients are cleared, and another backward"""

    raises = False

    def model(self):
        model = super().model()
        next(model.blocks[1].parameters()).register_post_accumulate_grad_hook(self.hook)
        return model

    def hook(self, parameter):
        if self.raises:
            raise ValueError("no gradient today")

    def train(self, run):
        for step in range(STEPS):
            super().train(run)
            run.optimizer.zero_grad()
            self.raises = True
            loss = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            with suppress(ValueError), run.backward():
                loss.backward()
            self.raises = False
            run.recover()
            run.optimizer.zero_grad()
        super().train(run)


@case
class RetriedInsideOfBackward(FailsInTheMiddle):
    """An overridden `LightningModule.backward` that catches an exception, clears gradients, and
    differentiates another loss
    """

    def train(self, run):
        def losses(model, step):
            return self.broken(model, run.rank), self.loss(model, self.batch(step, run.rank))

        for step in range(STEPS):
            run.optimizer.zero_grad()
            broken, loss = run.step(lambda model, step=step: losses(model, step))
            with run.backward():
                try:
                    broken.backward()
                except ValueError:
                    run.model.zero_grad()
                    loss.backward()
            run.optimizer.step()


@case
class TwoLossesInsideOfBackward(FailsInTheMiddle):
    """An overridden `LightningModule.backward` of several losses: one is cleared, one fails, and is
    cleared, one counts
    """

    def train(self, run):
        def losses(model, step):
            first = self.loss(model, self.batch(step + 5, run.rank))
            return first, self.broken(model, run.rank), self.loss(model, self.batch(step, run.rank))

        for step in range(STEPS):
            run.optimizer.zero_grad()
            first, broken, last = run.step(lambda model, step=step: losses(model, step))
            with run.backward():
                first.backward()
                run.optimizer.zero_grad()
                try:
                    broken.backward()
                except ValueError:
                    run.model.zero_grad()
                last.backward()
            run.optimizer.step()


@case
class FailsAfterGradInsideOfBackward(FailsInTheMiddle):
    """An overridden `LightningModule.backward` of `torch.autograd.grad`, a loss that fails in the
    middle, and another
    """

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            loss, broken = run.step(
                lambda model, step=step: (
                    self.loss(model, self.batch(step, run.rank)),
                    self.broken(model, run.rank),
                )
            )
            with run.backward():
                torch.autograd.grad(
                    loss, [run.model.blocks[0].up.weight, run.model.head.bias], retain_graph=True
                )
                with suppress(ValueError):
                    broken.backward()
                run.model.zero_grad()
                loss.backward()
            run.optimizer.step()


@case
class GradientsRestoredAfterFailedBackward(FailsInTheMiddle):
    """Gradients of some layers are put back after a second backward, of more layers, failed in the
    middle; then a third
    """

    def first(self, model, rank):
        return model.head(model.stem(self.batch(5, rank))).square().mean()

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            first, broken = run.step(
                lambda model: (self.first(model, run.rank), self.broken(model, run.rank))
            )
            with run.backward():
                first.backward()
            saved = [None if p.grad is None else p.grad.clone() for p in run.model.parameters()]
            with suppress(ValueError), run.backward():
                broken.backward()
            run.recover()
            for p, grad in zip(run.model.parameters(), saved, strict=True):
                p.grad = grad
            loss = run.step(
                lambda model, step=step: (
                    self.loss(model, self.batch(step, run.rank)) if step else self.first(model, 9)
                )
            )
            with run.backward():
                loss.backward()
            run.optimizer.step()


@case
class AssignedThenZeros(Case):
    """A gradient assigned to a parameter that had none, then
    `optimizer.zero_grad(set_to_none=False)`
    """

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            loss = run.step(
                lambda model, step=step: (
                    model.head(model.blocks[1](model.stem(self.batch(step, run.rank))))
                    .square()
                    .mean()
                )
            )
            with run.backward():
                loss.backward()
            weight = run.model.blocks[0].up.weight
            weight.grad = torch.full_like(weight, 0.01)
            run.optimizer.zero_grad(set_to_none=False)
            run.log(weight.grad)
            loss = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            with run.backward():
                loss.backward()
            run.optimizer.step()


@case
class StepReturnsNone(Case):
    """A step without backward (manual optimization that skips it)"""

    pitfalls = (28,)

    def train(self, run):
        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            run.step(
                lambda model, step=step: self.loss(model, self.batch(step + 5, run.rank)) and None
            )


@case
class StepReturnsNoneOnOneRank(Case):
    """A step without backward on one rank alone"""

    worlds = (2,)
    pitfalls = (28,)
    refused = "The ranks run different things: rank"
    timeout = 6.0

    def train(self, run):
        if run.is_reference:
            return super().train(run)
        for step in range(STEPS):
            loss = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            if not (run.rank == 0 and step == 1):
                with run.backward():
                    loss.backward()
            run.optimizer.step()
        return None
