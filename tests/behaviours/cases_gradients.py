"""Other ways to read, change or keep the gradient of a sharded parameter."""

import copy
import io

import torch
import torch.distributed as dist

from .harness import Case, case


class Graded(Case):
    """Something done to gradients between backward and the optimizer's step"""

    def touch(self, run, p):
        raise NotImplementedError

    def between(self, run):
        for p in run.model.parameters():
            self.touch(run, p)


@case
class GradRowsChanged(Graded):
    """`p.grad[k].mul_()` and `p.grad.view(-1)[1:].zero_()` between backward and step"""

    def touch(self, run, p):
        for k in range(len(p.grad) if p.ndim > 1 else 0):
            p.grad[k].mul_(k)
        p.grad.view(-1)[1:3].zero_()


@case
class GradDataViewChanged(Graded):
    """`p.grad.detach().mul_()` between backward and step"""

    def touch(self, run, p):
        p.grad.detach().mul_(0.5)


@case
class GradDataAssigned(Graded):
    """`p.grad.data = ...` between backward and step"""

    def touch(self, run, p):
        p.grad.data = p.grad.data.clamp(-0.01, 0.01)


@case
class GradDeleted(Graded):
    """`del p.grad` of some parameters between backward and step"""

    def touch(self, run, p):
        if p.ndim == 1:
            del p.grad


@case
class GradCopied(Graded):
    """`copy.deepcopy(p.grad)`, `torch.save(p.grad)` and arithmetic of gradients"""

    def touch(self, run, p):
        copied, pair = copy.deepcopy(p.grad), copy.deepcopy([p.grad.view(-1), p.grad.clone()])
        kind = torch.Tensor if run.refuses else type(p.grad)
        assert type(copied) is type(pair[0]) is kind
        copied.mul_(2.0)  # no longer the gradient
        file = io.BytesIO()
        torch.save(p.grad, file)
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded) is kind
        run.log(
            copied,
            *pair,
            loaded,
            torch.stack([row.abs() for row in p.grad]),
            p.grad.tolist() == loaded.tolist(),
        )


@case
class GradReduced(Graded):
    """`torch.distributed.all_reduce(p.grad)` between backward and step, some in the background"""

    on_host = True  # in one of NCCL's ranks torch 2.11 does not ask for the class

    def touch(self, run, p):
        before = p.grad.clone()
        if p.ndim == 1:
            dist.all_reduce(p.grad)
        else:
            dist.all_reduce(p.grad, async_op=True).wait()
        run.log(p.grad - before)
        dist.broadcast(p.grad, 0)


@case
class GradDecayed(Graded):
    """Weight decay by hand: `p.grad.add_(p, alpha=0.1)` between backward and step"""

    def touch(self, run, p):
        with torch.no_grad():
            p.grad.add_(p, alpha=0.1)


@case
class GradDecayedWhenGathered(Graded):
    """The same inside `gathered`"""

    def between(self, run):
        with run.gathered(run.model), torch.no_grad():
            for p in run.model.parameters():
                p.grad.add_(p, alpha=0.1)
        run.log(*(p.grad for p in run.model.parameters()))


class TwoBackwards(Case):
    """Gradients that were read after one backward are looked at, or changed, after another"""

    def look(self, run, kept):
        raise NotImplementedError

    def train(self, run):
        for step in range(self.steps):
            self.clear(run)
            for micro in range(2):
                loss = run.step(
                    lambda model, at=2 * step + micro: self.loss(model, self.batch(at, run.rank))
                )
                kept = [p.grad for p in run.model.parameters()]
                self.backward(run, loss)
            self.look(run, kept)
            run.optimizer.step()


@case
class GradKeptOverBackward(TwoBackwards):
    """`p.grad` kept while another backward adds to it, and changed in place then"""

    pitfalls = (16,)

    def look(self, run, kept):
        for grad in kept:
            grad.mul_(0.5)


@case
class GradReadOverBackward(TwoBackwards):
    """`p.grad` kept while another backward adds to it, and read then"""

    def look(self, run, kept):
        run.log(*kept)


@case
class GradAssignedBeforeAny(Case):
    """`p.grad = g` of some parameters, before the first backward and after `zero_grad()`, and
    cleared before the next
    """

    def clear(self, run):
        for p in list(run.model.parameters())[::3]:
            p.grad = torch.ones_like(p)
        run.optimizer.zero_grad()


@case
class GradAssignedAndScaledInGroups(Graded):
    """`p.grad = g`, kept for half of them, then all `p.grad.mul_()` in `optimizer.param_groups`,
    and `p.grad` read
    """

    def between(self, run):
        kept = [0.5 * p.grad for p in run.model.parameters()]
        for k, p in enumerate(run.model.parameters()):
            p.grad = kept[k] if k % 2 else kept[k].clone()
        for p in [p for group in run.optimizer.param_groups for p in group["params"]]:
            p.grad.mul_(0.5)
        run.log(*[p.grad for p in run.model.parameters()])


@case
class GradOfSomeAssignedAndReplacedInGroups(Graded):
    """`p.grad = g` of some after `zero_grad()`, then `p.grad = 2 * p.grad` for all that have one in
    `optimizer.param_groups`
    """

    def between(self, run):
        kept = [p.grad.clone() for p in run.model.parameters()]
        run.optimizer.zero_grad()
        for p, grad in list(zip(run.model.parameters(), kept, strict=True))[::3]:
            p.grad = grad
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = 2 * p.grad
        run.log(*[p.grad for p in run.model.parameters() if p.grad is not None])


@case
class GradGivenToAllInGroups(Graded):
    """`p.grad = g` for all in `optimizer.param_groups` after `zero_grad()`, read as
    `parameter.grad`; another backward
    """

    def between(self, run):
        run.optimizer.zero_grad()
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.01)
        run.log(*[p.grad for p in run.model.parameters()])
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class GradScaledInGroupsOfOneUnit(Graded):
    """`p.grad` read, scaled in `optimizer.param_groups`, read again and assigned, of a model that
    is one unit
    """

    small_numel = 1 << 20

    def between(self, run):
        norm = sum(p.grad.norm() for p in run.model.parameters())
        for p in [p for group in run.optimizer.param_groups for p in group["params"]]:
            p.grad.div_(norm)
        run.log(*[p.grad for p in run.model.parameters()])
        for p in run.model.parameters():
            p.grad = p.grad + 0.1 * p.grad.sign()


@case
class GradCentralizedInGroups(Graded):
    """`if p.grad.dim() > 1: p.grad -= p.grad.mean(...)` in `optimizer.param_groups`, as of
    convolutions
    """

    def between(self, run):
        for p in [p for group in run.optimizer.param_groups for p in group["params"]]:
            if p.grad.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))


@case
class GradAssignedAndZeroed(Graded):
    """`p.grad = g`, then `zero_grad(set_to_none=False)`, and another backward"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad = 2 * p.grad
        run.optimizer.zero_grad(set_to_none=False)
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class GradAssignedSparse(Graded):
    """`p.grad = p.grad.to_sparse()`, to which another backward adds"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad = (0.5 * p.grad).to_sparse()
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class GradsInOneBuffer(Graded):
    """`p.grad = flat[a:b].view_as(p)` of one buffer, which is scaled after by its norm"""

    refused = refused_on_one = "gradient of parameter 'stem.weight'.*assigned to it, was changed in"

    def between(self, run):
        parameters = list(run.model.parameters())
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)
        flat.mul_(0.05 / flat.norm())


@case
class GradAssignedAndCleared(Graded):
    """`p.grad = g`, then `zero_grad()`, and then another backward"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad = p.grad * 2
        run.optimizer.zero_grad()
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class GradsAfterZeroGrad(Graded):
    """`p.grad` after `optimizer.zero_grad()`, with `set_to_none` and without"""

    def between(self, run):
        kept = [p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad(set_to_none=False)
        run.log(*kept, *[p.grad for p in run.model.parameters()])
        run.optimizer.zero_grad()
        run.log(*[torch.tensor(p.grad is None) for p in run.model.parameters()])
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class ZeroedByTheOptimizer(Case):
    """An optimizer whose step ends with its own `zero_grad()`"""

    def optimizers(self, model):
        class Zeroing(torch.optim.SGD):
            def step(self, closure=None):
                super().step()
                self.zero_grad()

        return [Zeroing(model.parameters(), lr=0.1)]

    def clear(self, run):
        run.log(*[torch.tensor(p.grad is None) for p in run.model.parameters()])


@case
class GradZeroedByHand(Graded):
    """`p.grad.detach_(); p.grad.zero_()` and gradients of another backward added to that"""

    def touch(self, run, p):
        half = p.grad * 0.5
        p.grad.detach_()
        p.grad.zero_()
        p.grad.add_(half)


@case
class GradAccumulatedByHand(Graded):
    """Gradients kept in a list, added up and given back with `p.grad = ...`"""

    def train(self, run):
        self.kept = [torch.zeros(p.shape) for p in run.model.parameters()]
        super().train(run)
        run.log(*self.kept)

    def between(self, run):
        for kept, p in zip(self.kept, run.model.parameters(), strict=True):
            kept.mul_(0.9).add_(p.grad)
            p.grad = kept.clone()
