"""A single rank: its shard is the whole. Parameters view the flat tensors directly, and nothing
ever moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..collectives import LocalCollectives
from ..residency.given_out import storage_of
from ..residency.in_use import refused_data
from ..residency.past_python import guard_storage
from ..residency.refused_graph import refusing_graph
from ..residency.resting import keep_engine_last
from .reduction import Reducer, tensors_in
from .shards import Entry, FlatGroup
from .streams import Stream
from .unit import Arena, Unit


class WholeUnit(Unit):
    """A unit on a single rank: the shard is the whole, and the parameters view it directly. Nothing
    ever moves.
    """

    whole = True

    def connect(
        self, collectives: LocalCollectives, stream: Stream, arena: Arena, region: range
    ) -> None:
        """See :meth:`Unit.connect`."""
        arena.holders.append(self)
        self._collectives = collectives
        self._views = [(entry, _view(entry, entry.group.data)) for entry in self.entries]
        for entry, view in self._views:
            entry.parameter.data = view
        for group in self.groups:
            guard_storage(group.data)
        for chunk in self.chunks:
            chunk.slot = torch.empty(0, dtype=chunk.dtype, device=arena.memory.device)

    def gather(self, ahead: bool = False) -> bool:
        """Always there."""
        return True

    use = gather

    def release(self, filled: bool = True) -> None:
        """Nothing to do, for this and what is named below; ``filled`` is that of
        :meth:`replayed`.
        """

    unuse = rest = arrive = replayed = release

    def refresh(self, changed: Sequence[Entry]) -> None:
        """Tell autograd that saved weights are not what they were; it cannot see that the flat
        tensor changed.
        """
        increment_version([entry.parameter for entry in changed])

    def adopt(self) -> None:
        """Take over what the user put in the place of ``parameter.data``."""
        for entry, view in self._views:
            if entry.parameter.dtype != view.dtype or not entry.parameter.is_set_to(view):
                value = entry.parameter.data
                if (value.shape, value.dtype) != (view.shape, view.dtype):
                    raise refused_data(entry.parameter, value)
                # it may be a view of the same memory (`parameter.data.t()`)
                view.copy_(value.clone())
                entry.parameter.data = view

    def full(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """See :meth:`Unit.full`."""
        self.adopt()
        return super().full(*args, **kwargs)


class WholeReducer(Reducer):
    """One rank: gradients go straight into the flat gradients."""

    whole = lasting = True

    def __init__(self, units: list[Unit], collectives: LocalCollectives) -> None:
        self._collectives = collectives
        self.buffer = torch.empty(0, dtype=torch.uint8)
        # nothing waits, and nothing is on its way
        self._ranges, self._open, self._flying = (
            {},
            [],
            None,
        )
        self._parameters = [entry.parameter for unit in units for entry in unit.entries]
        self._entries = sorted(
            (entry for unit in units for entry in unit.trained), key=lambda entry: entry.number
        )
        self.views = [_view(entry, entry.group.grad) for entry in self._entries]
        self._addresses = [view.data_ptr() for view in self.views]
        # until gradients are cleared the next one is added
        self.written = bytearray(b"\1" * len(self.views))
        self.claimed = bytearray(b"\1" * len(units))  # there is no range to claim
        self._shown: dict[Entry, None] = {}
        # What Python and torch count where nobody keeps a gradient, or a view of one.
        self._references = [getrefcount(self.views[entry.number]) for entry in self._entries]
        self._tensors = {
            group: tensors_in(group.grad) for group in dict.fromkeys(e.group for e in self._entries)
        }
        for group in self._tensors:
            guard_storage(group.grad)
        self._mine: dict[
            Entry, tuple[Tensor, int]
        ] = {}  # what users assigned and hold, and its address
        self.apart = set()
        self._gone: dict[Entry, None] = {}  # their flat gradient was cleared

    def is_changed(self, group: FlatGroup, flat: nn.Parameter) -> bool:
        """Whether users have replaced gradients in that of ``flat``, in ``group``."""
        # Lists of gradients begin with the first: none in it is to be one of before.
        first = flat is group.segments[0].parameter
        return any(
            self._is_changed(entry)
            for entry in (group.entries if first else group.lying_in([flat]))
        )

    def _is_changed(self, entry: Entry) -> bool:
        grad, view = entry.parameter.grad, self.views[entry.number]
        if grad is None or entry in self._mine:  # which may have been changed past torch
            return entry in self._shown
        return (
            grad is not view
            or view.data_ptr() != self._addresses[entry.number]
            or entry in self._gone
        )

    def clear(self, group: FlatGroup, flat: nn.Parameter) -> None:
        """Users have taken the gradient of ``flat``, in ``group``, away: those of its parameters
        go, too.
        """
        for entry in group.lying_in([flat]):
            if entry.parameter.grad is not None:
                self._gone[entry] = None
            for found in (self._mine, self._shown):
                found.pop(entry, None)
            entry.parameter.grad = None

    def show(self, shown: bytes, graphs: bytes) -> None:
        """Parameters are ordinary here, and so is their ``grad``: a view of the flat gradient, or
        what the user assigned.
        """
        self._shown = {entry: None for entry in self._entries if shown[entry.number]}
        for entry in self._shown:
            if graphs[entry.number] and entry not in self._mine:
                grad = refusing_graph(self.views[entry.number], entry.name)
                self._mine[entry] = grad, grad.data_ptr()
            entry.parameter.grad = self._grad(entry)

    def _grad(self, entry: Entry) -> Tensor:
        return self._mine[entry][0] if entry in self._mine else self.views[entry.number]

    def hide(self) -> None:
        """Autograd would add to what it finds. The user's hooks are to find it before the engine's
        takes it away.
        """
        for entry in self._shown:
            entry.parameter.grad = None
        self._shown, self._gone = {}, {}
        for parameter in self._parameters:
            keep_engine_last(parameter)

    def changed(self) -> list[tuple[Entry, Tensor | None]]:
        """See :meth:`Reducer.changed`. Once: what is left on a parameter would look like another
        one, after `zero_grad()`.
        """
        if len(self._shown) < len(self._entries):
            self._shown |= {
                entry: None for entry in self._entries if entry.parameter.grad is not None
            }
        showing = {group for group in self._tensors if group.shows_gradients}
        found = (
            {e: None for e in self._gone if e.parameter.grad is None and e.group in showing}
            if showing
            else {}
        )
        found |= dict.fromkeys(self._replaced())
        for entry in found:
            self.retire(entry)
        for group in dict.fromkeys(entry.group for entry in found):
            found |= dict.fromkeys(self._make_room(group, found))
        gone, begun = self._gone, {entry.group for entry in found}
        self._gone = {e: None for e in gone if not (e.group in begun or e.group.shows_gradients)}
        changed: list[tuple[Entry, Tensor | None]] = []
        for entry in found:
            grad, view = entry.parameter.grad, self.views[entry.number]
            moved = view.data_ptr() != self._addresses[entry.number]
            if grad is view and entry not in gone:  # `parameter.grad.data = ...`
                if entry.group.shows_gradients:  # else it was cleared after that
                    changed.append((entry, grad.detach()))
                grad.data = _view(entry, entry.group.grad)
                continue
            # it was cleared, and is put back: the gradient from here on, in memory of its own
            if grad is view:
                view.data = view.clone()
                self._renew(entry, (entry,))
            self._mine.pop(entry, None)
            if grad is not None and grad.layout == torch.strided and _is_held(entry.parameter):
                self._mine[entry] = grad, grad.data_ptr()
            changed.append((entry, grad))
            del view  # it would count as the user's
            self._renew(entry) if moved else self._leave([entry])
        for entry, grad in changed:
            entry.parameter.grad = None if grad is None else self._grad(entry)
            if grad is None:
                self._shown.pop(entry, None)  # found once
        return changed

    def _replaced(self) -> list[Entry]:
        """Parameters whose gradient is another tensor, or none, or in other memory than it was."""
        found = []
        for entry in self._shown:
            grad, view = entry.parameter.grad, self.views[entry.number]
            if (
                grad is view
                and view.data_ptr() == self._addresses[entry.number]
                and entry not in self._gone
            ):
                continue
            mine, address = self._mine.get(entry, (None, 0))
            # else it is compared with what it was
            if grad is None or grad is not mine or grad.data_ptr() != address:
                found.append(entry)
        return found

    def _make_room(self, group: FlatGroup, replaced: Collection[Entry]) -> list[Entry]:
        """Where gradients are ``replaced`` others are written, or zeros: who has views of those
        before is to keep them.

        Returns parameters whose gradients are not replaced, and stay in that memory as if they had
        been assigned.
        """
        if self.captured or not self._is_kept(group):
            return []
        memory = storage_of(group.grad)
        shown = [
            e
            for e in self._shown
            if e.group is group and e not in replaced and e.parameter.grad is not None
        ]
        left = [
            e
            for e in shown
            if e.parameter.grad.layout == torch.strided and storage_of(e.parameter.grad) == memory
        ]
        group.leave()
        for entry in group.entries:
            self._renew(entry, {*replaced, *left})
        for entry in left:
            self._mine.pop(entry, None)
        return left

    def _is_kept(self, group: FlatGroup) -> bool:
        """Whether somebody has views of its gradients."""
        memory, mine = (
            storage_of(group.grad),
            [entry for entry in group.entries if entry in self._mine],
        )
        own = [self.views[entry.number] for entry in group.entries] + [
            self._mine[entry][0] for entry in mine
        ]
        with torch._C.DisableTorchFunctionSubclass():
            own += [
                segment.parameter.grad
                for segment in group.segments
                if segment.parameter.grad is not None
            ]
            there = [each.layout == torch.strided and storage_of(each) == memory for each in own]
        if tensors_in(group.grad) > self._tensors[group] - len(group.entries) + sum(there):
            return True
        del own
        graphs = [entry for entry in mine if self._mine[entry][0].requires_grad]
        return any(getrefcount(self._mine[entry][0]) > _references for entry in graphs)

    def begin_window(self, group: FlatGroup) -> None:
        """See :meth:`Reducer.begin_window`."""
        if self.captured or tensors_in(group.grad) == self._tensors[group]:
            self._leave(group.entries)
        else:
            group.leave()  # somebody keeps views of gradients: the memory is theirs
            for entry in group.entries:
                self._renew(entry)

    def make_way(self, group: FlatGroup, entries: list[Entry]) -> None:
        """See :meth:`Reducer.make_way`."""
        self._make_room(group, entries)
        self._leave(entries)
        for entry in entries:
            self._mine.pop(entry, None)
            self._shown[entry] = None
            entry.parameter.grad = self.views[entry.number]

    def _leave(self, entries: Iterable[Entry]) -> None:
        """Give gradients that somebody keeps memory of their own: the next ones go where they
        are.
        """
        for entry in entries:
            if (
                getrefcount(self.views[entry.number]) != self._references[entry.number]
                and not self.captured
            ):
                self.views[entry.number].data = self.views[entry.number].clone()
                self._renew(entry)

    def _renew(self, entry: Entry, replaced: Collection[Entry] = ()) -> None:
        guard_storage(entry.group.grad)
        view = _view(entry, entry.group.grad)
        if entry.parameter.grad is self.views[entry.number] and entry not in replaced:
            entry.parameter.grad = view
        self.views[entry.number], self._addresses[entry.number] = view, view.data_ptr()

    def zero_untouched(self) -> None:
        """See :meth:`Reducer.zero_untouched`."""
        for entry in self._entries:
            if not self.written[entry.number]:
                self.views[entry.number].zero_()
                self.written[entry.number] = 1


def _is_held(parameter: Tensor) -> bool:
    """Whether others than the caller have the gradient of ``parameter``, or a view of it."""
    # one for who asks
    return getrefcount(parameter.grad) > _references or tensors_in(parameter.grad) > 2


def _references_alone() -> int:
    parameter = torch.nn.Parameter(torch.zeros(2, device="cpu"))
    parameter.grad = torch.zeros(2, device="cpu")
    grad = parameter.grad
    return getrefcount(grad)


# that Python counts of a gradient which a parameter and one variable have
_references = _references_alone()


def _view(entry: Entry, flat: Tensor) -> Tensor:
    """The parameter in a flat tensor of its group. One without elements lies nowhere."""
    return entry.view(flat, 0 if entry.part is None else entry.part.start)
