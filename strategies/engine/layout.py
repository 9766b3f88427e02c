"""Which elements of a unit live on which rank, and where units lie in memory. Integers only.

A chunk is one flat buffer of parameters laid end to end, padded to ``world_size`` equal shards::

    chunk   |  w0  |w1|..|   w2    |pad|        "..": a gap, so that every parameter starts aligned
    rank    |    0     |      1        |        rank r owns elements [r * shard, (r + 1) * shard)

One all-gather moves a whole chunk, whatever the number of parameters and of optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_BYTES = 16  # vectorised kernels fall back to slow paths on less
# regions of the pool start like fresh allocations of the CUDA caching allocator
REGION_BYTES = 256


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """The part of one parameter that one rank owns; all offsets in elements."""

    start: int  # first owned element of the parameter, in its memory order
    stop: int  # one past the last owned element
    shard_start: int  # where that first element lies in the rank's shard of the chunk


@dataclass(frozen=True)
class ChunkLayout:
    """Places parameters in a chunk of ``world_size`` equal shards."""

    numels: tuple[int, ...]  # elements of each parameter, in chunk order
    offsets: tuple[int, ...]  # first element of each in the chunk
    shard_numel: int
    world_size: int

    @classmethod
    def build(cls, numels: Sequence[int], world_size: int, itemsize: int) -> ChunkLayout:
        """Lay parameters end to end, each aligned to 16 bytes for elements of ``itemsize``
        bytes.
        """
        align = max(ALIGN_BYTES // itemsize, 1)
        offsets, end = [], 0
        for numel in numels:
            start = round_up(end, align)
            offsets.append(start)
            end = start + numel
        # At least one aligned element a rank: collectives break on empty tensors.
        shard_numel = max(round_up(-(-end // world_size), align), align)
        return cls(tuple(numels), tuple(offsets), shard_numel, world_size)

    @property
    def numel(self) -> int:
        """Elements of the padded chunk."""
        return self.shard_numel * self.world_size

    def span(self, index: int, rank: int) -> Span | None:
        """What ``rank`` owns of parameter ``index``, or None."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        offset = self.offsets[index]
        a, b = max(offset, low), min(offset + self.numels[index], high)
        return Span(a - offset, b - offset, a - low) if a < b else None

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of the chunk that hold no parameter."""
        ends = [
            0,
            *(offset + numel for offset, numel in zip(self.offsets, self.numels, strict=True)),
        ]
        return [
            (end, start)
            for end, start in zip(ends, [*self.offsets, self.numel], strict=True)
            if end < start
        ]


@dataclass(frozen=True)
class RegionLayout:
    """Fixed byte ranges for units in one buffer, such that neighbours do not overlap.

    Even units are placed at the low end of a shared area and odd ones at the high end::

        |unit 0|------------------|   unit 1   |
        |   unit 2   |------------|unit 3|         area = max over neighbours of (size_i + size_i+1)

    so a unit and the next one (being unsharded ahead) are alive together in the least memory that
    can hold them, each always at the same address. Units in ``separate`` (they stay in use while
    others run) get a range of their own.
    """

    regions: tuple[range, ...]  # bytes of each unit: what it needs, rounded up
    nbytes: int  # of the buffer

    @classmethod
    def build(cls, sizes: Sequence[int], separate: Sequence[bool], ends: int = 2) -> RegionLayout:
        """Place units; ``ends=1`` makes all shared units overlap (one buffer instead of two)."""
        sizes = [round_up(s, REGION_BYTES) for s in sizes]
        shared = [size for size, own in zip(sizes, separate, strict=True) if not own]
        area = max(shared, default=0)
        if ends == 2:
            area = max(map(sum, zip(shared, shared[1:], strict=False)), default=area)
        regions, placed, end = [], 0, area
        for size, own in zip(sizes, separate, strict=True):
            if own:
                start, end = end, end + size
            else:
                start = area - size if ends == 2 and placed % 2 else 0
                placed += 1
            regions.append(range(start, start + size))
        return cls(tuple(regions), end)


def overlap(a: range, b: range) -> bool:
    """Whether two regions share bytes."""
    return a.start < b.stop and b.start < a.stop
