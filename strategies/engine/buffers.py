"""Buffers are whole on every rank, and rank 0's count: at set-up, and after a backward, or step, in
which some changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives
from ..support.torch_internals import DisableTorchFunctionSubclass


class _Place(NamedTuple):
    """Where a module has a buffer."""

    module: nn.Module
    key: str
    buffer: Tensor


# A buffer, the number of writes to it, and its address. The tensor itself: a number or an address
# would soon be another one's.
_Seen = tuple[Tensor, int, int]


class Buffers:
    """Keeps the buffers of all ranks equal to rank 0's, as
    ``DistributedDataParallel(broadcast_buffers=True)`` does.

    Modules with persistent floating buffers take part each time, because torch does not count what
    is written to ``buffer.data``; others when torch has counted a change, so constant ones (masks,
    rotary tables) with ``persistent=False`` cost nothing. A buffer that got another shape on some
    rank (a table that grows with a rank's own sequences) is each rank's own until all have one
    shape.
    """

    def __init__(
        self, model: nn.Module, collectives: LocalCollectives, device: torch.device
    ) -> None:
        self._model, self._collectives, self._device = model, collectives, device
        self._seen: dict[str, _Seen] = {}  # when they were rank 0's
        self.look_again()
        for module, key, buffer in self._find().values():
            module._buffers[key] = buffer.to(device)
        self.synchronize()

    def look_again(self) -> None:
        """Modules came, went or have other names: local."""
        self._modules = [(f"{n}.".lstrip("."), m) for n, m in self._model.named_modules()]

    def _find(self) -> dict[str, _Place]:
        """All buffers, by name."""
        return {
            prefix + key: _Place(module, key, buffer)
            for prefix, module in self._modules
            if module._buffers  # most have none
            for key, buffer in module._buffers.items()
            if buffer is not None
        }

    def changed(self) -> bytes:
        """For each buffer that all ranks have, whether it changed on this rank since the last
        :meth:`synchronize`; the last byte: whether there are others, or other shapes, than then.
        """
        found = self._find()
        if _kinds(found) != self._kinds:
            return bytes(len(self._alike)) + b"\1"
        return bytes([_has_changed(found[name], self._seen[name]) for name in self._alike]) + b"\0"

    def synchronize(self, chosen: Sequence[int] | None = None) -> None:
        """Copy rank 0's buffers to the other ranks in one exchange; collective.

        Args:
            chosen: for each buffer what :meth:`changed` said on any rank; None takes all.
        """
        found = self._find()
        if chosen is None or chosen[-1]:
            self._kinds = _kinds(found)
            first, *others = self._collectives.all_gather_object(self._kinds)
            self._alike = [n for n in first if all(each.get(n) == first[n] for each in others)]
            names = self._alike
        else:
            marked = zip(self._alike, chosen, strict=False)
            names = [n for n, is_one in marked if is_one and n in found]  # else removed since
        if names and self._collectives.world_size > 1:
            self._copy([found[name] for name in names])
            found = self._find()
        self._seen |= {name: _look(found[name].buffer) for name in names}

    def _copy(self, places: list[_Place]) -> None:
        """Of rank 0, to the other ranks."""
        parts = [
            place.buffer.detach().contiguous().view(-1).view(torch.uint8).to(self._device)
            for place in places  # a forward may assign any
        ]
        packed = self._collectives.broadcast(torch.cat(parts))
        if not self._collectives.global_rank:
            return
        before = {id(seen[0]) for seen in self._seen.values()}
        assigned: dict[Tensor, Tensor] = {}
        sizes = [part.numel() for part in parts]
        for (module, key, b), part in zip(places, packed.split(sizes), strict=True):
            # cloned: a view of a dtype must be aligned
            value = part.clone().view(b.dtype).view(b.shape)
            if id(b) in before:
                _write(b, value)
            else:  # autograd may have saved it
                module._buffers[key] = assigned.setdefault(b, value)


def _kinds(found: dict[str, _Place]) -> dict[str, tuple[object, ...]]:
    return {n: (tuple(p.buffer.shape), p.buffer.dtype) for n, p in found.items()}


def _look(buffer: Tensor) -> _Seen:
    with DisableTorchFunctionSubclass():  # else a view of a weight has no address
        version = -1 if buffer.is_inference() else buffer._version
        return buffer, version, buffer.data_ptr()


def _has_changed(place: _Place, seen: _Seen) -> bool:
    module, _, buffer = place
    # torch counts no writes of what was made under inference_mode, and of what a script writes
    if buffer.is_inference() or isinstance(module, torch.jit.ScriptModule):
        return True
    local = module._non_persistent_buffers_set
    saved = [each for key, each in module._buffers.items() if each is not None and key not in local]
    now = _look(buffer)
    return any(map(torch.is_floating_point, saved)) or now[0] is not seen[0] or now[1:] != seen[1:]


def _write(buffer: Tensor, value: Tensor) -> None:
    with torch.inference_mode():  # what was made under it can be written in no other way
        buffer.copy_(value)
