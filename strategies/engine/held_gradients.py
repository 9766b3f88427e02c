"""Tensors that users hold of gradients: what is written to them reaches the shards, and they follow
what changes there.

Between passes a gradient exists as shards alone. In torch `p.grad` is one tensor until it is
cleared, whoever has it or a view of it, and a tensor that was assigned to it is that tensor. Here
these are copies that show, and take, the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..collectives import LocalCollectives, Meeting, checksum
from ..residency.apart import apart
from ..residency.given_out import same_bits
from ..residency.home import ResidencyError
from ..residency.refused_graph import refusing_graph
from ..residency.resting import ShardedCopy, as_subclass, told_of_gradient
from .clearing import clearing
from .gradients import Gradients
from .reduction import tensors_in
from .shards import Entry

_array = Tensor.numpy  # torch's own


@dataclass(eq=False)
class Held:
    """Memory that is a gradient until it is cleared or replaced; all that views it has this
    object.
    """

    entry: Entry
    tensor: Tensor  # all of it, as an ordinary tensor
    since: tuple[int, ...]  # when it had the gradient's values, see `Gradients.since`
    stale: bool = False  # they have changed since
    # fingerprint of its values then, if it may be changed without a word to the engine
    seen: int | None = None
    addressed: bool = False  # as long as it is the gradient, because somebody has its address


class HeldGradients:
    """All such memory, of parameters that are sharded."""

    def __init__(self, gradients: Gradients, collectives: LocalCollectives) -> None:
        self._gradients, self._collectives = gradients, collectives
        gradients.keep, gradients.note_gathered = self.keep, self.note_gathered
        self._read: WeakValueDictionary[Entry, Held] = WeakValueDictionary()  # that `p.grad` is in
        # what `p.grad` is
        self._shown: WeakValueDictionary[Entry, ShardedCopy] = WeakValueDictionary()
        self._watched: dict[Entry, list[Held]] = {}  # those that are `seen`
        self._last: Held | None = None  # that was assigned
        # Gradients that were gathered to be read, or assigned, by all ranks; what each of them
        # holds need not be the same.
        self._known: dict[Entry, tuple[int, ...]] = {}

    def show(self, entry: Entry, grad: Tensor) -> ShardedCopy:
        """``p.grad``, of which ``grad`` is the whole value: the same tensor as long as the user has
        it.
        """
        since, held = self._gradients.since(entry), self._read.get(entry)
        if held is None or held.since[:2] != since[:2]:
            held = self._read[entry] = Held(entry, grad, since)
        self._take(entry, grad)
        shown = self._shown.get(entry)
        if shown is None or shown.held is not held:
            told, tensor = told_of_gradient(entry.parameter), held.tensor
            if self._gradients.graphs[entry.number]:
                tensor = refusing_graph(tensor, entry.name)
            with torch.set_grad_enabled(tensor.requires_grad):
                shown = self._shown[entry] = ShardedCopy.of(tensor, told, entry.parameter, held)
        return shown

    def is_shown(self, entry: Entry, grad: Tensor | None) -> bool:
        """Whether ``grad`` is what `p.grad` is already."""
        held = (
            grad.held
            if isinstance(grad, ShardedCopy) and grad.parameter is entry.parameter
            else None
        )
        return held is not None and self._is_current(entry, held.since)

    def lose_graph(self, entry: Entry) -> None:
        """What `p.grad` is from here on was not made with create_graph."""
        self._gradients.graphs[entry.number] = 0
        shown = self._shown.get(entry)
        if shown is not None and shown.requires_grad:
            del self._shown[entry]

    def adopt(self) -> None:
        """All that users assigned is visible to the optimizers; what they wrote is, since
        :meth:`keep`.
        """
        for entry, grad in self._gradients.adopt():
            entry.assigned += 1
            if grad is not None:
                self.assigned(entry, grad)

    def assigned(self, entry: Entry, grad: Tensor) -> None:
        """``p.grad = grad``: its values are stored."""
        since = self._known[entry] = self._gradients.since(entry)
        if (
            isinstance(grad, ShardedCopy)
            and grad.parameter is entry.parameter
            and grad.held is not None
        ):
            held = self._read[entry] = grad.held
            held.since, held.stale, self._shown[entry] = since, False, grad
            if _is_shared(held.tensor, 2):
                self.watch(held)
            return
        if isinstance(grad, ShardedCopy) and grad.held is not None:
            self.watch(grad.held)  # it may be the gradient of another, too
        with torch._C.DisableTorchFunctionSubclass():
            plain = grad.detach() if type(grad) is Tensor else as_subclass(grad.detach(), Tensor)
        if self._last is not None:
            self._look(self._last)  # often nobody has it any more
        self._last = Held(entry, plain, since)
        self.watch(self._last)

    def watch(self, held: Held, addressed: bool = False) -> None:
        """Memory may be changed past torch, by who shares it or has its address."""
        held.addressed |= addressed
        if held.seen is None:
            held.seen = _fingerprint(held.tensor)
            self._watched.setdefault(held.entry, []).append(held)

    def keep(self, entry: Entry | None = None) -> None:
        """Somebody looks at gradients (that of ``entry``): store those that were changed without a
        word; local.
        """
        if self._watched:
            self._gradients.adopt_replaced()  # which is not to be overwritten
        self._look_at(entry)

    def look_again(self) -> None:
        """Somebody asks for the gradient of a flat tensor."""
        if self._gradients.reducer.held and clearing() is None:
            with apart():
                self._gradients.settle("")
        self._look_at(None)

    def _look_at(self, entry: Entry | None) -> None:
        for watched in (
            tuple(self._watched.values()) if entry is None else [self._watched.get(entry, [])]
        ):
            for held in tuple(watched):
                self._look(held)
        for each, held in (
            tuple(self._read.items()) if entry is None else [(entry, self._read.get(entry))]
        ):
            since = self._gradients.since(each)
            if held is not None and held.since != since and held.since[:2] == since[:2]:
                held.stale = True
        if entry is None:
            self._known = {
                each: since for each, since in self._known.items() if self._is_current(each, since)
            }

    def stored(self, copy: ShardedCopy) -> None:
        """``copy`` was changed in place, as torch has counted: store it, if it is still the
        gradient; local.
        """
        entry, held = copy.held.entry, copy.held
        if not self._is_current(entry, held.since):
            return  # it was cleared or replaced: an ordinary tensor, as in torch
        if copy.parameter is not None and not held.tensor.is_set_to(
            plain := as_subclass(copy, Tensor)
        ):
            entry.assigned += 1  # what others have of the memory of before is the gradient no more
            since = self._known[entry] = self._gradients.since(entry)
            # it was given other memory
            copy.held = held = self._read[entry] = Held(entry, plain, since)
            self._shown[entry] = copy
        self._store(held)

    def follow(self, held: Held) -> None:
        """What is in its memory is about to be used. Collective if the gradient has changed since
        it was read.
        """
        entry = held.entry
        self.keep(entry)
        if held.since[:2] == self._gradients.since(entry)[:2]:
            with apart():
                self._gradients.settle(entry.name)
            self._gradients.require_not_arrived(entry)
        since = self._gradients.since(entry)
        if not held.stale and (held.since == since or held.since[:2] != since[:2]):
            return
        if not self._is_current(entry, held.since):
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was read, then a backward or clipping"
                " changed it, and then it was cleared or replaced: the tensor of before has not"
                " followed. Read `parameter.grad` after its last change."
            )
        with apart():
            self._take(entry, self._gradients.full(entry))

    def follow_all(self) -> None:
        """Gradients may have changed: so does what nobody asks before it is read; collective if any
        was read or assigned.
        """
        known = sorted(self._known, key=lambda entry: entry.number)  # alike on all ranks
        behind = [
            each
            for each in known
            if self.may_have(each) and self._gradients.since(each) != self._known[each]
        ]
        if not behind:
            return
        flags = torch.tensor(
            [entry in self._watched for entry in behind], dtype=torch.int64, device="cpu"
        )
        if self._gradients.announced:
            flags[:] = 1  # the ranks that assist hold none
        else:
            flags = self._collectives.agree(flags, Meeting.GRADIENTS)
        wanted = [entry for entry, flag in zip(behind, flags.tolist(), strict=True) if flag]
        self._require_apart(wanted)
        with apart():
            if wanted:
                self._gradients.settle(wanted[0].name)
            for entry in wanted:
                self._take(entry, self._gradients.full(entry))
        if not self._gradients.announced:
            self._known.update({entry: self._gradients.since(entry) for entry in behind})

    def _require_apart(self, entries: list[Entry]) -> None:
        """In torch a tensor that is the gradient of two parameters gets what is added to either."""
        owners: dict[int, Entry] = {}
        for held in (
            held
            for entry in entries
            for held in self._watched.get(entry, ())
            if self._is_current(entry, held.since)
        ):
            if held.tensor.layout != torch.strided or not held.tensor.numel():
                continue
            other = owners.setdefault(held.tensor.data_ptr(), held.entry)
            if other is not held.entry:
                raise ResidencyError(
                    f"The gradients of parameters {other.name!r} and {held.entry.name!r} were one"
                    " tensor when a backward or clipping changed each of them. Assign a tensor of"
                    " its own to each (`p.grad = g.clone()`)."
                )

    def note_gathered(self, entries: list[Entry]) -> None:
        """All ranks have gathered the gradients of ``entries``, and each may look at any of
        them.
        """
        self._known.update({entry: self._gradients.since(entry) for entry in entries})

    def may_have(self, entry: Entry) -> bool:
        """Whether its gradient was gathered to be read, or assigned, since it was cleared; the same
        on all ranks.
        """
        return entry in self._known and self._is_current(entry, self._known[entry])

    def must_follow(self, entry: Entry) -> bool:
        """Whether tensors that users may have are to become the gradient before it is cleared; the
        same on all ranks.
        """
        return (
            self.may_have(entry)
            and entry not in entry.group.incomplete
            and not self._gradients.announced
        )

    def _is_current(self, entry: Entry, since: tuple[int, ...]) -> bool:
        return self._gradients.since(entry)[:2] == since[:2] and self._gradients.has_gradient(entry)

    def _look(self, held: Held) -> None:
        """Store what was written to it, and forget it if it is the gradient no more, or nobody else
        has it.
        """
        entry, tensor = held.entry, held.tensor
        current = self._is_current(entry, held.since)
        if tensor.layout != torch.strided:  # a backward that adds to it makes another tensor
            current = current and held.since == self._gradients.since(entry)
        if current and _fingerprint(tensor) != held.seen:
            self._store(held)
        ours = (
            1
            + (tensor._base is not None)
            + (self._read.get(entry) is held and entry in self._shown)
        )
        if not current or not (held.addressed or _is_shared(tensor, ours)):
            held.seen = None
            others = [other for other in self._watched.pop(entry) if other is not held]
            if others:
                self._watched[entry] = others
            if held is self._last:
                self._last = None

    def _store(self, held: Held) -> None:
        entry = held.entry
        self._gradients.require_not_arrived(entry)
        if self._gradients.since(entry) != held.since and not self._is_as_seen(held):
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was read or assigned, then a backward or"
                " clipping changed it, and then the tensor of before was changed. Read"
                " `parameter.grad` again after the backward."
            )
        with apart():
            self._gradients.assign(entry, held.tensor)
            self._take(entry, held.tensor)

    def _is_as_seen(self, held: Held) -> bool:
        """On one rank clipping changes a gradient that was assigned, and others in the flat tensor:
        is its part as it was?
        """
        reducer = self._gradients.reducer
        return (
            reducer.whole
            and held.seen is not None
            and _fingerprint(reducer.views[held.entry.number]) == held.seen
        )

    def _take(self, entry: Entry, grad: Tensor) -> None:
        """``grad`` is the gradient now, which the shards have: all who hold it are to have it,
        too.
        """
        since, read = self._gradients.since(entry), self._read.get(entry)
        # in such a step other ranks would not know
        if entry in self._known and not self._gradients.announced:
            self._known[entry] = since
        grad = grad if grad.layout == torch.strided else grad.to_dense()
        with torch._C.DisableTorchFunctionSubclass(), apart():
            for held in {
                id(each): each for each in (read, *self._watched.get(entry, [])) if each is not None
            }.values():
                if held.since[:2] != since[:2] or held.tensor.layout != torch.strided:
                    continue
                if not held.tensor.is_set_to(grad) and not same_bits(held.tensor, grad):
                    held.tensor.copy_(grad)
                held.since, held.stale = since, False
                if held.seen is not None:
                    held.seen = _fingerprint(held.tensor)


def _is_shared(tensor: Tensor, ours: int) -> bool:
    """Whether others than ``ours`` have the memory of ``tensor``."""
    return tensor.layout != torch.strided or tensors_in(tensor) > ours + 1


def _fingerprint(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass(), apart():
        values = tensor if tensor.layout == torch.strided else tensor.to_dense()
        if values.is_cpu:
            flat = values.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
            return hash(_array(flat).tobytes())
        return int(checksum(values))
