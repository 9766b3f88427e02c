"""Tensors of which each rank holds a flat range, described so that torch.distributed.checkpoint can
read and write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..engine import Zero3Engine
from ..engine.layout import Span
from ..engine.shards import Entry, FlatGroup
from ..engine.unit import Unit
from .boxes import Box, cut_into_boxes, memory_order

if TYPE_CHECKING:  # importing it takes a while, and only saving and loading need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# a flat tensor laid out like the group's values; None: all zeros
Flats = Callable[[FlatGroup], Tensor | None]
# Of a tensor, that do not look at its values.
_QUESTIONS = frozenset(
    "__get__ size dim numel element_size is_floating_point is_complex __hash__ __len__".split()
)


class Described(Tensor):
    """The name, shape and dtype of a tensor whose values are elsewhere."""

    label: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer questions about the shape; :meth:`compute` anything else."""
        name = getattr(func, "__name__", str(func))
        if name == "detach":
            return args[0]
        if name == "__repr__":
            return f"{cls.__name__}({args[0].label!r}, shape={tuple(args[0].size())})"
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        return cls.compute(func, args, kwargs or {})

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an operation on the values gives."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Never reached: ``__torch_function__`` answers or raises."""
        raise TypeError(f"{func} needs values that are not in this tensor.")


class SlicedTensor(Described):
    """The shape of a whole tensor and the boxes of it that this rank holds.

    It has no values of its own: it exists to be handed to torch.distributed.checkpoint, whose
    protocol for such tensors (``_Checkpointable``, the one DTensor implements) it implements.
    Everything else that reads it is an error.
    """

    place: Place
    flats: Flats
    parts: dict[torch.Size, Tensor]  # offsets in the whole tensor -> view of this rank's memory

    @property
    def label(self) -> str:
        """The parameter's name."""
        return self.place.entry.name

    @staticmethod
    def __new__(
        cls, place: Place, flats: Flats, dtype: torch.dtype, device: torch.device, parts: dict
    ) -> SlicedTensor:
        """A tensor shaped like the parameter in ``place``."""
        tensor = Tensor._make_wrapper_subclass(cls, place.entry.size, dtype=dtype, device=device)
        tensor.place, tensor.flats, tensor.parts = place, flats, parts
        return tensor

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's parts out of a whole tensor."""
        for offsets, part in self.parts.items():
            part.copy_(
                whole[tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))]
            )

    def copied(self) -> SlicedTensor:
        """The same with copies of this rank's parts in CPU memory."""
        parts = {offsets: part.to("cpu", copy=True) for offsets, part in self.parts.items()}
        tensor = Tensor._make_wrapper_subclass(
            SlicedTensor, self.size(), dtype=self.dtype, device=torch.device("cpu")
        )
        tensor.place, tensor.flats, tensor.parts = self.place, _no_flats, parts
        return tensor

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What this rank writes of the tensor."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(part), self.size()
                ),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank holds of the tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=offsets, sizes=part.size())
            for offsets, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one part."""
        assert index.offset is not None
        part = self.parts[index.offset]
        return _alone(part) if type(self) is SlicedTensor and part.device.type == "cpu" else part

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """Nothing can be computed with it."""
        labels = [repr(a.label) for a in args if isinstance(a, SlicedTensor)] or ["a tensor"]
        # No TypeError: Python would take it for an operator that there is not, and say that.
        raise RuntimeError(
            f"`{getattr(func, '__name__', func)}` needs the values of {labels[0]}, of which each"
            " rank holds a part while a checkpoint is saved. Names can be changed and entries"
            " removed in `on_save_checkpoint`; values cannot. Change them in `on_load_checkpoint`,"
            " or save your own of `trainer.strategy.full_state_dict()`, which all ranks call and"
            " rank 0 gets."
        )


def _alone(part: Tensor) -> Tensor:
    """The same memory as the whole of a storage: of larger ones torch keeps copies until a file is
    written.
    """
    flat = part.detach().as_strided((part.numel(),), (1,))  # dense: boxes are ranges of memory
    return (
        torch.from_numpy(flat.view(torch.uint8).numpy())
        .view(part.dtype)
        .as_strided(part.size(), part.stride())
    )


class OwnedTensor(SlicedTensor):
    """A tensor of any shape that one rank holds whole: state of an optimizer that steps on whole
    tensors.
    """

    engine: Zero3Engine
    owner: int

    @staticmethod
    def __new__(
        cls,
        engine: Zero3Engine,
        place: Place,
        size: torch.Size,
        dtype: torch.dtype,
        owner: int,
        value: Tensor | None,
    ) -> OwnedTensor:
        """State of the parameter in ``place``; ``value`` is None on all ranks but the owner."""
        tensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=engine.device)
        tensor.engine, tensor.place, tensor.flats, tensor.owner = engine, place, _no_flats, owner
        tensor.parts = {} if value is None else {torch.Size([0] * len(size)): value}
        return tensor

    def whole(self) -> Tensor:
        """The value, on all ranks; collective."""
        parts = list(self.parts.values())
        value = (
            parts[0].contiguous().clone()
            if parts
            else torch.empty(self.size(), dtype=self.dtype, device=self.device)
        )
        return self.engine.collectives.broadcast(value, self.owner)


class SavedTensor(Described):
    """A tensor in a checkpoint. Its shape and dtype are known; its values are read when an
    operation needs them.
    """

    read: Callable[[], Tensor]  # the whole value, on the CPU; local

    @staticmethod
    def __new__(
        cls, label: str, size: torch.Size, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> SavedTensor:
        """A tensor of ``size`` that ``read`` reads; ``label`` is its name in the checkpoint."""
        tensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=torch.device("cpu"))
        tensor.label, tensor.read = label, read
        return tensor

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """The result for the values, which are read."""
        args, kwargs = tree_map(
            lambda a: a.read() if isinstance(a, SavedTensor) else a, (args, kwargs)
        )
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> SavedTensor:
        """Itself: nothing can change it."""
        return self


@dataclass(frozen=True)
class Place:
    """Where a parameter lies."""

    unit: Unit
    entry: Entry

    def slice_of(self, flats: Flats, dtype: torch.dtype, device: torch.device) -> SlicedTensor:
        """The parameter-shaped tensor whose part on this rank lies in the flat tensor of the
        group.
        """
        part = self.entry.part
        flat = None if part is None else flats(self.entry.group)
        parts = {} if flat is None else dict(_cut(part.of(flat), self.entry, part.span))
        return SlicedTensor(self, flats, dtype, device, parts)

    def slice_within(self, segment: Tensor, begin: int) -> SlicedTensor:
        """The same in a flat tensor that holds the group's elements from ``begin`` on."""
        part = replace(self.entry.part, start=self.entry.part.start - begin)
        parts = dict(_cut(part.of(segment), self.entry, part.span))
        return SlicedTensor(self, _no_flats, segment.dtype, segment.device, parts)


def _no_flats(group: FlatGroup) -> Tensor | None:
    raise AssertionError("a slice that is only read from a checkpoint is never gathered")


def _cut(flat: Tensor, entry: Entry, span: Span) -> Iterator[tuple[torch.Size, Tensor]]:
    """(offsets, view of ``flat``) of each box; ``flat`` holds the elements of ``span`` in the
    parameter's memory order.
    """
    order = memory_order(entry.stride)
    # from memory order to the user's dimensions
    back = sorted(range(len(order)), key=lambda k: order[k])
    for box in cut_into_boxes([entry.size[dim] for dim in order], span.start, span.stop):
        yield torch.Size(box.offsets[k] for k in back), _view(flat, box).permute(back)


def _view(flat: Tensor, box: Box) -> Tensor:
    return flat[box.start : box.start + torch.Size(box.sizes).numel()].view(box.sizes)


def places(engine: Zero3Engine) -> dict[str, Place]:
    """Place of every parameter, by name."""
    return {entry.name: Place(unit, entry) for unit in engine.units for entry in unit.entries}
