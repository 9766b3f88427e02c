"""Files that all ranks write at once, each its parts of tensors at their places.

Rank 0 makes the files with holes in the places of the tensors' values. Then each rank writes what
it has of every tensor, so none needs memory for more, and rank 0 gives the files their names.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..state_dicts.collective_errors import CheckpointError, rank_and_world_size, run_on_all_ranks
from ..state_dicts.gather import tensors_in
from ..state_dicts.slices import SlicedTensor
from ..support import profile_range
from .storage import begin, discard, sync
from .zip_file import Piece

_BLOCK = 1 << 23  # bytes written at a time
_LARGE = 1 << 20  # bytes from which on a block is written directly
_PAGE = mmap.PAGESIZE
_FLAGS = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
# None: this system has none
_fallocate: Any = getattr(ctypes.CDLL(None), "fallocate", None)


class Place(NamedTuple):
    """Where a tensor begins: the name of a file, below what is written, and an offset in it."""

    file: str
    base: int


class Region(NamedTuple):
    """A box of a tensor that lies in a file in row-major order.

    Attributes:
        place: where the tensor begins.
        shape: of the tensor.
        offsets: of the box.
        values: of the box, on any device.
    """

    place: Place
    shape: torch.Size
    offsets: tuple[int, ...]
    values: Tensor

    def runs(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset in the file, bytes) of each range that is contiguous in the file."""
        if not self.values.numel():
            return
        shape, sizes = self.shape, self.values.shape
        stride, begins = shape.numel() * self.values.element_size(), [self.place.base]
        for dim, (first, size) in enumerate(zip(self.offsets, sizes, strict=True)):
            stride //= shape[dim]  # bytes from one index to the next
            is_last = sizes[dim + 1 :] == shape[dim + 1 :]  # what follows is whole
            indices = [first] if is_last else range(first, first + size)
            begins = [begin + index * stride for begin in begins for index in indices]
            if is_last:
                break
        flat = self.values.detach().contiguous().reshape(-1).view(torch.uint8)
        yield from zip(begins, flat.chunk(len(begins)), strict=True)


def allocate(file: BinaryIO, size: int) -> None:
    """Make a file ``size`` bytes long, with room for all of them where the file system can say so.

    Ranks that write to holes of one file wait for each other much longer.
    """
    file.flush()
    # not `os.posix_fallocate`, which writes to each page where there is no such call
    if _fallocate is None or _fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        file.truncate(size)


def regions_of(tensor: Tensor, place: Place) -> Iterator[Region]:
    """Yield what this rank has of a tensor that begins there: its slices, or all of it."""
    if isinstance(tensor, SlicedTensor):
        for offsets, part in tensor.parts.items():
            yield Region(place, tensor.size(), offsets, part)
    else:
        yield Region(place, tensor.size(), (0,) * tensor.ndim, tensor)


def write_regions(stage: Path, regions: Iterable[Region]) -> list[Piece]:
    """Write regions to files that exist, durably; return checksums of what was written.

    Raises:
        OSError: the disk did not take them.
    """
    pieces: list[Piece] = []
    block = mmap.mmap(-1, _BLOCK)  # begins at a page, as what is written directly must
    values = torch.frombuffer(block, dtype=torch.uint8)
    in_order = sorted(regions, key=lambda region: region.place)
    for name, group in itertools.groupby(in_order, lambda region: region.place.file):
        with _opened(stage / name) as write:
            for start, data in itertools.chain.from_iterable(region.runs() for region in group):
                offset, checksum = start, 0
                while rest := data.numel():
                    size = _block_size(offset, rest)
                    values[:size].copy_(data[:size])
                    part = memoryview(block)[:size]
                    checksum = zlib.crc32(part, checksum)
                    write(offset, part)
                    offset, data = offset + size, data[size:]
                pieces.append(Piece(start, offset - start, checksum))
    return pieces


def _block_size(offset: int, size: int) -> int:
    """Return how many of ``size`` bytes from ``offset`` come next: up to a page, or pages."""
    if size < _LARGE:
        return size
    return _PAGE - offset % _PAGE if offset % _PAGE else min(_BLOCK, size - size % _PAGE)


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[int, memoryview], None]]:
    """Open a file that is there to write blocks at offsets, from memory that begins at a page.

    Large blocks are written directly, without the system's page cache: a checkpoint is larger than
    what the cache gets free at once, nobody is about to read it, and all of it goes to the disk
    before the file gets its name.
    """
    direct = None
    with ExitStack() as stack:
        cached = stack.enter_context(open(os.open(path, _FLAGS), "wb"))
        with suppress(AttributeError, OSError):  # this system, or file system, has none
            direct = os.open(path, _FLAGS | os.O_DIRECT)
            stack.callback(os.close, direct)

        def write(offset: int, block: memoryview) -> None:
            nonlocal direct
            if direct is not None and len(block) >= _LARGE:
                try:
                    written = os.pwrite(direct, block, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    direct = None
                else:
                    block, offset = block[written:], offset + written
            cached.seek(offset)
            cached.write(block)

        yield write
    sync(path)


class ParallelSave:
    """What all ranks are going to write; making it is collective.

    Args:
        tree: has the same slices on all ranks; saved tensors are read when they are written.
            Everything else is written as rank 0 has it.
        path: of the file or folder. One that is there is replaced when the new one is complete.
        replica: (number, count): of how many replicas of the shards this rank has a part, and of
            which one. Each writes some of them.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """

    def __init__(
        self, tree: Mapping[str, Any], path: Path, replica: tuple[int, int] = (0, 1)
    ) -> None:
        self.path, self._action = path, f"Saving {path}"
        self._rank, _ = rank_and_world_size()
        self._regions: list[Region] = []
        self._stage: Path | None = None
        # a slice that stands at several places (tied parameters) is written once
        slices = tensors_in(tree)

        def reserve_places() -> tuple[Path, list[Place]] | None:
            if self._rank:
                return None
            self._stage = self.begin()
            places: dict[int, Place] = {}
            for tensor, place in self.reserve(tree, self._stage):
                places[id(tensor)] = place
                if id(tensor) not in slices:
                    self._regions += regions_of(tensor, place)
            return self._stage, [places[key] for key in slices]

        def plan(places: list[Place]) -> None:
            pairs = zip(slices.values(), places, strict=True)
            regions = [region for pair in pairs for region in regions_of(*pair)]
            # each replica has all of them, and writes some, of all sizes
            regions.sort(key=lambda region: region.values.nbytes)
            self._regions += regions[replica[0] :: replica[1]]

        with self.failing(), profile_range("prepare checkpoint"):
            reserved = run_on_all_ranks(self._action, reserve_places)[0]
            assert reserved is not None
            self._stage, places = reserved
            run_on_all_ranks(self._action, lambda: plan(places))

    def begin(self) -> Path:
        """Return where to write before all is complete; on rank 0."""
        return begin(self.path)

    def reserve(self, tree: Any, stage: Path) -> Iterable[tuple[Tensor, Place]]:
        """Write everything in ``tree`` but the values of tensors; on rank 0.

        Returns:
            each tensor, and where its values belong.
        """
        raise NotImplementedError

    def complete(self, stage: Path, pieces: list[Piece]) -> None:
        """Add what depends on the pieces that all ranks wrote, and name it ``path``; on rank 0."""
        raise NotImplementedError

    def copy_to_cpu(self) -> None:
        """Copy what this rank is going to write, because it changes from now on; local."""
        self._regions = [
            region._replace(values=region.values.detach().to("cpu", copy=True))
            for region in self._regions
        ]

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's part, and give it its name when all have; collective.

        Args:
            group: of all ranks, for the exchanges; by default the one of the run.

        Raises:
            CheckpointError: on all ranks; what was at the path is still there.
        """
        regions, self._regions = self._regions, []
        stage = self._stage
        assert stage is not None

        def complete() -> None:
            if not self._rank:
                self.complete(stage, [piece for mine in written for piece in mine])

        with self.failing():
            with profile_range("write checkpoint"):
                written = run_on_all_ranks(
                    self._action, lambda: write_regions(stage, regions), group
                )
            with profile_range("finish checkpoint"):
                run_on_all_ranks(self._action, complete, group)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Delete what is begun if the body fails on any rank."""
        try:
            yield
        except CheckpointError:
            if not self._rank and self._stage is not None:
                discard(self._stage)
            raise
