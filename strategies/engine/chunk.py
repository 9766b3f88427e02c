"""What this rank keeps of the parameters of a unit that are trained or not, kept and
unsharded in the same dtypes: one flat shard of their values, and one of their gradients.

::

    chunk            |  w0  |w1|..|   w2    |pad|     all ranks' shards
    values of rank 0 |  w0  |w1|..|w|                 a parameter's part is a view of them
"""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..support.torch_internals import InferenceMode
from .layout import ChunkLayout, Span


@dataclass(eq=False)
class Entry:
    """One parameter of a unit."""

    name: str
    parameter: Any  # an `nn.Parameter`
    trained: bool  # an optimizer has it, and it is floating or complex
    number: int = -1  # among all trained parameters of the engine
    seen: int = 0  # the version that the shards have (-1: none): a change in place shows
    assigned: int = 0  # how often its gradient was cleared or replaced
    # what `.data` was in the use that runs; torch counts separately what is written to each
    aliases: MutableSequence[Tensor] = field(default_factory=list)

    # set when an engine takes it over
    cls_in_use: Any = field(init=False, repr=False)  # see :func:`~.sharded.class_in_use`
    unit: Any = field(init=False, repr=False)  # its :class:`~.unit.Unit`
    chunk: Chunk = field(init=False, repr=False)
    span: Span | None = field(init=False)  # of the elements that this rank owns; None: of none
    owner: Any = field(init=False, repr=False)  # the :class:`~.engine.Zero3Engine` that stores it
    absent: Tensor = field(init=False, repr=False)  # its data while it is sharded
    absent_value: Tensor = field(init=False, repr=False)  # the same of views, and of its gradient
    # this rank's part of its values [elements of `span`], which optimizers step on
    shard: nn.Parameter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parameter = self.parameter
        # the user's; an engine of an earlier run may have it
        earlier = getattr(parameter, "zero3_entry", None)
        self.cls: Any = type(parameter) if earlier is None else earlier.cls
        self.meta = torch.empty_like(parameter, device="meta")
        self.dtype, self.size = self.meta.dtype, self.meta.shape
        self.stride = self.meta.stride()  # of the dense memory order it is stored in

    def was_written(self) -> bool:
        """Whether an alias was."""
        return any(alias._version for alias in self.aliases)

    def view(self, chunk: Tensor, offset: int) -> Tensor:
        """The parameter inside a flat ``chunk`` [numel]."""
        return torch.as_strided(chunk, self.size, self.stride, chunk.storage_offset() + offset)

    def part_of(self, shard: Tensor) -> Tensor:
        """This rank's elements of it in a tensor that is laid out like a shard of its chunk."""
        if self.span is None:
            return shard[:0]
        start = self.span.shard_start
        return shard[start : start + self.span.stop - self.span.start]

    def cut(self, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, which has the parameter's shape, in memory order."""
        if self.span is None:
            return value.new_empty(0)
        ordered = torch.empty(self.size.numel(), dtype=value.dtype, device=value.device)
        self.view(ordered, 0).copy_(value)
        return ordered[self.span.start : self.span.stop]


class Chunk:
    """See the module's docstring."""

    values: Tensor  # [shard], the master values; padding is zero
    source: Tensor  # [shard], what unshards send of it
    device: torch.device  # that computes with them
    numbers: slice  # of its parameters, among all that are trained
    gradients: Tensor | None = None  # [shard], reduced; None: nobody needs the memory now
    has_sums = False  # `gradients` are to be added to
    squared_norms: Tensor | None = None  # [parameters] of its gradients, where they are known

    def __init__(
        self,
        entries: list[Entry],
        layout: ChunkLayout,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
    ) -> None:
        self.entries, self.layout = entries, layout
        self.dtype, self.master_dtype = dtype, master_dtype
        self.trained = entries[0].trained

    @property
    def nbytes(self) -> int:
        """Bytes that it takes unsharded."""
        return self.layout.numel * self.dtype.itemsize

    def own(self, values: Tensor, rank: int) -> None:
        """Keep ``values`` [shard], this rank's, and find its part of each parameter there."""
        self.device, self.values, self.source = values.device, values, values
        self._find_parts(values, rank)

    def _find_parts(self, values: Tensor, rank: int) -> None:
        for index, entry in enumerate(self.entries):
            entry.chunk, entry.span = self, self.layout.span(index, rank)
            entry.shard = nn.Parameter(entry.part_of(values), requires_grad=self.trained)

    def shards(self) -> list[Tensor]:
        """What it keeps of values."""
        return [self.values]

    def wait_for_host(self) -> None:
        """Wait until what was given to the host to do here is done."""

    def read(self) -> Tensor:
        """[shard], the values, which are not written to."""
        return self.values

    def begin_write(self) -> None:
        """Its values, or parts of it, are going to be written to."""

    def room_for_gradients(self) -> Tensor:
        """The memory of :attr:`gradients`, which hold nothing unless they :attr:`has_sums`."""
        if self.gradients is None:
            # versions are asked for, also where a rank assists in an evaluation
            with InferenceMode(False):
                self.gradients = torch.empty_like(self.values)
        return self.gradients

    def gradients_or_zeros(self) -> Tensor:
        """:attr:`gradients` that can be written to one by one, or added to."""
        gradients = self.room_for_gradients()
        if not self.has_sums:
            gradients.zero_()
            self.has_sums = True
        return gradients

    def shard_of(self, buffer: Tensor, rank: int) -> Tensor:
        """This rank's part [shard] of a chunk-sized buffer [world_size * shard]."""
        return buffer.view(self.layout.world_size, -1)[rank]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters inside a chunk-sized buffer."""
        return [e.view(buffer, o) for e, o in zip(self.entries, self.layout.offsets, strict=True)]
