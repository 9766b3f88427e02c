"""Other ways to read, change or keep the gradient of a sharded parameter."""

import copy
import ctypes
import io

import torch
import torch.distributed as dist

from .cases_resting import _double, halve
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
    """`for row in p.grad: row.mul_()` and `p.grad.view(-1)[1:].zero_()` between backward and
    step
    """

    def touch(self, run, p):
        for k, row in enumerate(p.grad if p.ndim > 1 else [p.grad]):
            row.mul_(k)
        p.grad.view(-1)[1:3].zero_()


@case
class GradDataViewChanged(Graded):
    """`p.grad.detach().mul_()` between backward and step"""

    def touch(self, run, p):
        p.grad.detach().mul_(0.5)


@case
class GradChangedUnnamed(Graded):
    """`p.grad` changed by a custom operator, a scripted function, `vmap`, `functionalize`,
    `set_`
    """

    timeout = 60.0

    def prepare(self, model):
        script = torch.jit.script(_double)
        self.ways = (
            halve,
            script,
            lambda grad: torch.func.vmap(lambda row: row.mul_(0.5))(grad),
            lambda grad: torch.func.functionalize(lambda whole: whole.mul_(0.5))(grad),
            lambda grad: grad.set_(grad * 0.5),
        )

    def between(self, run):
        for index, p in enumerate(run.model.parameters()):
            self.ways[index % len(self.ways)](p.grad)


@case
class GradsChangedCompiled(Graded):
    """A list of gradients changed by a compiled function (aot_eager)"""

    timeout = 60.0

    def prepare(self, model):
        self.change = torch.compile(
            lambda grads: torch._foreach_mul_(grads, 0.5), backend="aot_eager"
        )

    def between(self, run):
        self.change([p.grad for p in run.model.parameters()])


@case
class GradSharedByDlpack(Graded):
    """`torch.from_dlpack(p.grad).mul_()` between backward and step"""

    refused = (
        "`__dlpack__` would share the memory of .* gradient of parameter"
        " 'stem.weight'.*parameter.grad = .*clone"
    )

    def touch(self, run, p):
        torch.from_dlpack(p.grad).mul_(0.5)


@case
class GradStorageWritten(Graded):
    """`p.grad.untyped_storage().fill_()` between backward and step"""

    refused_on_one = "`untyped_storage` of .* would give the memory of others"
    refused = (
        "`untyped_storage` would share the memory of .* gradient of parameter"
        " 'stem.weight'.*parameter.grad = "
    )

    def touch(self, run, p):
        p.grad.untyped_storage().fill_(0)


@case
class GradStorageAsked(Graded):
    """`p.grad.untyped_storage()` asked for its place and size, `copy.copy(p.grad)`, and a copy
    shared by DLPack
    """

    def touch(self, run, p):
        grad = p.grad
        storage, shared = grad.untyped_storage(), torch.from_dlpack(grad.clone())
        assert storage.data_ptr() <= grad.data_ptr() and storage.nbytes() >= grad.nbytes
        run.log(copy.copy(grad), shared)
        grad.add_(shared)


@case
class GradReceived(Graded):
    """`torch.distributed.irecv(p.grad)` between backward and step"""

    on_host = True
    worlds = (2,)
    refused = (
        "`i?recv` would change a view of a copy of the gradient of parameter"
        " 'stem.weight'.*parameter.grad = "
    )

    def touch(self, run, p):
        sent = dist.isend(torch.ones(p.shape), 1 - run.rank)
        dist.irecv(p.grad, 1 - run.rank).wait()
        sent.wait()


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

    refused = (
        "'stem.weight' is sharded over the ranks and was read outside a step.*strategy.gathered"
    )

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


@case
class GradKeptAsMomentum(Graded):
    """`p.grad` itself kept from step to step, and changed in place when it is no longer the
    gradient
    """

    def train(self, run):
        self.kept = {}
        super().train(run)
        run.log(*self.kept.values())

    def touch(self, run, p):
        kept = self.kept.setdefault(p, p.grad)
        if kept is not p.grad:
            kept.mul_(0.9).add_(p.grad)


@case
class GradViewsKept(Graded):
    """Views of `p.grad` (`detach()`, rows, another shape) kept from step to step"""

    def train(self, run):
        self.kept = []
        super().train(run)
        run.log(*self.kept)

    def touch(self, run, p):
        self.kept += [p.grad.detach(), p.grad[0], p.grad.view(-1)]


@case
class GradsOfTwoLosses(Case):
    """Gradients of a loss, and views of them, kept over `model.zero_grad()` and the backward of
    another loss, then added
    """

    pitfalls = (14,)

    def train(self, run):
        for step in range(self.steps):
            kept = []
            for task in range(2):
                run.model.zero_grad()
                loss = run.step(
                    lambda model, at=2 * step + task: self.loss(model, self.batch(at, run.rank))
                )
                self.backward(run, loss)
                kept.append([(p.grad, p.grad.detach()) for p in run.model.parameters()])
            for p, (first, view) in zip(run.model.parameters(), kept[0], strict=True):
                run.log(view)
                p.grad.add_(first)
            run.optimizer.step()


@case
class GradReplacedAndKept(Graded):
    """`p.grad` replaced by another tensor, or None, and the one of before kept and read in the next
    step
    """

    def train(self, run):
        self.kept = []
        super().train(run)

    def between(self, run):
        run.log(*self.kept)
        self.kept = [p.grad for p in run.model.parameters()]
        for p in run.model.parameters():
            p.grad = p.grad * 2 if p.ndim > 1 else None


@case
class GradReadTwice(Graded):
    """`p.grad` read twice, each of the two changed in place, then replaced and the old one
    changed
    """

    def touch(self, run, p):
        first, second = p.grad, p.grad
        first.mul_(3)
        second.add_(1)
        p.grad.mul_(2)
        first.sub_(0.5)
        run.log(first, second, p.grad)
        p.grad = p.grad * 0.1
        first.mul_(100)
        run.log(first, p.grad)


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
    """`p.grad` kept while another backward adds to it, and read then, also when it has been
    cleared
    """

    def look(self, run, kept):
        run.log(*kept)
        run.optimizer.step()
        self.clear(run)
        run.log(*kept)


@case
class GradStaleWhenCleared(TwoBackwards):
    """`p.grad` kept while another backward adds to it, and read when it has been cleared"""

    worlds = (2,)
    refused = (
        "gradient of parameter 'stem.weight' was read, then a backward or clipping changed it, and"
        " then it was cleared"
    )

    def look(self, run, kept):
        run.optimizer.step()
        self.clear(run)
        run.log(*kept)


@case
class GradTensorOverBackward(TwoBackwards):
    """`p.grad.as_subclass(torch.Tensor)` kept while another backward adds to it, `p.grad` read, and
    the old one changed then
    """

    def look(self, run, kept):
        plain = self.plain
        run.log(*[p.grad for p in run.model.parameters()], *plain)
        for grad in plain:
            grad.mul_(0.5)

    def backward(self, run, loss):
        self.plain = [
            p.grad.as_subclass(torch.Tensor) for p in run.model.parameters() if p.grad is not None
        ]
        super().backward(run, loss)


@case
class GradViewsOverBackward(TwoBackwards):
    """Views, `detach()`, `.data` and arrays of `p.grad` kept over another backward and a change of
    `p.grad`, and read
    """

    on_host = True

    def backward(self, run, loss):
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        self.kept = [
            kept for grad in gradients for kept in (grad.view(-1), grad.detach(), grad.data)
        ]
        self.arrays = [grad.view(-1).numpy() for grad in gradients]
        super().backward(run, loss)

    def look(self, run, kept):
        run.log(*self.kept, *map(torch.tensor, self.arrays))
        for p in run.model.parameters():
            p.grad.mul_(0.5)
        run.log(*self.kept, *map(torch.tensor, self.arrays))


@case
class GradKeptAndClearedAndAssigned(Graded):
    """`p.grad` kept, then `zero_grad()`, one gradient assigned, another backward, and the kept ones
    read and changed
    """

    def between(self, run):
        kept = [p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad()
        run.model.head.weight.grad = torch.ones_like(run.model.head.weight)
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))
        run.log(*kept)
        for grad in kept:
            grad.zero_()


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

    refused = refused_on_one = (
        "assigned to the gradient of parameters .* in `optimizer.param_groups`.*module.parameters"
    )

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

    refused = refused_on_one = (
        "assigned to the gradient of parameters .* in `optimizer.param_groups`.*module.parameters"
    )

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

    refused = refused_on_one = (
        "`dim` would be of the gradients of parameters '.*that this rank holds a shard of.*module's"
    )

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
class GradPenaltyOfBackward(Case):
    """A penalty on the `p.grad` that `backward(create_graph=True)` has left"""

    refused = refused_on_one = (
        r"gradient of parameter '[\w.]+' that `backward\(create_graph=True\)`.*has no"
        r" graph.*autograd.grad"
    )

    def backward(self, run, loss):
        with run.backward():
            loss.backward(create_graph=True)
        run.log(sum(p.grad.norm() for p in run.model.parameters()))
        if not run.is_reference:  # whose gradients are summed without a graph, too
            sum(p.grad.square().sum() for p in run.model.parameters()).backward()


@case
class GradAssignedSparse(Graded):
    """`p.grad = p.grad.to_sparse()`, to which another backward adds"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad = (0.5 * p.grad).to_sparse()
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class GradAssignedThenChanged(Graded):
    """`p.grad = g` for a list of tensors that are changed after, by `torch._foreach_mul_` and by
    `g.data`, and read
    """

    def between(self, run):
        mine = [p.grad.clone() for p in run.model.parameters()]
        for p, grad in zip(run.model.parameters(), mine, strict=True):
            p.grad = grad
        torch._foreach_mul_(mine, 0.5)
        run.log(*[p.grad for p in run.model.parameters()])
        for p, grad in zip(run.model.parameters(), mine, strict=True):
            p.grad.add_(0.1)
            grad.data.mul_(0.5)
        run.log(*mine)


@case
class GradAssignedThenDropped(Graded):
    """`p.grad = g`, where `g.data` is changed after and nobody keeps `g`"""

    def touch(self, run, p):
        p.grad = grad = p.grad * 2
        grad.data.mul_(0.3)


@case
class GradsInOneBuffer(Graded):
    """`p.grad = flat[a:b].view_as(p)` of one buffer, which is scaled after by its norm"""

    def between(self, run):
        parameters = list(run.model.parameters())
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)
        flat.mul_(0.05 / flat.norm())


@case
class GradsInLastingBuffer(Case):
    """Gradients in one buffer, made once, which each step zeroes, two backwards add to, and the
    user reads and scales
    """

    def train(self, run):
        parameters = list(run.model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = grad.view_as(p)
        for step in range(self.steps):
            flat.zero_()
            for micro in range(2):
                loss = run.step(
                    lambda model, at=2 * step + micro: self.loss(model, self.batch(at, run.rank))
                )
                self.backward(run, loss)
            run.log(flat)
            flat.mul_(0.5)
            run.optimizer.step()


@case
class GradAssignedAndCleared(Graded):
    """`p.grad = g`, then `zero_grad()`, and then another backward"""

    def between(self, run):
        for p in run.model.parameters():
            p.grad = p.grad * 2
        run.optimizer.zero_grad()
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))


@case
class GradClearedAndAssigned(Graded):
    """`zero_grad()`, then `p.grad = g`, to which another backward adds"""

    def between(self, run):
        mine = [0.5 * p.grad for p in run.model.parameters()]
        run.optimizer.zero_grad()
        for p, grad in zip(run.model.parameters(), mine, strict=True):
            p.grad = grad
        self.backward(run, run.step(lambda model: self.loss(model, self.batch(9, run.rank))))
        run.log(*mine)


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
class GradOfTwo(Graded):
    """`b.grad = a.grad`, and `a.grad` changed in place, then `b.grad`"""

    def between(self, run):
        a, b = run.model.blocks[0].up.weight, run.model.blocks[1].up.weight
        b.grad = a.grad
        a.grad.mul_(0.5)
        run.log(b.grad)
        b.grad.add_(0.1)
        run.log(a.grad)


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


@case
class GradsWrittenByAddress(Graded):
    """All `p.grad` written at addresses (`data_ptr`) that were taken before, and read once more in
    between
    """

    on_host = True

    def between(self, run):
        gradients = [p.grad for p in run.model.parameters()]
        addresses = [grad.data_ptr() for grad in gradients]
        for p, grad, address in zip(run.model.parameters(), gradients, addresses, strict=True):
            assert p.grad is grad and p.grad.data_ptr() == address
            (ctypes.c_float * grad.numel()).from_address(address)[:] = (
                (0.5 * grad).flatten().tolist()
            )
        run.log(*[p.grad.sum() for p in run.model.parameters()])
        for grad, address in zip(gradients, addresses, strict=True):
            (ctypes.c_float * grad.numel()).from_address(address)[:] = (
                (0.5 * grad).flatten().tolist()
            )


@case
class GradChangedAsTensor(Graded):
    """`p.grad.as_subclass(torch.Tensor).mul_()` between backward and step"""

    def touch(self, run, p):
        p.grad.as_subclass(torch.Tensor).mul_(0.5)


@case
class GradViewByAddress(Graded):
    """`p.grad.view(-1)` written at its address, and as `as_subclass(torch.Tensor)`, between
    backward and step
    """

    on_host = True

    def touch(self, run, p):
        view = p.grad.view(-1)
        (ctypes.c_float * 2).from_address(view.data_ptr())[:] = [1.0, 2.0]
        view.as_subclass(torch.Tensor)[2:4] = 3.0


@case
class GradWrittenByAddress(Graded):
    """`p.grad` written at its address (`data_ptr`), as a kernel of one's own would, between
    backward and step
    """

    on_host = True

    def touch(self, run, p):
        grad = p.grad
        (ctypes.c_float * grad.numel()).from_address(grad.data_ptr())[:] = (
            (0.5 * grad).flatten().tolist()
        )
