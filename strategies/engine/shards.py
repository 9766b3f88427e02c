"""The optimizer's side: one flat tensor per optimizer group, holding this rank's pieces of every
unit.

::

    unit 0: |p|p|   unit 1: |p|p|p|   unit 2: |p|         this rank's pieces, in unit order
    flat:   |u0.|u1..|u2|                                 one tensor: a step is O(groups) kernels

The flat tensor is what the optimizer's param group holds from set-up on. Its gradient is one flat
tensor too.

A parameter that no rank used since the gradients were cleared has no gradient at all: no weight
decay, no momentum, no step count, as with ``grad is None`` on one device. The flat tensor is then
cut into segments, and the optimizer state with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .flat_gradient import CutParameter, FlatGradient, FlatParameter, FlatState
from .layout import Span
from .segments import Segment
from .sharded import ResidencyError, Value, class_in_use

_data_ptr = Tensor.data_ptr  # torch's own
Adopt = Callable[["FlatGroup", list[Segment]], None]


@dataclass(frozen=True)
class Part:
    """What this rank owns of one parameter."""

    span: Span
    start: int  # in the flat tensor of the parameter's group

    @property
    def stop(self) -> int:
        """Where it ends there."""
        return self.start + self.span.stop - self.span.start

    def of(self, flat: Tensor) -> Tensor:
        """Its elements in a tensor that is laid out like that flat tensor."""
        return flat[self.start : self.stop]


@dataclass(eq=False)
class Entry:
    """One parameter of a unit."""

    name: str
    parameter: nn.Parameter
    cls: type[nn.Parameter]  # the user's
    dtype: torch.dtype  # the user's
    size: torch.Size  # [...], the user's
    stride: tuple[int, ...]  # of the dense memory order it is stored in
    group: FlatGroup
    unit: int  # index of its unit
    part: Part | None = None  # None: this rank owns nothing of it
    number: int = -1  # among all trained parameters of the engine
    seen: int = 0  # version when its use began: a change in place shows
    assigned: int = 0  # how often the user has replaced its gradient
    dropped: bool = False  # no optimizer has it, and its gradient was not kept

    # set when an engine takes it over
    value: Value = field(init=False, repr=False)
    absent: Tensor = field(init=False, repr=False)  # its data while it is sharded

    def __post_init__(self) -> None:
        self.cls_in_use = class_in_use(self.cls)
        self.trained = self.group.trained

    def view(self, chunk: Tensor, offset: int) -> Tensor:
        """The parameter inside a flat ``chunk`` [numel]."""
        return torch.as_strided(chunk, self.size, self.stride, chunk.storage_offset() + offset)

    def store(self, value: Tensor, flat: Tensor) -> None:
        """Copy what this rank owns of ``value`` (of the parameter's shape) into a flat tensor of
        the group.
        """
        if self.part is not None:
            # as the parameter's memory
            ordered = torch.empty(self.size.numel(), dtype=value.dtype, device=value.device)
            self.view(ordered, 0).copy_(value)
            self.part.of(flat).copy_(ordered[self.part.span.start : self.part.span.stop])


@dataclass(frozen=True)
class GroupKey:
    """Identity of a flat tensor: optimizer and param group (None: no optimizer has it), and
    dtype.
    """

    optimizer: int | None
    group: int | None
    dtype: torch.dtype


class FlatGroup:
    """This rank's shard of one optimizer group."""

    key: GroupKey
    index: int  # among all groups
    trained: bool  # an optimizer has it
    entries: list[Entry]  # its parameters, in unit order
    data: Tensor  # [numel], the master values
    public: Tensor  # the same memory as the optimizer sees it
    version: int  # of `public`, when it was last known what is written there
    segments: list[Segment]  # what the optimizer sees; together they cover `data`
    window: int  # counts the times that gradients were started afresh by a backward
    begun: int  # ... or by a user, who assigned one
    # whose gradients may have a part of a pass in them that an exception ended
    incomplete: set[Entry]
    # `written_by_others` when these were last looked at: another number may mean that they were
    # zeroed
    left: int
    muted: bool  # no gradient was wanted in the last backward
    numbers: slice  # of its parameters, among all that are trained; empty if it is not

    def __init__(self, key: GroupKey, index: int) -> None:
        self.key, self.index = key, index
        self.trained = key.optimizer is not None
        self.numel, self.window, self.begun, self.segments, self.entries = 0, 0, 0, [], []
        self.incomplete, self.left, self.muted = set(), 0, False
        self.allocated: Tensor | None = None  # the memory of `grad`
        self.looked = 0  # `written_by_others` when the elements that no parameter owns were zero
        # writes to it that are the engine's, less those to gradients that were freed
        self.uncounted = 0
        # whose state is cut along with the segments
        self.owner: tuple[Optimizer, dict[str, Any]] | None = None

    def allocate(self, device: torch.device) -> None:
        """Create the tensors, zeroed: padding must never hold NaN."""
        # A tail that no parameter owns: a rank may have nothing of a group, or only parameters
        # without gradients, and must still see like all others whether gradients were cleared.
        # Optimizers and their state are alike on all ranks too.
        tail = 16 // self.key.dtype.itemsize
        self.numel += tail
        self.data = torch.zeros(self.numel, dtype=self.key.dtype, device=device)
        self.public = self.data.data
        self.version = self.public._version
        self.segments = [
            Segment(0, self.numel, FlatParameter(self.public, requires_grad=self.trained))
        ]

    @property
    def grad(self) -> Tensor:
        """The gradients [numel], of the same dtype; None where the group is not ``trained``."""
        if self.allocated is None and self.trained:
            # versions are asked for, also where a rank assists in an evaluation
            with torch._C._InferenceMode(False):
                self.allocated = torch.empty_like(self.data)
            self._zero_idle(self.allocated)
            self.uncounted += self.allocated._version
        return self.allocated  # type: ignore[return-value]

    @property
    def owned(self) -> list[Entry]:
        """Its parameters that this rank owns a part of."""
        return [entry for entry in self.entries if entry.part is not None]

    def ranges_without(self, used: Sequence[int]) -> list[tuple[int, int]]:
        """[start, stop) of parameters without a gradient on any rank, as ``used`` says by
        number.
        """
        return [
            (entry.part.start, entry.part.stop) for entry in self.owned if not used[entry.number]
        ]

    @property
    def written_by_others(self) -> int:
        """How often others than the engine have written to the gradients, to clip them or so."""
        return (0 if self.allocated is None else self.allocated._version) - self.uncounted

    @contextmanager
    def written_by_engine(self) -> Iterator[None]:
        """Around what the engine writes to gradients, which counts as no change of them."""
        before = self.grad._version
        yield
        self.uncounted += self.grad._version - before

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What belongs in the optimizer's param group, in order."""
        return [segment.parameter for segment in self.segments]

    # The class of a flat tensor is the user's to ask: the engine looks past it, which saves Python
    # calls in each step.

    @property
    def shows_gradients(self) -> bool:
        """Whether a backward has ended since the gradients were cleared; the same on all ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.segments[-1].parameter.grad is not None  # the tail is never unused

    @property
    def switched_off(self) -> bool:
        """Whether no gradient is wanted, by ``toggle_optimizer``."""
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                if segment.parameter.requires_grad:
                    return False
            return True

    def begin_window(self, adopt_gradients: Adopt) -> bool:
        """Called when a backward begins: if gradients were cleared, the next reduction overwrites
        instead of adding.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self.segments[-1].parameter.grad is not None:
                self.adopt(adopt_gradients)
        if self.require_alike():
            return False
        self.window += 1
        self.begun += 1
        self.incomplete.clear()
        if self.allocated is not None and self.looked != self.allocated._version - self.uncounted:
            self._clear_idle()
        return True

    def give_back(self) -> None:
        """Free the memory of gradients that were cleared, until the next reduction."""
        if self.allocated is not None and not self.shows_gradients:
            self.uncounted -= self.allocated._version
            self.allocated = None

    @cached_property
    def _idle(self) -> Tensor:
        """[few, int64] places of elements that no parameter owns. What others write to all reaches
        them, too.
        """
        owned = (entry.part for entry in self.entries if entry.part is not None)
        parts = sorted(owned, key=lambda part: part.start)
        edges = zip(
            [0, *(part.stop for part in parts)],
            [*(part.start for part in parts), self.numel],
            strict=True,
        )
        return torch.cat(
            [torch.arange(start, stop, device=self.data.device) for start, stop in edges]
        )

    def _clear_idle(self) -> None:
        """Of gradients, when others have written to them: scaling by NaN leaves NaN."""
        # else it would count as a change of what autograd has saved
        self._zero_idle(self.grad.data)
        self.looked = self.written_by_others

    def _zero_idle(self, flat: Tensor) -> None:
        # as bytes, of whatever dtype
        flat.view(torch.uint8).view(-1, flat.itemsize).index_fill_(0, self._idle, 0)

    def require_alike(self) -> bool:
        """:attr:`shows_gradients`, or a ResidencyError if the user has cleared some flat gradients
        and not the others.
        """
        with torch._C.DisableTorchFunctionSubclass():
            shows = self.segments[-1].parameter.grad is not None
            for segment in self.segments:
                if (segment.parameter.grad is not None) is not (shows and segment.shown):
                    raise self.not_alike()
            return shows

    def not_alike(self) -> ResidencyError:
        """What to raise when a part of its flat gradients was cleared or replaced."""
        return ResidencyError(
            f"Some flat gradients{self.segments[-1].parameter.whose} were cleared in"
            " `optimizer.param_groups`, or replaced or given by the optimizer in its step, and"
            " others not: which parameters lie in them differs between ranks. Do it to all of a"
            " param group, or to `parameter.grad`."
        )

    def clear(self) -> None:
        """Take all gradients away from the optimizer."""
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                segment.parameter.grad, segment.shown = None, False

    def show(self, start: int, stop: int) -> None:
        """Show the gradients of elements [start, stop), with those of what is not cut from them,
        which are zero.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                if segment.start < stop and start < segment.stop and segment.parameter.grad is None:
                    segment.show(self.grad)

    def bind(self, unused: list[tuple[int, int]]) -> None:
        """Show the reduced gradients to the optimizer, except in ``unused`` [start, stop)
        ranges.
        """
        if unused:
            self.cut(sorted({edge for interval in unused for edge in interval}))
        grad = self.grad
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                if unused and any(
                    start <= segment.start and segment.stop <= stop for start, stop in unused
                ):
                    segment.parameter.grad, segment.shown = None, False
                elif segment.parameter.grad is None:
                    segment.show(grad)

    def adopt(self, adopt_gradients: Adopt) -> None:
        """What was put in the place of flat tensors or gradients goes to the shards;
        ``adopt_gradients`` comes before gradients do.
        """
        values = _data_ptr(self.public)
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                p = segment.parameter
                if _data_ptr(p) != values + segment.start * self.public.itemsize:
                    segment.view(self.public).copy_(p.detach())
                    p.data = segment.view(self.public)
            replaced = self._replaced()
            if replaced:
                adopt_gradients(self, [segment for segment, _ in replaced])
            for segment, grad in replaced:
                segment.view(self.grad).copy_(grad.detach())
                segment.show(self.grad)
        if self.allocated is not None and self.looked != self.allocated._version - self.uncounted:
            self._clear_idle()

    def adopt_values(self) -> None:
        """Others than an optimizer in its step have written to the values."""
        self.version = self.public._version
        self._zero_idle(self.data)

    def _replaced(self) -> list[tuple[Segment, Tensor]]:
        """Gradients that an optimizer has put in the place of the flat ones; not to be asked with
        the classes of these.
        """
        start, found = 0 if self.allocated is None else _data_ptr(self.allocated), []
        for segment in self.segments:  # not in comprehensions, which are calls
            grad = segment.parameter.grad
            if grad is not None and _data_ptr(grad) != start + segment.start * self.public.itemsize:
                found.append((segment, grad))
        return found

    def guard(self, guarded: bool, adopt_gradients: Adopt) -> None:
        """Whether a norm of values, gradients or state is an error: not while the optimizer steps,
        which may be compiled.
        """
        assert self.owner is not None
        self.adopt(adopt_gradients)
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                flat = segment.parameter
                flat.__class__ = FlatParameter if guarded else nn.Parameter
                if flat.grad is not None:
                    shown = Tensor.as_subclass(flat.grad, FlatGradient if guarded else Tensor)
                    if guarded:
                        shown.whose = flat.whose
                    flat.grad = shown
                for value in self.owner[0].state.get(flat, {}).values():
                    if type(value) in (Tensor, FlatState) and segment.has_shape_of(value):
                        # the same object: others may hold it
                        value.__class__ = FlatState if guarded else Tensor

    def cut(self, edges: list[int]) -> None:
        """Split segments at ``edges``, and with them the optimizer's state."""
        assert self.owner is not None  # nobody looks at the segments of a group that is not trained
        optimizer, group = self.owner
        with torch._C.DisableTorchFunctionSubclass():
            result = [
                part
                for segment in self.segments
                for part in self._split(segment, edges, optimizer.state)
            ]
        if len(result) == len(self.segments):
            return
        cut, self.segments = set(self.parameters), result
        # A group may hold the flat tensors of several dtypes: keep the others.
        mine = {p.untyped_storage().data_ptr() for p in self.parameters}
        others = [p for p in group["params"] if p.untyped_storage().data_ptr() not in mine]
        group["params"][:] = [*others, *self.parameters]
        for parameter in cut.difference(self.parameters):
            parameter.__class__ = CutParameter

    def _split(
        self, segment: Segment, edges: list[int], states: dict[Tensor, Any]
    ) -> list[Segment]:
        inner = [edge for edge in edges if segment.start < edge < segment.stop]
        if not inner:
            return [segment]
        parts, state = [], states.pop(segment.parameter, None)
        for a, b in zip([segment.start, *inner], [*inner, segment.stop], strict=True):
            parameter = type(segment.parameter)(
                self.public[a:b], requires_grad=segment.parameter.requires_grad
            )
            vars(parameter).update(vars(segment.parameter))
            parts.append(Segment(a, b, parameter, segment.shown))
            if segment.parameter.grad is not None:
                parts[-1].show(self.grad)
            if state is not None:
                states[parameter] = {
                    k: segment.part(v, a - segment.start, b - segment.start)
                    for k, v in state.items()
                }
        return parts


def attach(groups: Iterable[FlatGroup], optimizers: Sequence[Optimizer]) -> None:
    """Put flat tensors in the place of parameters in the optimizers' param groups."""
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            flats = [flat for flat in groups if (flat.key.optimizer, flat.key.group) == (i, g)]
            for flat in flats:
                flat.owner = (optimizer, group)
                first, last = flat.entries[0].name, flat.entries[-1].name
                for segment in flat.segments:
                    segment.parameter.whose = f" of parameters {first!r} to {last!r}"
            group["params"][:] = [p for flat in flats for p in flat.parameters]
