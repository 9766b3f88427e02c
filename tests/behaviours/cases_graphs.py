"""Graphs of other shapes: derivatives inside derivatives, functions and hooks of the user's own,
graphs that live longer.
"""

import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .cases_outputs import Blocks, Opaque
from .harness import DIM, STEPS, Block, Case, case, seeded

# ---- derivatives -----------------------------------------------------------------------------


@case
class EnsembleByVmap(Case):
    """`torch.func.vmap` over a stack of the blocks' weights (an ensemble)"""

    def loss(self, model, batch):
        x = model.stem(batch)
        names = [n for n, _ in model.blocks[0].named_parameters()]
        stacked = {n: torch.stack([b.get_parameter(n) for b in model.blocks]) for n in names}

        def one(weights, x):
            return torch.func.functional_call(model.blocks[0], weights, (x,))

        return (
            model.head(torch.func.vmap(one, in_dims=(0, None))(stacked, x).mean(0)).square().mean()
        )


@case
class PathLength(Case):
    """Two penalties of several orders: on input gradients, and on the gradients of these"""

    def loss(self, model, batch):
        x = batch.requires_grad_()
        out = model(x)
        (first,) = torch.autograd.grad((out * seeded_like(out)).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        # so that training converges
        return out.square().mean() + 0.1 * first.square().mean() + 1e-4 * second.square().mean()


def seeded_like(x):
    return torch.randn(x.shape, generator=seeded(5))


@case
class BackwardInAThreadInTheStep(Case):
    """`torch.autograd.grad` in a thread inside of the step"""

    def loss(self, model, batch):
        x = batch.requires_grad_()
        out, found = super().loss(model, x), []
        thread = threading.Thread(
            target=lambda: found.extend(torch.autograd.grad(out, x, create_graph=True))
        )
        thread.start()
        thread.join()
        return out + found[0].square().sum()


@case
class AnotherModelInAThread(Case):
    """Another model that a thread trains meanwhile"""

    def train(self, run):
        other, over = torch.nn.Linear(DIM, DIM), threading.Event()

        def learn():
            while not over.wait(0.001):
                other(torch.ones(DIM, device=other.weight.device)).sum().backward()

        thread = threading.Thread(target=learn)
        thread.start()
        try:
            super().train(run)
        finally:
            over.set()
            thread.join()


@case
class StateCarriedWithItsGraph(Case):
    """A recurrent state carried over micro-batches with its graph (`retain_graph`, no detach)"""

    def train(self, run):
        for step in range(STEPS):
            self.clear(run)
            state = [torch.zeros(4, DIM)]

            def loss(model, micro, state=state, step=step):
                state[0] = model(self.batch(10 * step + micro, run.rank) + state[0])
                return state[0].square().mean()

            for micro in range(3):
                value = run.step(lambda model, micro=micro, loss=loss: loss(model, micro))
                run.log(value)
                with run.backward():
                    value.backward(retain_graph=True)
            run.optimizer.step()


# ---- functions of the user's own ---------------------------------------------------------------


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


@case
class FunctionOfAWeightInAnother(Blocks):
    """A custom Function of another unit's weight, inside of a block's forward"""

    def run(self, block, x):
        return Block.forward(block, x) + torch.tanh(_Product.apply(x, self.head.weight))

    def loss(self, model, batch):
        self.head = model.head
        return super().loss(model, batch)


@case
class FusedLinearLoss(Case):
    """A fused linear layer and loss: a custom Function that computes the weight's gradient in its
    forward
    """

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            with torch.enable_grad():
                x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
                loss = F.linear(x, weight, bias).square().mean()
                grads = torch.autograd.grad(loss, (x, weight, bias))
            ctx.save_for_backward(*grads)
            return loss.detach()

        @staticmethod
        def backward(ctx, grad):
            return tuple(grad * g for g in ctx.saved_tensors)

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = block(x)
        return self.Fused.apply(x, model.head.weight, model.head.bias)


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, g):
        a, b = x.chunk(2)
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.f, ctx.g, ctx.y = f, g, torch.cat([a, b])
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, grad):
        (a, b), (ga, gb) = ctx.y.chunk(2), grad.chunk(2)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            out = ctx.g(a)
            torch.autograd.backward(out, gb)
        with torch.no_grad():
            b, ga = b - out, ga + a.grad
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            out = ctx.f(b)
            torch.autograd.backward(out, ga)
        return torch.cat([ga, gb + b.grad]), None, None


@case
class ReversibleBlocks(Case):
    """Reversible blocks: a custom Function that runs modules without a graph, and backward
    recomputes them
    """

    def loss(self, model, batch):
        x = model.stem(batch)
        for f, g in (model.blocks[:2], model.blocks[2:]):
            x = _Reversible.apply(x, f, g)
        return model.head(x).square().mean()


@case
class ImplicitLayer(Case):
    """A fixed point without a graph, and a hook that solves for its gradient by `autograd.grad`
    (deep equilibrium)
    """

    def loss(self, model, batch):
        x = model.stem(batch)

        def f(z):
            return torch.tanh(0.1 * model.blocks[0](model.blocks[1](z)) + x)

        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = f(z)
        z = f(z)
        z0 = z.detach().requires_grad_()
        f0 = f(z0)

        def backward_hook(grad):
            g = grad
            for _ in range(4):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        z.register_hook(backward_hook)
        return model.head(z).square().mean()


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, y, *weights):
        ctx.f = f
        with torch.no_grad():
            for _ in range(2):
                y = y + 0.1 * f(y)
        ctx.save_for_backward(y, *weights)
        return y

    @staticmethod
    def backward(ctx, a):
        y, *weights = ctx.saved_tensors
        total = [torch.zeros_like(w) for w in weights]
        for _ in range(2):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                dy = 0.1 * ctx.f(y)
                ga, *gw = torch.autograd.grad(
                    dy, (y, *weights), a, allow_unused=True, retain_graph=True
                )
            y, a = y - dy, a + ga
            total = [t if g is None else t + g for t, g in zip(total, gw, strict=True)]
        return None, a, *total


@case
class AdjointMethod(Case):
    """The adjoint method of neural differential equations: `Function.apply(x, *parameters)`,
    `autograd.grad` in its backward
    """

    def loss(self, model, batch):
        y = model.stem(batch)
        for block in model.blocks:
            y = _Adjoint.apply(block, y, *block.parameters())
        return model.head(y).square().mean()


# ---- hooks -----------------------------------------------------------------------------------


@case
class HooksOfAllModules(Case):
    """Hooks for all modules (`register_module_forward_hook` and others) that read weights"""

    def train(self, run):
        from torch.nn.modules import module as global_hooks

        def pre(m, args):
            weight = getattr(m, "weight", None)
            return None if weight is None or weight.dim() < 2 else (args[0] + weight.mean(),)

        def post(m, args, out):
            return out * 1.1 if isinstance(m, nn.LayerNorm) else None

        def backward(m, gi, go):
            return (gi[0] * 1.2,) if isinstance(m, Block) else None

        handles = [
            global_hooks.register_module_forward_pre_hook(pre),
            global_hooks.register_module_forward_hook(post),
            global_hooks.register_module_full_backward_hook(backward),
        ]
        try:
            super().train(run)
        finally:
            for handle in handles:
                handle.remove()


@case
class IdentityHooksAndOpaque(Blocks):
    """Saved-tensor hooks that keep what they are given, and outputs of a class of the user's own"""

    def run(self, block, x):
        return Opaque(Block.forward(block, x))

    def loss(self, model, batch):
        x = model.stem(batch)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            for block in model.blocks:
                x = block(x)._hidden
        return model.head(x).square().mean()


# ---- checkpoints -----------------------------------------------------------------------------


@case
class CheckpointOfOpaque(Blocks):
    """One checkpoint around several blocks, some of which return objects of a class of the user's
    own
    """

    def run(self, block, x):
        out = Block.forward(block, x)
        return Opaque(out) if block.opaque else out

    def model(self):
        model = super().model()
        for i, block in enumerate(model.blocks):
            block.opaque = i in (0, 1)
        return model

    def loss(self, model, batch):
        def run(x):
            for block in model.blocks:
                x = block(x)
                x = x._hidden if block.opaque else x
            return x

        return model.head(checkpoint(run, model.stem(batch), use_reentrant=False)).square().mean()


class _SaveSome(Case):
    """Selective activation checkpointing"""

    def policy(self, ctx, op, *args, **kwargs):
        raise NotImplementedError

    def loss(self, model, batch):
        x = model.stem(batch)
        for block in model.blocks:
            x = checkpoint(
                block,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(self.policy),
            )
        return model.head(x).square().mean()


@case
class SelectiveCheckpointAroundSeveral(_SaveSome):
    """Selective activation checkpointing around several blocks and a weight read in between"""

    def policy(self, ctx, op, *args, **kwargs):
        kept = op in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.clone.default,
        )
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def loss(self, model, batch):
        def run(x):
            for block in model.blocks:
                x = block(x) + torch.tanh(x @ model.head.weight)
            return x

        x = checkpoint(
            run,
            model.stem(batch),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(self.policy),
        )
        return model.head(x).square().mean()


# ---- modes -----------------------------------------------------------------------------------


@case
class TeacherUnderInference(Case):
    """Targets from the model itself under `inference_mode`, in the step"""

    def loss(self, model, batch):
        with torch.inference_mode():
            wanted = model(batch + 1)
        return (model(batch) - wanted.clone()).square().mean()


# ---- more ------------------------------------------------------------------------------------


@case
class ContrastiveOverRanks(Case):
    """Features of all ranks with their gradients (`torch.distributed.nn.functional.all_gather`) in
    a contrastive loss
    """

    worlds = (2,)

    def loss(self, model, batch):
        from torch.distributed.nn.functional import all_gather

        mine = F.normalize(model(batch), dim=-1)
        others = F.normalize(model(batch + 1), dim=-1)
        features = torch.cat(all_gather(others.contiguous()))
        rank = torch.distributed.get_rank()
        return F.cross_entropy(mine @ features.t(), torch.arange(4) + 4 * rank)


@case
class PenaltyOutsideTheStep(Case):
    """A penalty on the gradients of parameters, computed in the backward, outside of the step"""

    def backward(self, run, loss):
        with run.backward():
            grads = torch.autograd.grad(loss, list(run.model.parameters()), create_graph=True)
            (loss + sum(g.square().sum() for g in grads)).backward()


@case
class CheckpointAroundOtherWeights(Case):
    """One checkpoint around several blocks and a weight of another unit"""

    def loss(self, model, batch):
        def run(x):
            for block in model.blocks:
                x = block(x) + torch.tanh(x @ model.head.weight)
            return x

        x = checkpoint(run, model.stem(batch), use_reentrant=False)
        return model.head(x).square().mean()
