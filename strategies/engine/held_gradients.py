"""Tensors that users hold of gradients: what is written to them reaches the shards, and they follow what changes there.

Between passes a gradient exists as shards alone. In torch `p.grad` is one tensor until it is cleared, whoever holds it, and a
tensor that was assigned to it is that tensor. Here both are copies, which are to show, and to take, the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..collectives import LocalCollectives, Meeting, checksum
from ..residency.apart import apart
from ..residency.home import ResidencyError
from ..residency.resting import ShardedCopy, as_subclass, set_data, told_of_gradient
from .gradients import Gradients
from .shards import Entry

count_sharers = torch._C._storage_Use_Count  # tensors that share a storage, and one for who asks


@dataclass(eq=False)
class Alias:
    """A tensor that is a gradient, and that may be changed without a word to the engine."""

    entry: Entry
    tensor: Tensor | None  # ordinary, in the same memory; None: it was assigned, and nobody else has it any more
    copy: ShardedCopy | None  # None: it was assigned; else the user has asked for the address of this one, or so
    since: tuple[int, ...]  # when it had the gradient's values, see `Gradients.since`
    seen: int  # checksum of its values then


class HeldGradients:
    """All such tensors, of parameters that are sharded."""

    def __init__(self, gradients: Gradients, collectives: LocalCollectives) -> None:
        self._gradients, self._collectives = gradients, collectives
        self._read: WeakValueDictionary[Entry, ShardedCopy] = WeakValueDictionary()  # what `p.grad` is
        self._aliases: dict[Entry, list[Alias]] = {}  # the same entries on all ranks, which run the same code
        self._last: Alias | None = None  # that was assigned

    def show(self, entry: Entry, grad: Tensor) -> ShardedCopy:
        """``p.grad``, of which ``grad`` is the whole value: the same tensor as long as the user has it."""
        since, held = self._gradients.since(entry), self._read.get(entry)
        if held is None or held.since[:2] != since[:2]:
            held = self._read[entry] = ShardedCopy.of(grad, told_of_gradient(entry.parameter), entry.parameter, since)
        elif held.since != since:
            self._refresh(entry, held, grad)
        if any(map(self._is_behind, self._aliases.get(entry, []))):
            self._spread(entry, held)
        return held

    def adopt(self) -> None:
        """All that users wrote, or assigned, is visible to the optimizers."""
        self.keep()
        for entry, grad in self._gradients.adopt():
            entry.assigned += 1
            if grad is not None:
                self.assigned(entry, grad)

    def assigned(self, entry: Entry, grad: Tensor) -> None:
        """``p.grad = grad``: its values are stored."""
        since = self._gradients.since(entry)
        with torch._C.DisableTorchFunctionSubclass():
            plain = as_subclass(grad.detach(), Tensor)
        if isinstance(grad, ShardedCopy) and grad.parameter is entry.parameter:
            grad.since, grad.stale, self._read[entry] = since, False, grad
            shared = _is_shared(plain, 2)
            alias = Alias(entry, plain, grad, since, _checksum(plain)) if shared else Alias(entry, None, None, since, 0)
            self._aliases[entry] = [alias]  # in any case: others may share it on another rank
            return
        for other in [other for other, held in self._read.items() if held is grad]:
            self.watch(other, grad)  # it is the gradient of two
        if self._last is not None:
            self._look(self._last)  # often nobody has it any more
        self._last = Alias(entry, plain, None, since, _checksum(plain))
        self._aliases[entry] = [self._last]

    def watch(self, entry: Entry, copy: ShardedCopy) -> None:
        """``copy`` may be changed past torch, as long as it is the gradient."""
        aliases = self._aliases.setdefault(entry, [])
        if not any(alias.copy is copy for alias in aliases):
            aliases.append(Alias(entry, _plain(copy), copy, copy.since, _checksum(_plain(copy))))

    def keep(self, entry: Entry | None = None) -> None:
        """Somebody looks at gradients (that of ``entry``): store those that were changed without a word; local."""
        for aliases in tuple(self._aliases.values()) if entry is None else [self._aliases.get(entry, [])]:
            for alias in tuple(aliases):
                self._look(alias)
        for each, copy in tuple(self._read.items()) if entry is None else [(entry, self._read.get(entry))]:
            since = self._gradients.since(each)
            if copy is not None and copy.since != since and copy.since[:2] == since[:2]:
                copy.stale = True

    def stored(self, entry: Entry, copy: ShardedCopy) -> None:
        """``copy`` was changed in place, as torch has counted: store it, if it is still the gradient; local."""
        if not self._is_current(entry, copy.since):
            return  # it was cleared or replaced: an ordinary tensor, as in torch
        self._require_latest(entry, copy.since)
        with apart():
            self._gradients.assign(entry, copy)
            self._spread(entry, copy)

    def follow(self, entry: Entry, copy: ShardedCopy) -> None:
        """``copy`` is about to be used. Collective if the gradient has changed since it was read."""
        self.keep(entry)
        since = self._gradients.since(entry)
        if not copy.stale and (copy.since == since or copy.since[:2] != since[:2]):
            return
        if not self._is_current(entry, copy.since):
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was read, then a backward or clipping changed it, and then it was "
                "cleared or replaced: the tensor of before has not followed. Read `parameter.grad` after its last change."
            )
        with apart():
            self._refresh(entry, copy, self._gradients.full(entry))
            self._spread(entry, copy)

    def follow_all(self) -> None:
        """Gradients may have changed: so do the tensors that were assigned; collective if any were, and have to."""
        if not self._aliases:
            return
        behind = [alias for aliases in self._aliases.values() for alias in aliases if self._is_behind(alias)]
        if not behind:
            return
        flags = torch.tensor([alias.tensor is not None for alias in behind], dtype=torch.int64, device="cpu")
        if not self._gradients.announced:  # else the ranks that assist hold none
            flags = self._collectives.agree(flags, Meeting.GRADIENTS)
        for alias, held in zip(behind, flags.tolist(), strict=True):
            if held and self._is_behind(alias):
                with apart():
                    self._spread(alias.entry, self._gradients.full(alias.entry))

    def _is_current(self, entry: Entry, since: tuple[int, ...]) -> bool:
        return self._gradients.since(entry)[:2] == since[:2] and self._gradients.has_gradient(entry)

    def _is_behind(self, alias: Alias) -> bool:
        return self._is_current(alias.entry, alias.since) and self._gradients.since(alias.entry) != alias.since

    def _look(self, alias: Alias) -> None:
        """Store what was written to it, and forget it if it is the gradient no more."""
        entry, tensor = alias.entry, alias.tensor
        if not self._is_current(entry, alias.since):
            others = [other for other in self._aliases.pop(entry, []) if other is not alias]
            if others:
                self._aliases[entry] = others
        elif tensor is not None:
            seen = _checksum(tensor)
            if seen != alias.seen:
                self._require_latest(entry, alias.since)
                alias.seen = seen
                with apart():
                    self._gradients.assign(entry, tensor)
                    self._spread(entry, tensor)
            if alias.copy is None and not _is_shared(tensor, 1):
                alias.tensor = None

    def _require_latest(self, entry: Entry, since: tuple[int, ...]) -> None:
        if self._gradients.since(entry) != since:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was read or assigned, then a backward or clipping changed it, and "
                "then the tensor of before was changed. Read `parameter.grad` again after the backward."
            )

    def _spread(self, entry: Entry, value: Tensor) -> None:
        """``value`` is the gradient now, which the shards have: all who hold it are to have it, too."""
        since, held, value = self._gradients.since(entry), self._read.get(entry), _plain(value)
        with torch._C.DisableTorchFunctionSubclass(), apart():
            for alias in self._aliases.get(entry, []):
                if alias.tensor is not None:
                    if not alias.tensor.is_set_to(value):
                        alias.tensor.copy_(value)
                    alias.seen = _checksum(alias.tensor)
                alias.since = since
            if held is not None and held.since[:2] == since[:2]:
                if not _plain(held).is_set_to(value):
                    _plain(held).copy_(value)
                held.since, held.stale = since, False

    def _refresh(self, entry: Entry, copy: ShardedCopy, grad: Tensor) -> None:
        """``copy`` takes over ``grad``: in its own memory if somebody has the address, and else that of ``grad``."""
        with torch._C.DisableTorchFunctionSubclass(), apart():
            if entry in self._aliases:
                _plain(copy).copy_(grad)
            else:
                set_data(copy, grad)
        copy.since, copy.stale = self._gradients.since(entry), False


def _plain(tensor: Tensor) -> Tensor:
    return as_subclass(tensor, Tensor)


def _is_shared(tensor: Tensor, ours: int) -> bool:
    """Whether others than ``ours`` have the memory of ``tensor``."""
    return tensor.layout != torch.strided or count_sharers(tensor.untyped_storage()._cdata) > ours + 1


def _checksum(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass(), apart():
        return int(checksum(tensor if tensor.layout == torch.strided else tensor.to_dense()))
