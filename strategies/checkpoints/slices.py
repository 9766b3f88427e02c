"""Tensors of which each rank holds a flat range, described so that torch.distributed.checkpoint can read and write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine import Zero3Engine
from ..engine.layout import Span
from ..engine.shards import FlatGroup
from ..engine.unit import Entry, Unit
from .boxes import Box, cut_into_boxes, memory_order

if TYPE_CHECKING:  # importing it takes a while, and only saving and loading need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint that was not read yet.

    Attributes:
        name: in the checkpoint.
        shape: of the whole tensor.
        dtype: it was saved in.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype


class SlicedTensor(Tensor):
    """The shape of a whole tensor and the boxes of it that this rank holds.

    It has no values of its own: it exists to be handed to torch.distributed.checkpoint, whose protocol for such tensors
    (``_Checkpointable``, the one DTensor implements) it implements. Everything else that reads it is an error.
    """

    label: str  # the parameter's name, for errors
    parts: dict[torch.Size, Tensor]  # offsets in the whole tensor -> view of this rank's memory

    @staticmethod
    def __new__(
        cls, label: str, size: torch.Size, dtype: torch.dtype, device: torch.device, parts: dict[torch.Size, Tensor]
    ) -> SlicedTensor:
        """A tensor of ``size`` that ``parts`` are pieces of."""
        tensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        tensor.label, tensor.parts = label, parts
        return tensor

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's parts out of a whole tensor."""
        for offsets, part in self.parts.items():
            part.copy_(whole[tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))])

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What this rank writes of the tensor."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size()),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank holds of the tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=offsets, sizes=part.size()) for offsets, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one part."""
        assert index.offset is not None
        return self.parts[index.offset]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer questions about the shape; anything that needs values is an error."""
        name = getattr(func, "__name__", str(func))
        if name == "detach":  # what `Module.state_dict` does with every parameter
            return args[0]
        if name in (
            "__get__",
            "size",
            "dim",
            "numel",
            "element_size",
            "is_floating_point",
            "is_complex",
            "__hash__",
            "__len__",
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if name == "__repr__":
            return f"SlicedTensor({args[0].label!r}, shape={tuple(args[0].size())})"
        first = next((a for a in args if isinstance(a, SlicedTensor)), None)
        raise TypeError(
            f"`{name}` needs the values of {'a tensor' if first is None else repr(first.label)}, of which each rank holds a "
            "part while a checkpoint is saved. Names can be changed and entries removed in `on_save_checkpoint`; values cannot."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Never reached: ``__torch_function__`` answers or raises."""
        raise TypeError(f"{func} needs the values of a tensor that is sharded over the ranks.")


@dataclass(frozen=True)
class Place:
    """Where this rank's part of a parameter lies."""

    unit: Unit
    entry: Entry
    group: FlatGroup | None  # None: this rank has nothing of it
    start: int  # of the part in the group's flat tensor
    span: Span | None

    def slice_of(self, flat: Tensor | None, dtype: torch.dtype, device: torch.device, offset: int = 0) -> SlicedTensor:
        """The parameter-shaped tensor whose part on this rank lies in ``flat``, a flat tensor that begins ``offset`` elements
        into the group's."""
        parts: dict[torch.Size, Tensor] = {}
        if self.span is not None:
            assert flat is not None
            mine = flat[self.start - offset :][: self.span.stop - self.span.start]
            parts = dict(cut(mine, self.entry, self.span))
        return SlicedTensor(self.entry.name, self.entry.size, dtype, device, parts)


def cut(flat: Tensor, entry: Entry, span: Span) -> Iterator[tuple[torch.Size, Tensor]]:
    """(offsets, view of ``flat``) of each box; ``flat`` holds the elements of ``span`` in the parameter's memory order."""
    order = memory_order(entry.stride)
    back = sorted(range(len(order)), key=lambda k: order[k])  # from memory order to the user's dimensions
    for box in cut_into_boxes([entry.size[dim] for dim in order], span.start, span.stop):
        yield torch.Size(box.offsets[k] for k in back), _view(flat, box).permute(back)


def _view(flat: Tensor, box: Box) -> Tensor:
    numel = 1
    for size in box.sizes:
        numel *= size
    return flat[box.start : box.start + numel].view(box.sizes)


def places(engine: Zero3Engine) -> dict[str, Place]:
    """Place of every parameter, by name."""
    found = {}
    for unit in engine.units:
        for chunk in unit.chunks:
            for index, entry in enumerate(chunk.entries):
                span = chunk.layout.span(index, engine.collectives.rank)
                group = None if span is None else chunk.group_of(span)
                start = 0 if span is None else chunk.flat_start(span)
                found[entry.name] = Place(unit, entry, group, start, span)
    return found


def parameter_slices(engine: Zero3Engine) -> dict[str, Tensor]:
    """Every parameter by its name: a :class:`SlicedTensor` of its master values, or, without elements, itself."""
    slices: dict[str, Tensor] = {}
    for name, place in places(engine).items():
        flat = None if place.group is None else place.group.data
        slices[name] = (
            place.slice_of(flat, place.entry.dtype, engine.device)
            if place.entry.size.numel()
            else torch.empty(place.entry.size, dtype=place.entry.dtype)
        )
    return slices
