"""The parameters of a unit that are trained or not, kept, unsharded and sent in the same dtypes, as
one sharded buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import ChunkLayout
from .shards import Entry, FlatGroup, Part


@dataclass(eq=False)
class OwnedPiece:
    """A piece of this rank's shard, and where it lies in the flat tensor of its group."""

    group: FlatGroup
    inside: slice  # of the shard
    place: slice  # in the flat tensor
    window: int = 0  # in which its gradient was last written, see FlatGroup; 0: never


class Chunk:
    """See the module's docstring."""

    owned: list[OwnedPiece]

    def __init__(
        self,
        entries: list[Entry],
        layout: ChunkLayout,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        master_dtype: torch.dtype,
    ) -> None:
        self.entries, self.layout = entries, layout
        self.dtype, self.wire_dtype, self.master_dtype = dtype, wire_dtype, master_dtype
        self.trained = entries[0].trained

    @property
    def nbytes(self) -> int:
        """Bytes that it takes unsharded."""
        return self.layout.numel * self.dtype.itemsize

    def own(self, groups: list[FlatGroup], rank: int) -> None:
        """Reserve this rank's pieces in the groups' flat tensors, and find its parts of the
        parameters there.
        """
        self.owned = []
        for index, inside in self.layout.pieces(rank).items():
            group = groups[index]
            start, group.numel = group.numel, group.numel + len(inside)
            self.owned.append(
                OwnedPiece(group, slice(inside.start, inside.stop), slice(start, group.numel))
            )
        for index, entry in enumerate(self.entries):
            span = self.layout.span(index, rank)
            if span is not None:
                piece = next(piece for piece in self.owned if piece.group is entry.group)
                entry.part = Part(span, piece.place.start + span.shard_start - piece.inside.start)

    def shard_of(self, buffer: Tensor, rank: int) -> Tensor:
        """This rank's part [shard] of a chunk-sized buffer [world_size * shard]."""
        return buffer.view(self.layout.world_size, -1)[rank]

    def load_shard(self, shard: Tensor, flat: Callable[[FlatGroup], Tensor | None]) -> None:
        """Copy this rank's pieces of the groups' flat tensors into ``shard`` [shard]; zeros where
        there is none.
        """
        for piece in self.owned:
            source = flat(piece.group)
            if source is None:
                shard[piece.inside].zero_()
            else:
                shard[piece.inside].copy_(source[piece.place])

    def store_shard(self, shard: Tensor, flat: Callable[[FlatGroup], Tensor | None]) -> None:
        """Copy ``shard`` [shard] back into the groups' flat tensors."""
        for piece in self.owned:
            target = flat(piece.group)
            if target is not None:
                target[piece.place].copy_(shard[piece.inside])

    def part_in(self, buffer: Tensor, part: Part, rank: int) -> Tensor:
        """A part of a parameter that this rank owns, in a chunk-sized buffer."""
        return self.shard_of(buffer, rank)[part.span.shard_start :][
            : part.span.stop - part.span.start
        ]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters inside a chunk-sized buffer."""
        return [e.view(buffer, o) for e, o in zip(self.entries, self.layout.offsets, strict=True)]
