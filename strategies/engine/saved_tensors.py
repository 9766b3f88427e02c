"""What autograd saves in a unit's forward: of weights their place alone, because their memory is
another unit's until backward reads them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..support.torch_internals import DisableTorchFunction, top_hooks
from .chunk import Entry
from .sharded import ResidencyError, ShardedParameter, read
from .unit import BufferPool, Unit

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_data_ptr, _untyped_storage = Tensor.data_ptr, Tensor.untyped_storage  # torch's own


class SavedWeight(tuple[Unit, Entry, int, torch.dtype, torch.Size, tuple[int, ...], int]):
    """Where a view of a weight lies in its unit's buffer.

    A tuple, because one is made for every weight in every forward: unit, entry, version of the
    parameter, dtype, size, stride, offset [bytes].
    """

    __slots__ = ()


class SavedParameter(NamedTuple):
    """A sharded parameter that a custom Function saves: it is read when backward needs it."""

    parameter: Tensor


class SavedTensors:
    """The hooks of one engine.

    Attributes:
        hooks: those that a unit's forward enters; others may take their place, which leave to
            :meth:`pack` and :meth:`unpack` what they do not want.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._in_use = pool.in_use
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._open: list[tuple[Unit, saved_tensors_hooks | None]] = []

    def enter(self, unit: Unit) -> None:
        """``unit`` begins a forward."""
        hooks, top = None, top_hooks(True)
        if top is None:
            hooks = self.hooks
        elif top[1] is not self.hooks.unpack_hook:
            hooks = saved_tensors_hooks(*self._over(top))
        if hooks is not None:
            hooks.__enter__()
        self._open.append((unit, hooks))

    def leave(self, unit: Unit | None) -> None:
        """The end of what :meth:`enter` began, and of all that was left open inside of it.

        None: of all, because what is no `Exception` has ended forwards: torch calls no hooks then.
        """
        if unit is not None and unit not in dict(self._open):
            return  # it did not begin
        while self._open:
            left, hooks = self._open.pop()
            if hooks is not None:
                hooks.__exit__()
            if left is unit:
                return

    def _over(self, below: Hooks) -> Hooks:
        """Hooks that leave to those ``below`` (of a checkpoint, `save_on_cpu`) all but weights."""
        pack_below, unpack_below = below

        def pack(tensor: Tensor) -> Any:
            packed = self.pack(tensor)
            if type(packed) in (SavedWeight, SavedParameter):
                return packed
            return (pack_below(tensor),)

        def unpack(saved: Any) -> Tensor:
            return unpack_below(saved[0]) if type(saved) is tuple else self.unpack(saved)

        return pack, unpack

    # Autograd calls these two for each tensor that it saves, so for one they call little in Python.

    def pack(self, tensor: Tensor) -> SavedWeight | SavedParameter | tuple[Tensor, int] | Tensor:
        """What is saved of ``tensor``: itself, detached, with its version, if it is no weight."""
        if type(tensor) is ShardedParameter:
            return SavedParameter(tensor)
        with DisableTorchFunction():  # no class and no mode of a user's is asked
            try:
                storage = _untyped_storage(tensor)._cdata
            except RuntimeError:  # has none (functorch, sparse), or more than one
                storage = 0
            for unit in self._in_use:
                buffer = unit.buffer
                if storage == buffer.storage and tensor.dtype in buffer.typed and tensor.numel():
                    if tensor.is_conj() or tensor.is_neg():
                        break  # it keeps the memory
                    offset = _data_ptr(tensor) - buffer.start
                    entry = unit.entries[bisect_right(unit.starts, offset) - 1]
                    version, dtype, size = entry.parameter._version, tensor.dtype, tensor.shape
                    return SavedWeight((unit, entry, version, dtype, size, tensor.stride(), offset))
            # Autograd compares versions itself only where there are no hooks. Detached, because an
            # output that its own graph holds would live until the garbage collector comes.
            try:
                held = tensor.detach()
                held = held if tensor.layout == torch.strided else held.clone()
                return held, held._version
            except RuntimeError:  # functorch's, an inference tensor
                return tensor

    def unpack(self, saved: Any) -> Tensor:
        """The tensor, or an error if it was written to since."""
        kind = type(saved)
        if kind is tuple:
            held, version = saved
            if held._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an"
                    f" inplace operation: [{held.dtype}, shape {tuple(held.shape)}] is at version"
                    f" {held._version}; expected version {version} instead. Find it with"
                    " torch.autograd.set_detect_anomaly(True)."
                )
            return held
        if kind is SavedParameter:
            with torch.no_grad():
                return read([saved.parameter])[0]
        if kind is not SavedWeight:
            return saved
        unit, entry, version, dtype, size, stride, offset = saved
        if not unit.pins:
            self._bring(unit)
        if entry.parameter._version != version:
            raise ResidencyError(
                f"Parameter {entry.name!r} (unit {unit.name}), which backward needs as it was in"
                " forward, has been modified by an inplace operation since: an optimizer step, a"
                " load, or a change in place. Do that after backward (`on_train_batch_end`)."
            )
        # `.data`: the buffer has other versions than what is saved again, in a graph of this graph
        typed = unit.buffer.typed[dtype]
        return typed.as_strided(size, stride, offset // typed.itemsize).data

    def _bring(self, unit: Unit) -> None:
        """Outside of its turn in backward: whoever holds a view keeps the memory."""
        unit.require_free()
        unit.unshard()
        unit.wait()
        unit.pool.kept[unit] = None
