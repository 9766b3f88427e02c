"""Parts of tensors as bytes of a file that several ranks write at once, each at its own places."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..state_dicts.slices import SlicedTensor
from .storage import sync
from .zip_file import Piece

_BLOCK = 1 << 23  # bytes written at a time, while the processor's cache has them


@dataclass(frozen=True)
class Region:
    """A box of a tensor that lies in a file in row-major order.

    Attributes:
        base: where the tensor begins, in bytes.
        shape: of the tensor.
        offsets: of the box.
        values: of the box, on any device.
    """

    base: int
    shape: torch.Size
    offsets: tuple[int, ...]
    values: Tensor

    def runs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset in the file, bytes) of each range that is contiguous in the file."""
        sizes, item = self.values.shape, self.values.element_size()
        if not self.values.numel():
            return
        whole = len(sizes)  # from this dimension on the box is as large as the tensor
        while whole and sizes[whole - 1] == self.shape[whole - 1]:
            whole -= 1
        outer = max(whole - 1, 0)
        strides = [item * prod(self.shape[k + 1 :]) for k in range(len(sizes))]
        flat = self.values.detach().contiguous().reshape(-1).view(torch.uint8)
        length = item * prod(sizes[outer:])
        ranges = [range(a, a + n) for a, n in zip(self.offsets, sizes[:outer], strict=False)]
        inside = sum(a * s for a, s in zip(self.offsets[outer:], strides[outer:], strict=True))
        for number, index in enumerate(itertools.product(*ranges)):
            place = sum(a * s for a, s in zip(index, strides, strict=False))
            yield self.base + place + inside, flat[number * length : (number + 1) * length]

    def copy_to_cpu(self) -> Region:
        """Return a region with a copy of the values."""
        values = self.values.detach().to("cpu", copy=True)
        return Region(self.base, self.shape, self.offsets, values)


def regions_of(tensor: Tensor, base: int) -> Iterator[Region]:
    """Yield what this rank has of a tensor that begins at ``base``: its slices, or all of it."""
    if isinstance(tensor, SlicedTensor):
        for offsets, part in tensor.parts.items():
            yield Region(base, tensor.size(), offsets, part)
    else:
        yield Region(base, tensor.size(), (0,) * tensor.ndim, tensor)


def write_regions(file: Path, regions: Iterable[Region]) -> list[Piece]:
    """Write regions to a file that exists, durably; return checksums of what was written.

    Raises:
        OSError: the disk did not take them.
    """
    pieces: list[Piece] = []
    descriptor = os.open(file, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        for region in regions:
            for offset, data in region.runs():
                for block in data.split(_BLOCK):
                    _write(descriptor, offset, memoryview(block.cpu().numpy()), pieces)
                    offset += block.numel()
    finally:
        os.close(descriptor)
    sync(file)
    return pieces


def _write(descriptor: int, offset: int, block: memoryview, pieces: list[Piece]) -> None:
    """Write a block, and add it to the last piece if it continues that."""
    before = Piece(offset, 0, 0)
    if pieces and pieces[-1].start + pieces[-1].size == offset:
        before = pieces.pop()
    checksum = zlib.crc32(block, before.checksum)
    pieces.append(Piece(before.start, before.size + len(block), checksum))
    while block:
        written = os.pwrite(descriptor, block, offset)
        block, offset = block[written:], offset + written
