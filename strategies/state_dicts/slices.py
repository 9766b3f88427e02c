"""Sliced tensors, which torch.distributed.checkpoint reads and writes without gathering them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..engine import Chunk, Entry, Zero3Engine
from ..support.torch_internals import DisableTorchFunctionSubclass
from .boxes import cut_into_boxes, memory_order

if TYPE_CHECKING:  # importing torch.distributed.checkpoint is slow, and few calls need it
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Shards = Callable[[Chunk], Tensor]  # returns what is laid out like the chunk's values
# Methods of torch.Tensor that do not read values.
_METADATA_METHODS = frozenset(
    "__get__ size dim numel element_size is_floating_point is_complex __hash__ __len__".split()
)


class TensorDescription(Tensor):
    """The name, shape and dtype of a tensor whose values are elsewhere."""

    label: str  # its name

    @staticmethod
    def __new__(
        cls, label: str, size: torch.Size, dtype: torch.dtype, device: Any, **attributes: Any
    ) -> Any:
        """Make a tensor of ``size`` with the attributes of its class."""
        tensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        vars(tensor).update(attributes, label=label)
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer questions about the shape; let :meth:`compute` handle anything else."""
        name = getattr(func, "__name__", str(func))
        if name == "detach":
            return args[0]
        if name == "__repr__":
            return f"{cls.__name__}({args[0].label!r}, shape={tuple(args[0].size())})"
        if name in _METADATA_METHODS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        return cls.compute(func, args, kwargs or {})

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operation on the values, or raise."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is annotated as a static method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Raise: no operator gets here, because ``__torch_function__`` answers or raises before."""
        raise TypeError(f"{func} needs values that are not in this tensor.")


class SlicedTensor(TensorDescription):
    """The shape of a full tensor and the boxes of it that this rank holds.

    It has no values of its own: it implements the protocol by which torch.distributed.checkpoint
    asks a tensor for its parts (``torch.distributed._checkpointable._Checkpointable``, which
    DTensor implements too). Any other operation on it is an error.
    """

    parts: dict[torch.Size, Tensor]  # offsets in the full tensor -> values
    # returns the full tensor on all ranks, in memory of its own; collective
    gather_values: Callable[[], Tensor]

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's parts out of a full tensor; of a saved one nothing else is read."""
        if isinstance(whole, SavedTensor):
            return whole.read_into(self)
        for offsets, part in self.parts.items():
            part.copy_(
                whole[tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))]
            )

    def copy_to_cpu(self) -> SlicedTensor:
        """Take copies of this rank's parts, in CPU memory, in their places."""
        self.parts = {offsets: part.to("cpu", copy=True) for offsets, part in self.parts.items()}
        return self

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Describe each part that this rank writes, for the planner of a save."""
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
        """Return offsets and sizes of the parts that this rank holds."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=offsets, sizes=part.size())
            for offsets, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of one part."""
        assert index.offset is not None
        part = self.parts[index.offset]
        return _as_own_storage(part) if part.device.type == "cpu" else part

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """Raise: no rank has the values of the full tensor."""
        labels = [repr(a.label) for a in args if isinstance(a, SlicedTensor)] or ["a tensor"]
        # Not a TypeError: Python would replace the text by "unsupported operand type".
        raise RuntimeError(
            f"`{getattr(func, '__name__', func)}` needs the values of {labels[0]}, of which each"
            " rank holds a part while a checkpoint is saved.\nIn `on_save_checkpoint` change names,"
            " or remove entries; change values in `on_load_checkpoint`, or save your own of"
            " `trainer.strategy.full_state_dict()`, which all ranks call and rank 0 gets."
        )


def _as_own_storage(part: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage is no larger than the part.

    ``_SerialCpuLoader.values`` of torch.distributed.checkpoint.filesystem clones a tensor with a
    larger storage, so a rank would need the memory of its parts again while a file is written.
    """
    flat = part.detach().as_strided((part.numel(),), (1,))  # dense: boxes are ranges of memory
    return (
        torch.from_numpy(flat.view(torch.uint8).numpy())
        .view(part.dtype)
        .as_strided(part.size(), part.stride())
    )


def slice_of(engine: Zero3Engine, entry: Entry, part: Tensor) -> SlicedTensor:
    """Return a slice shaped like a parameter.

    Args:
        engine: holds the parameter.
        entry: of the parameter.
        part: this rank's elements, in the parameter's memory order. The slice views them.
    """
    parts = {} if entry.span is None else dict(_cut_views(part, entry))
    gather = partial(entry.unit.whole, entry, part)
    return SlicedTensor(
        entry.name, entry.size, part.dtype, part.device, parts=parts, gather_values=gather
    )


def owned_tensor(
    engine: Zero3Engine,
    name: str,
    size: torch.Size,
    dtype: torch.dtype,
    owner: int,
    value: Tensor | None,
) -> SlicedTensor:
    """Return a full tensor of any shape on one rank: state of an optimizer that steps on such.

    Only the owner gives a ``value``.
    """
    parts = {} if value is None else {torch.Size([0] * len(size)): value.contiguous()}

    def gather() -> Tensor:
        whole = torch.empty(size, dtype=dtype, device=engine.device)
        for part in parts.values():
            whole.copy_(part)
        return engine.collectives.broadcast(whole, owner)

    return SlicedTensor(name, size, dtype, engine.device, parts=parts, gather_values=gather)


class SavedTensor(TensorDescription):
    """A tensor in a checkpoint, whose values are read when an operation needs them."""

    # copies the values into a tensor of any dtype, or a rank's parts of them into a slice; local
    read_into: Callable[[Tensor], None]

    def read(self) -> Tensor:
        """Return the full value, on the CPU; local."""
        # hazard: where the file has no values, memory of others would show
        whole = torch.zeros(self.size(), dtype=self.dtype, device="cpu")
        self.read_into(whole)
        return whole

    @classmethod
    def compute(cls, func: Any, args: tuple, kwargs: dict) -> Any:
        """Read the values and return the result of the operation on them."""
        args, kwargs = tree_map(
            lambda a: a.read() if isinstance(a, SavedTensor) else a, (args, kwargs)
        )
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> SavedTensor:
        """Return the tensor itself: nothing can change it."""
        return self


def _cut_views(part: Tensor, entry: Entry) -> Iterator[tuple[torch.Size, Tensor]]:
    """Yield (offsets, view of ``part``) of each box of what this rank has of a parameter."""
    assert entry.span is not None
    order = memory_order(entry.stride)
    # permutation from memory order to the user's dimensions
    back = sorted(range(len(order)), key=lambda k: order[k])
    for box in cut_into_boxes(
        [entry.size[dim] for dim in order], entry.span.start, entry.span.stop
    ):
        values = part[box.start : box.start + prod(box.sizes)].view(box.sizes)
        yield torch.Size(box.offsets[k] for k in back), values.permute(back)
