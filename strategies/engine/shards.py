"""The optimizer's side: one flat tensor per optimizer group, holding this rank's pieces of every unit.

::

    unit 0: |p|p|   unit 1: |p|p|p|   unit 2: |p|         this rank's pieces, in unit order
    flat:   |u0.|u1..|u2|                                 one tensor, so an optimizer step is O(groups) kernels

The flat tensor is what the optimizer's param group holds from set-up on. Its gradient is one flat tensor too.

A parameter that no rank used since the gradients were cleared has no gradient at all: no weight decay, no momentum, no
step count, as with ``grad is None`` on one device. The flat tensor is then cut into segments, and the optimizer state with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..residency.flat_gradient import FlatGradient, FlatParameter


@dataclass(frozen=True)
class GroupKey:
    """Identity of a flat tensor: optimizer and param group (None: no optimizer has it), and dtype."""

    optimizer: int | None
    group: int | None
    dtype: torch.dtype


class FlatGroup:
    """This rank's shard of one optimizer group."""

    key: GroupKey
    index: int  # among all groups
    trained: bool  # an optimizer has it
    data: Tensor  # [numel], the master values
    public: Tensor  # the same memory as the optimizer sees it
    version: int  # of `public`, when it was last known what is written there
    segments: list[Segment]  # what the optimizer sees; together they cover `data`
    idle: list[tuple[int, int]]  # [start, stop) that no gradient is written to; scaling an infinite norm leaves NaN there
    window: int  # counts the times that gradients were started afresh
    first: int  # its trained parameters have the numbers [first, last)
    last: int

    def __init__(self, key: GroupKey, index: int) -> None:
        self.key, self.index = key, index
        self.trained = key.optimizer is not None
        self.numel, self.window, self.segments = 0, 0, []
        self._grad: Tensor | None = None
        self.owner: tuple[Optimizer, dict[str, Any]] | None = None  # whose state is cut along with the segments

    def allocate(self, device: torch.device) -> None:
        """Create the tensors, zeroed: padding must never hold NaN."""
        # A tail that no parameter owns: a rank may have nothing of a group, or only parameters without gradients, and must
        # still see like all others whether gradients were cleared. Optimizers and their state are alike on all ranks too.
        tail = 16 // self.key.dtype.itemsize
        self.numel += tail
        self.data = torch.zeros(self.numel, dtype=self.key.dtype, device=device)
        self.idle = [(self.numel - tail, self.numel)]
        self.public = self.data.data
        self.version = self.public._version
        self.segments = [Segment(0, self.numel, FlatParameter(self.public, requires_grad=self.trained))]

    @property
    def grad(self) -> Tensor:
        """The gradients [numel], of the same dtype; None where the group is not ``trained``."""
        if self._grad is None:
            if not self.trained:
                return None  # type: ignore[return-value]
            self._grad = torch.empty_like(self.data)
            self._zero_idle()
        return self._grad

    @property
    def grad_nbytes(self) -> int:
        """Bytes that gradients take now."""
        return 0 if self._grad is None else self._grad.nbytes

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What belongs in the optimizer's param group, in order."""
        return [segment.parameter for segment in self.segments]

    @property
    def shows_gradients(self) -> bool:
        """Whether a backward has ended since the gradients were cleared; the same on all ranks."""
        with torch._C.DisableTorchFunctionSubclass():  # else the class of a flat tensor is asked, in Python
            return self.segments[-1].parameter.grad is not None  # the tail is never unused

    def begin_window(self) -> bool:
        """Called when a backward begins: if gradients were cleared, the next reduction overwrites instead of adding."""
        if self.shows_gradients:
            self.adopt()
            return False
        self.window += 1
        if self._grad is not None:
            self._zero_idle()
        return True

    def give_back(self) -> None:
        """Free the memory of gradients that were cleared, until the next reduction."""
        if not self.shows_gradients:
            self._grad = None

    def _zero_idle(self) -> None:
        for start, stop in self.idle:
            self.grad[start:stop].zero_()

    def clear(self) -> None:
        """Take all gradients away from the optimizer."""
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                segment.parameter.grad = None

    def bind(self, unused: list[tuple[int, int]]) -> None:
        """Show the reduced gradients to the optimizer, except in ``unused`` [start, stop) ranges."""
        if unused:
            self.cut(sorted({edge for interval in unused for edge in interval}))
        grad = self.grad
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                if any(start <= segment.start and segment.stop <= stop for start, stop in unused):
                    segment.parameter.grad = None
                elif segment.parameter.grad is None:
                    segment.show(grad)

    def adopt(self) -> bool:
        """What was put in the place of the optimizer's tensors (`p.data = ...`), or of their gradients, goes to the shards.

        Returns whether there was a gradient.
        """
        found, values = False, self.public.data_ptr()
        gradients = 0 if self._grad is None else self._grad.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            for segment in self.segments:
                p, grad = segment.parameter, segment.parameter.grad
                start = segment.start * self.public.itemsize
                if p.data_ptr() != values + start:
                    segment.view(self.public).copy_(p.detach())
                    p.data = segment.view(self.public)
                if grad is not None and grad.data_ptr() != gradients + start:
                    segment.view(self.grad).copy_(grad.detach())
                    segment.show(self.grad)
                    found = True
        return found

    def guard(self, guarded: bool) -> None:
        """Whether a norm of values or gradients is an error: not while the optimizer steps, which may be compiled."""
        for segment in self.segments:
            segment.parameter.__class__ = FlatParameter if guarded else nn.Parameter
            grad = segment.parameter.grad
            if grad is not None:
                segment.parameter.grad = grad.as_subclass(FlatGradient if guarded else Tensor)

    def cut(self, edges: list[int]) -> None:
        """Split segments at ``edges``, and with them the optimizer's state."""
        assert self.owner is not None  # nobody looks at the segments of a group that is not trained
        optimizer, group = self.owner
        result: list[Segment] = []
        for segment in self.segments:
            inner = [edge for edge in edges if segment.start < edge < segment.stop]
            bounds = [segment.start, *inner, segment.stop]
            result += self._split(segment, bounds, optimizer.state) if inner else [segment]
        if len(result) == len(self.segments):
            return
        self.segments = result
        # A group may hold the flat tensors of several dtypes: keep the others.
        mine = {p.untyped_storage().data_ptr() for p in self.parameters}
        others = [p for p in group["params"] if p.untyped_storage().data_ptr() not in mine]
        group["params"][:] = [*others, *self.parameters]

    def _split(self, segment: Segment, bounds: list[int], states: dict[Tensor, Any]) -> list[Segment]:
        parts = [
            Segment(a, b, type(segment.parameter)(self.public[a:b], requires_grad=segment.parameter.requires_grad))
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        state = states.pop(segment.parameter, None)
        for part in parts:
            low, high = part.start - segment.start, part.stop - segment.start
            if segment.parameter.grad is not None:
                part.show(self.grad)
            if state is not None:
                states[part.parameter] = {k: _part(v, segment, low, high) for k, v in state.items()}
        return parts


def attach(groups: Iterable[FlatGroup], optimizers: Sequence[Optimizer]) -> None:
    """Put flat tensors in the place of parameters in the optimizers' param groups."""
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            flats = [flat for flat in groups if (flat.key.optimizer, flat.key.group) == (i, g)]
            for flat in flats:
                flat.owner = (optimizer, group)
            group["params"][:] = [p for flat in flats for p in flat.parameters]


@dataclass
class Segment:
    """Elements ``[start, stop)`` of a flat group, as the optimizer's parameter."""

    start: int
    stop: int
    parameter: nn.Parameter = field(repr=False)

    def view(self, flat: Tensor) -> Tensor:
        """The segment's range of another flat tensor of the group."""
        return flat[self.start : self.stop]

    def show(self, gradients: Tensor) -> None:
        """Let the optimizer see its range of the group's ``gradients``."""
        self.parameter.grad = self.view(gradients).as_subclass(FlatGradient)


def _part(value: Any, segment: Segment, low: int, high: int) -> Any:
    if isinstance(value, Tensor):
        elementwise = value.dim() == 1 and value.numel() == segment.stop - segment.start
        return value[low:high] if elementwise else value.clone()
    return value
