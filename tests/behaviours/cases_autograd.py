"""Ways through autograd other than one forward and one backward; user hooks; checkpoints;
compilation.
"""

from contextlib import suppress

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .cases_outputs import Blocks, PlainBackward
from .harness import DIM, STEPS, Block, Case, Chain, case, seeded, under_a_mode

# ---- other derivatives -----------------------------------------------------------------------


@case
class GradientPenalty(Case):
    """Double backward: a penalty on the gradient of the input"""

    pitfalls = (46,)

    def loss(self, model, batch):
        x = batch.requires_grad_()
        out = model(x).square().mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return out + grad.square().sum()


@case
class GradientPenaltyOnParameters(Case):
    """Double backward: a penalty on the gradients of parameters"""

    pitfalls = (43, 46)

    def loss(self, model, batch):
        out = model(batch).square().mean()
        grads = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        return out + sum(g.square().sum() for g in grads)


@case
class BackwardCreateGraph(Case):
    """`backward(create_graph=True)`"""

    pitfalls = (46,)

    def backward(self, run, loss):
        with run.backward():
            loss.backward(create_graph=True)


@case
class GradOfParameters(Case):
    """`torch.autograd.grad` on parameters, in a step"""

    pitfalls = (43,)

    def train(self, run):
        def work(model, step):
            loss = self.loss(model, self.batch(step, run.rank))
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            run.log(*grads)  # of this rank's loss: nobody reduces them
            return loss

        for step in range(STEPS):
            run.train_step(lambda model, step=step: work(model, step))


@case
class GradOfParametersAfterStep(Case):
    """`torch.autograd.grad` on parameters, after the step"""

    pitfalls = (43,)

    def train(self, run):
        for step in range(STEPS):
            loss = run.step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))
            run.log(*torch.autograd.grad(loss, list(run.model.parameters())))
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))


@case
class BackwardOfSomeInputs(Case):
    """`backward(inputs=[...])` with some parameters"""

    pitfalls = (43,)

    def backward(self, run, loss):
        with run.backward():
            loss.backward(inputs=[run.model.blocks[0].up.weight, run.model.head.bias])


@case
class Functorch(Case):
    """`torch.func.grad` and `vmap` over `functional_call`"""

    pitfalls = (46,)

    def train(self, run):
        def work(model, step):
            values = {n: p.detach().clone() for n, p in model.named_parameters()}

            def one(values, x):
                return torch.func.functional_call(model, values, (x[None],)).square().mean()

            grads = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(
                values, self.batch(step, run.rank)
            )
            run.log(*(grads[n] for n in sorted(grads)))
            return self.loss(model, self.batch(step, run.rank))

        for step in range(STEPS):
            run.train_step(lambda model, step=step: work(model, step))


@case
class FunctorchByInput(Case):
    """`torch.func.grad` and `vmap` of the model by its input, in the loss (forces)"""

    pitfalls = (46,)

    def loss(self, model, batch):
        forces = torch.func.vmap(torch.func.grad(lambda x: model(x[None]).square().sum()))(batch)
        return super().loss(model, batch) + forces.square().mean()


@case
class FunctorchHessian(Case):
    """`torch.func.hessian` of the model by its input, in the loss"""

    pitfalls = (46,)

    def loss(self, model, batch):
        curvature = torch.func.hessian(lambda x: model(x[None]).square().sum())(batch[0])
        return super().loss(model, batch) + curvature.square().mean()


@case
class FunctorchPulledBackLater(Case):
    """`torch.func.vjp` of the model, pulled back after another forward"""

    pitfalls = (46,)

    def loss(self, model, batch):
        out, pull = torch.func.vjp(model, batch)
        loss = super().loss(model, 2 * batch)
        return loss + pull(out.detach().sin())[0].square().mean()


@case
class FunctorchThatRaises(Case):
    """An exception inside of `torch.func.grad`, which `training_step` catches"""

    pitfalls = (46,)

    def loss(self, model, batch):
        def fails(x):
            raise ArithmeticError(model(x).sum())

        with suppress(ArithmeticError):
            torch.func.grad(fails)(batch)
        return super().loss(model, batch)


class CallsItself(nn.Module):
    """Twice, then its layer."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x, times=2):
        x = self.inner(x).tanh() if times else x
        return self(x, times - 1) + self.inner.bias if times else x


class ByInputBetweenSteps(Case):
    pitfalls = (46,)

    def train(self, run):
        super().train(run)
        run.log(torch.func.jacrev(lambda x: run.model(x[None]))(self.batch(0, run.rank)[0]))
        super().train(run)


@case
class FunctorchOfARecursionBetweenSteps(ByInputBetweenSteps):
    """`torch.func.jacrev` of the model, in which a layer calls itself, by its input, between
    steps
    """

    def model(self):
        return Chain(Block(), CallsItself(DIM), Block(), CallsItself(DIM))


@case
class FunctorchByInputBetweenSteps(ByInputBetweenSteps):
    """`torch.func.jacrev` of the model by its input, between steps"""


@case
class FunctorchWhenGathered(Case):
    """`torch.func.grad` and `vmap` inside `gathered`, outside of a step"""

    pitfalls = (46,)

    def train(self, run):
        super().train(run)
        with run.gathered(run.model):
            values = {n: p.detach() for n, p in run.model.named_parameters()}

            def one(values, x):
                return torch.func.functional_call(run.model, values, (x[None],)).square().mean()

            grads = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(
                values, self.batch(0, run.rank)
            )
        run.log(*(grads[n] for n in sorted(grads)))
        super().train(run)


@case
class VmapOverModel(Case):
    """`torch.func.vmap` over the model"""

    pitfalls = (46,)

    def loss(self, model, batch):
        return torch.func.vmap(model)(batch).square().mean()


@case
class ForwardModeAd(Case):
    """Forward-mode derivatives (`torch.func.jvp`)"""

    pitfalls = (46,)

    def loss(self, model, batch):
        out, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
        return out.square().mean() + tangent.square().mean()


@case
class JacobianOfModel(Case):
    """`torch.autograd.functional.jacobian` in the loss"""

    pitfalls = (46,)

    def loss(self, model, batch):
        jacobian = torch.autograd.functional.jacobian(
            lambda x: model(x).sum(0), batch, create_graph=True
        )
        return model(batch).square().mean() + jacobian.square().mean()


@case
class FunctionReturningNone(Blocks):
    """A custom Function that returns `None` for a weight's gradient"""

    pitfalls = (4,)

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            (weight,) = ctx.saved_tensors
            return grad @ weight.t(), None

    def run(self, block, x):
        return x + block.down(self.Constant.apply(x, block.up.weight.t()))


@case
class FunctionSavingWeight(Blocks):
    """A custom Function that saves a weight and a view of it"""

    pitfalls = (7,)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight, weight[:, :3])
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight, part = ctx.saved_tensors
            return grad @ weight.t() + part.sum(), x.t() @ grad

    def run(self, block, x):
        return x + block.down(self.Product.apply(x, block.up.weight.t()))


@case
class FunctionKeepingWeight(Blocks):
    """A custom Function that keeps a weight on `ctx` without `save_for_backward`"""

    pitfalls = (7,)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.x, ctx.weight = x, weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            return grad @ ctx.weight, grad.t() @ ctx.x

    def run(self, block, x):
        return x + block.down(self.Product.apply(x, block.up.weight))


@case
class SparseGradients(Case):
    """Sparse gradients of an embedding"""

    pitfalls = (37,)

    def model(self):
        model = Chain()
        model.stem = nn.Embedding(16, DIM, sparse=True)
        return model

    def optimizers(self, model):
        return [torch.optim.SGD(model.parameters(), lr=0.1)]

    def batch(self, step, rank):
        return torch.randint(0, 16, (4,), generator=seeded(100 * step + rank))


@case
class AnomalyDetection(Case):
    """`torch.autograd.detect_anomaly`"""

    def train(self, run):
        with torch.autograd.set_detect_anomaly(True):
            super().train(run)


@case
class SaveOnCpu(Case):
    """`save_on_cpu` around some blocks"""

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            with torch.autograd.graph.save_on_cpu():
                x = block(x)
        return model.head(x).square().mean()


@case
class OwnSavedTensorsHooks(Case):
    """Saved-tensor hooks of the user's own around the whole step"""

    def train(self, run):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            super().train(run)


@case
class Autocast(Case):
    """`torch.autocast` with its weight cache"""

    pitfalls = (40,)

    def loss(self, model, batch):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return (model(batch) + model(batch)).float().square().mean()


@case
class NoGradientAtAll(Case):
    """`requires_grad` only on the input"""

    def model(self):
        model = Chain()
        for p in model.blocks.parameters():
            p.requires_grad_(False)
        return model

    def loss(self, model, batch):
        return super().loss(model, batch.requires_grad_())


# ---- user hooks ------------------------------------------------------------------------------


@case
class TensorHooksOnParameters(Case):
    """`register_hook` on parameters that changes gradients, set before set-up"""

    pitfalls = (43,)

    def prepare(self, model):
        for p in model.parameters():
            p.register_hook(lambda grad: grad * 2)


@case
class TensorHooksAfterSetUp(Case):
    """`register_hook` on parameters, set after set-up"""

    pitfalls = (43,)

    def train(self, run):
        seen = []
        for p in run.model.parameters():
            p.register_hook(lambda grad: seen.append(tuple(grad.shape)) or grad * 2)
        super().train(run)
        run.log(sorted(seen))


@case
class PostAccumulateHooks(Case):
    """Post-accumulate hooks on parameters that read and change `grad`, set before set-up"""

    pitfalls = (43,)

    def prepare(self, model):
        self.seen = []

        def hook(p):
            self.seen.append(tuple(p.grad.shape))
            p.grad.mul_(2)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)

    def train(self, run):
        super().train(run)
        run.log(sorted(self.seen))


@case
class PostAccumulateHooksAfterSetUp(Case):
    """Post-accumulate hooks on parameters, set after set-up"""

    pitfalls = (43,)

    def train(self, run):
        seen = []

        def hook(p):
            seen.append(tuple(p.grad.shape))
            p.grad.mul_(2)

        for p in run.model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        super().train(run)
        run.log(sorted(seen))


@case
class PostAccumulateHooksPlainBackward(PostAccumulateHooksAfterSetUp, PlainBackward):
    """Post-accumulate hooks on parameters, set after set-up, and `loss.backward()` called without
    the strategy
    """


@case
class PostAccumulateHooksAccumulated(PostAccumulateHooks):
    """Post-accumulate hooks that change `grad`, with two backwards before gradients are cleared"""

    refused = refused_on_one = (
        r"Parameter '[\w.]+' has a post-accumulate hook.*would find the last one"
        r" alone.*`parameter.register_hook`"
    )

    def train(self, run):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            for micro in range(2):
                loss = run.step(
                    lambda model, number=2 * step + micro: self.loss(
                        model, self.batch(number, run.rank)
                    )
                )
                with run.backward():
                    loss.backward()
            run.optimizer.step()


@case
class ModuleHooks(Case):
    """Forward and backward hooks on modules"""

    def prepare(self, model):
        self.seen = []
        for i, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda m, x: (x[0] * m.up.weight.norm(),))
            block.register_forward_hook(lambda m, x, y: y * m.up.weight.sum())
            block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
            block.register_full_backward_pre_hook(lambda m, go, i=i: self.seen.append(i))

    def train(self, run):
        super().train(run)
        run.log(self.seen)


@case
class ModuleHooksAfterSetUp(ModuleHooks):
    """Forward and backward hooks on modules, set after set-up"""

    def prepare(self, model):
        """Later."""

    def train(self, run):
        super().prepare(run.model)
        for block in run.model.blocks:
            block.register_forward_pre_hook(lambda m, x: (x[0] + m.down.bias,), prepend=True)
        super().train(run)


@case
class BackwardHookReadsWeight(Case):
    """A module's backward hook that reads its weight"""

    def prepare(self, model):
        for block in model.blocks:
            block.register_full_backward_hook(
                lambda m, gi, go: (gi[0] * m.up.weight.detach().norm(),)
            )


@case
class GradReadAfterBackward(Case):
    """`p.grad` read after backward"""

    def train(self, run):
        super().train(run)
        for p in run.model.parameters():
            run.log(p.grad.norm())


@case
class GradClippedByUser(Case):
    """`clip_grad_norm_(model.parameters())` between backward and step"""

    pitfalls = (18,)

    def between(self, run):
        run.log(nn.utils.clip_grad_norm_(run.model.parameters(), 0.01))
        run.log(nn.utils.clip_grad_norm_(run.model.parameters(), 0.001, norm_type=torch.inf))


@case
class GradScaledByUser(Case):
    """`p.grad.mul_()` and other changes in place between backward and step"""

    def between(self, run):
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.1)
                p.grad.data.add_(0.01)
                p.grad += 0.01
                p.grad[0] = 0
        nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
        torch._foreach_mul_([p.grad for p in run.model.parameters() if p.grad is not None], 0.5)


@case
class GradViewChanged(Case):
    """`p.grad.view(-1).mul_()` between backward and step"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad.view(-1).mul_(0.1)


@case
class ClippedInParamGroups(Case):
    """`clip_grad_norm_` on the tensors of `optimizer.param_groups`"""

    pitfalls = (18,)

    def between(self, run):
        nn.utils.clip_grad_norm_(run.optimizer.param_groups[0]["params"], 0.01)


@case
class NormOfParamGroups(Case):
    """A norm of the values of the tensors of `optimizer.param_groups`, or of what is computed from
    them
    """

    def between(self, run):
        tensors = run.optimizer.param_groups[0]["params"]
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in tensors)
        run.log(sum(p.detach().abs().mul(2).data.norm().square() for p in tensors))


@case
class GradAssigned(Case):
    """`p.grad = ...` between backward and step"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad = torch.ones_like(p)


# ---- checkpoints -----------------------------------------------------------------------------

REENTRANT = {"find_unused_parameters": False}
CHECKPOINTED_TWICE = {"static_graph": True}


class Checkpointed(Case):
    """Every block in a checkpoint"""

    reentrant = False

    def inner(self, block, x):
        return checkpoint(block, x, use_reentrant=self.reentrant)

    def loss(self, model, batch):
        x = model.stem(batch.requires_grad_())
        for block in model.blocks:
            x = self.inner(block, x)
        return model.head(x).square().mean()


@case
class CheckpointNonReentrant(Checkpointed):
    """Activation checkpointing, not re-entrant (stops early)"""

    pitfalls = (9,)


@case
class CheckpointReentrant(Checkpointed):
    """Activation checkpointing, re-entrant"""

    ddp_options = REENTRANT
    pitfalls = (5, 10)
    reentrant = True


@case
class CheckpointReentrantPlainBackward(CheckpointReentrant, PlainBackward):
    """Activation checkpointing, re-entrant, and `loss.backward()` without the strategy"""

    pitfalls = (5, 10, 16, 26)


@case
class CheckpointReentrantAccumulated(CheckpointReentrantPlainBackward):
    """The same with gradients kept over micro-batches, checkpointed or not"""

    def train(self, run):
        for step in range(STEPS):
            self.clear(run)
            for micro in range(3):
                part = Case.loss if micro == 1 else Checkpointed.loss
                batch = self.batch(10 * step + micro, run.rank)
                loss = run.step(lambda model, part=part, batch=batch: part(self, model, batch))
                self.backward(run, loss)
                run.log(loss)
            run.optimizer.step()


@case
class CheckpointNoEarlyStop(Checkpointed):
    """Activation checkpointing without early stop"""

    pitfalls = (9,)

    def inner(self, block, x):
        return checkpoint(block, x, use_reentrant=False, early_stop=False)


@case
class CheckpointNested(Checkpointed):
    """Nested checkpoints"""

    pitfalls = (9, 10)

    def loss(self, model, batch):
        def half(low, high, x):
            for block in model.blocks[low:high]:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        def whole(x):
            x = checkpoint(half, 0, 2, x, use_reentrant=False)
            return checkpoint(half, 2, 4, x, use_reentrant=False)

        x = checkpoint(whole, model.stem(batch), use_reentrant=False)
        return model.head(x).square().mean()


@case
class CheckpointSeveralBlocks(Checkpointed):
    """One checkpoint around several blocks"""

    pitfalls = (9,)

    def loss(self, model, batch):
        x = checkpoint_sequential(list(model.blocks), 2, model.stem(batch), use_reentrant=False)
        return model.head(x).square().mean()


@case
class CheckpointSeveralBlocksReentrant(Checkpointed):
    """One re-entrant checkpoint around several blocks"""

    ddp_options = REENTRANT
    pitfalls = (10,)

    def loss(self, model, batch):
        x = checkpoint_sequential(list(model.blocks), 2, model.stem(batch), use_reentrant=True)
        return model.head(x).square().mean()


@case
class CheckpointOfCheckpointReentrant(Checkpointed):
    """Re-entrant checkpoints inside a re-entrant checkpoint"""

    ddp_options = REENTRANT
    pitfalls = (5, 10)

    def loss(self, model, batch):
        def half(x, low):
            for block in model.blocks[low : low + 2]:
                x = checkpoint(block, x, use_reentrant=True)
            return x

        x = checkpoint(half, model.stem(batch), 0, use_reentrant=True)
        return model.head(checkpoint(half, x, 2, use_reentrant=True)).square().mean()


@case
class CheckpointInsideBlock(Blocks):
    """A checkpoint inside a block's forward, around some of its layers"""

    pitfalls = (9,)

    def run(self, block, x):
        hidden = checkpoint(lambda y: torch.tanh(block.up(block.norm(y))), x, use_reentrant=False)
        return x + block.down(hidden)


@case
class CheckpointInsideBlockReentrant(Blocks):
    """Two re-entrant checkpoints inside a block's forward: its hooks run twice"""

    ddp_options = CHECKPOINTED_TWICE
    pitfalls = (5,)

    def run(self, block, x):
        hidden = checkpoint(lambda y: torch.tanh(block.up(block.norm(y))), x, use_reentrant=True)
        return (
            x
            + checkpoint(block.down, hidden, use_reentrant=True)
            + checkpoint(block.norm, x, use_reentrant=True)
        )


@case
class CheckpointSharedModule(Checkpointed):
    """The same module in two re-entrant checkpoints"""

    ddp_options = CHECKPOINTED_TWICE
    pitfalls = (5,)
    reentrant = True

    def loss(self, model, batch):
        x = model.stem(batch.requires_grad_())
        for block in [*model.blocks, *model.blocks]:
            x = self.inner(block, x)
        return model.head(x).square().mean()


@case
class CheckpointWithDropout(Checkpointed):
    """A checkpoint whose recomputation repeats dropout"""

    pitfalls = (9,)

    def model(self):
        return Chain(*(nn.Sequential(Block(), nn.Dropout(0.3), Block()) for _ in range(3)))


@case
class CheckpointReadsOtherWeight(Checkpointed):
    """A checkpoint that reads a weight of another unit"""

    pitfalls = (9, 25)

    def inner(self, block, x):
        head = self.head
        return checkpoint(lambda y: block(y) @ head.weight, x, use_reentrant=False)

    def loss(self, model, batch):
        self.head = model.head
        return super().loss(model, batch)


@case
class CheckpointTwoBackwards(Checkpointed):
    """Checkpoints and two backwards with `retain_graph`"""

    pitfalls = (9, 14)

    def backward(self, run, loss):
        for retain in (True, False):
            with run.backward():
                loss.backward(retain_graph=retain)


# ---- compiled --------------------------------------------------------------------------------


class Compiled(Case):
    """Few blocks: compiling them is what takes the time"""

    pitfalls = (41,)
    timeout = 90.0

    def model(self):
        return Chain(depth=2)

    def train(self, run, model=None):
        counters = torch._dynamo.utils.counters
        counters.clear()
        for step in range(STEPS):
            # From the second step on nothing is compiled, or given up, in silence.
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                run.train_step(
                    lambda _, step=step: self.loss(
                        run.model if model is None else model, self.batch(step, run.rank)
                    )
                )
        # Under a default device torch 2.11 runs hooks, and what is around them, as they are
        # written.
        assert counters["stats"]["unique_graphs"] or (under_a_mode() and torch.__version__ < "2.13")


@case
class CompiledBlocks(Compiled):
    """`torch.compile` of every block (aot_eager)"""

    def prepare(self, model):
        for block in model.blocks:
            block.compile(backend="aot_eager")


@case
class CompiledAgainInAWindow(Case):
    """`p.grad = g` after the first of two micro-batches, whose shapes differ: compiled blocks
    compile again (aot_eager)
    """

    timeout = 60.0

    def prepare(self, model):
        for block in model.blocks:
            block.compile(backend="aot_eager", dynamic=False)

    def train(self, run):
        for step in range(self.steps):
            self.clear(run)
            for micro in range(2):
                batch = self.batch(step, run.rank)[: 4 - micro * (step + 1)]
                loss = run.step(lambda model, batch=batch: self.loss(model, batch))
                self.backward(run, loss)
                run.log(loss)
                for p in run.model.parameters() if not micro else ():
                    p.grad = 0.5 * p.grad
            run.optimizer.step()


@case
class CompiledBlocksAfterSetUp(Compiled):
    """`torch.compile` of every block after set-up (aot_eager)"""

    def train(self, run):
        for block in run.model.blocks:
            block.compile(backend="aot_eager")
        super().train(run)


@case
class CompiledBlockWrappers(Compiled):
    """Blocks replaced by `torch.compile(block)` before set-up (aot_eager)"""

    def model(self):
        model = super().model()
        model.blocks = nn.ModuleList(torch.compile(b, backend="aot_eager") for b in model.blocks)
        return model


@case
class CompiledModel(Compiled):
    """`torch.compile` of the whole model (aot_eager)"""

    def prepare(self, model):
        model.compile(backend="aot_eager")


@case
class CompiledModelAfterSetUp(Compiled):
    """`torch.compile` of the whole model after set-up (aot_eager)"""

    def train(self, run):
        super().train(run, torch.compile(run.model, backend="aot_eager"))


class CompiledModelThatReadsAWeight(Compiled):
    """`torch.compile` of the whole model, which reads the weight of another layer (aot_eager)"""

    refused = r"'stem\.weight'.*torch.compile takes the memory.*`@torch.compiler.disable`"

    class Tied(Chain):
        def forward(self, x):
            return super().forward(x) @ self.stem.weight

    def model(self):
        return self.Tied()

    def prepare(self, model):
        model.compile(backend="aot_eager")


@case
class CompiledModelThatReadsAWeightOutside(CompiledModelThatReadsAWeight):
    """`torch.compile` of the whole model, which reads that weight in a function with
    `torch.compiler.disable` (aot_eager)
    """

    refused = None

    class Tied(Chain):
        def forward(self, x):
            return self.out(super().forward(x))

        @torch.compiler.disable
        def out(self, x):
            return x @ self.stem.weight


@case
class Scripted(Case):
    """`torch.jit.script`ed sub-modules inside Python blocks"""

    pitfalls = (41,)
    timeout = 60.0

    class Scripting(Block):
        def __init__(self):
            super().__init__()
            self.down = torch.jit.script(nn.Sequential(nn.Linear(2 * DIM, DIM), nn.ReLU()))

    def model(self):
        return Chain(*(self.Scripting() for _ in range(3)))


@case
class ScriptedBlocks(Case):
    """`torch.jit.script`ed blocks"""

    timeout = 60.0

    def model(self):
        return Chain(
            *(torch.jit.script(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU())) for _ in range(3))
        )


@case
class InnerLoop(Case):
    """A gradient step inside of the step, differentiated through (MAML)"""

    pitfalls = (46,)

    def loss(self, model, batch):
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (batch,)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        adapted = {name: p - 0.05 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(model, adapted, (batch * 2,)).square().mean()


@case
class HookOfSeveralGradients(Case):
    """`register_multi_grad_hook` on parameters, in a step"""

    pitfalls = (43,)

    def train(self, run):
        seen = []

        def loss(model):
            parameters = list(model.head.parameters())
            torch.autograd.graph.register_multi_grad_hook(
                parameters, lambda grads: seen.append([tuple(g.shape) for g in grads])
            )
            return self.loss(model, self.batch(0, run.rank))

        for _ in range(STEPS):
            run.train_step(loss)
        run.log(len(seen), *seen)


@case
class SteppedInBackward(Case):
    """An optimizer for each parameter that steps in its post-accumulate hook"""

    pitfalls = (4,)
    refused = refused_on_one = "SGD was stepped inside of a backward pass.*'head.bias'.*after it"

    def optimizers(self, model):
        return [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]

    def train(self, run):
        owner = dict(zip(run.model.parameters(), run.optimizers, strict=True))
        for p in run.model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: owner[p].step())
        loss = run.step(lambda model: self.loss(model, self.batch(0, 0)))  # gradients need no mean
        self.backward(run, loss)


@case
class FrozenBetweenForwardAndBackward(Case):
    """`requires_grad_(False)` between forward and backward, and inside of the step"""

    pitfalls = (23,)

    def loss(self, model, batch):
        model.blocks[2].requires_grad_(False)
        out = model(batch)
        model.blocks[2].requires_grad_(True)
        return out.square().mean() + model.blocks[2](batch).mean()

    def backward(self, run, loss):
        run.model.blocks[1].requires_grad_(False)
        super().backward(run, loss)
        run.model.blocks[1].requires_grad_(True)
