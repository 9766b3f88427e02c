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
    """`for row in p.grad: row.zero_()` between backward and step"""

    refused = "`zero_` would change a view of a copy of a sharded gradient.*parameter.grad = "

    def touch(self, run, p):
        for row in p.grad:
            row.zero_()


@case
class GradDataViewChanged(Graded):
    """`p.grad.detach().mul_()` between backward and step"""

    refused = "`mul_` would change a view of a copy of a sharded gradient.*parameter.grad = "

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
        assert type(copied) is type(pair[0]) is torch.Tensor
        copied.mul_(2.0)  # no longer the gradient
        file = io.BytesIO()
        torch.save(p.grad, file)
        file.seek(0)
        loaded = torch.load(file)
        assert type(loaded) is torch.Tensor
        run.log(copied, *pair, loaded, torch.stack([row.abs() for row in p.grad]), p.grad.tolist() == loaded.tolist())


@case
class GradReduced(Graded):
    """`torch.distributed.all_reduce(p.grad)` between backward and step, some in the background"""

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

    refused = "'stem.weight' is sharded over the ranks and was read outside a step.*strategy.gathered"

    def touch(self, run, p):
        with torch.no_grad():
            p.grad.add_(p, alpha=0.1)


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
