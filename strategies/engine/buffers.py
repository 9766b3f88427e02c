"""Buffers are whole on every rank, and rank 0's count: at set-up, and after each backward that follows a change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives


class Buffers:
    """Keeps the buffers of all ranks equal to rank 0's, as ``DistributedDataParallel(broadcast_buffers=True)`` does.

    Only modules whose buffers changed take part, so constant ones (masks, rotary tables) cost nothing.
    """

    def __init__(self, model: nn.Module, collectives: LocalCollectives, device: torch.device) -> None:
        self._collectives = collectives
        self.differing: list[str] = []  # names of those that were not rank 0's when they were placed
        moved: dict[Tensor, Tensor] = {}  # by the object, not by its id: one that dies here leaves that to a new buffer
        for prefix, module in model.named_modules():
            _materialize_buffers(prefix, module)
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer not in moved:
                    local = moved[buffer] = buffer.to(device)
                    agreed = collectives.broadcast(local.detach().clone().contiguous())
                    if collectives.global_rank and not torch.allclose(local, agreed, rtol=0, atol=0, equal_nan=True):
                        self.differing.append(f"{prefix}.{name}".lstrip("."))
                        local.copy_(agreed)
                module._buffers[name] = moved[buffer]
        owners = [m for m in model.modules() if any(b is not None for b in m._buffers.values())]
        # A scripted module's table is not a dict, and gives other tensor objects at each look.
        self._tables = [m._buffers if isinstance(m._buffers, dict) else dict(m._buffers.items()) for m in owners]
        self._seen = [_versions(table) for table in self._tables]

    def __len__(self) -> int:
        """Number of modules that have buffers."""
        return len(self._tables)

    def changed(self) -> bytes:
        """1 for each module whose buffers were assigned or written on this rank since the last :meth:`synchronize`."""
        return bytes(_versions(t) != seen for t, seen in zip(self._tables, self._seen, strict=True))

    def versions(self) -> list[tuple[Tensor, int]]:
        """All buffers, each with the number of times that it was written."""
        return [(b, b._version) for table in self._tables for b in table.values() if b is not None and not b.is_inference()]

    def synchronize(self, chosen: Sequence[int] | None = None) -> None:
        """Copy rank 0's buffers to the other ranks in one exchange; collective.

        Args:
            chosen: truth for each module; None takes all. Torch's own batch norm writes its statistics unnoticed when it is
                called as a function, so what a rank saw change may not be everything.
        """
        picked = [k for k in range(len(self._tables)) if chosen is None or chosen[k]]
        tensors = list({id(b): b for k in picked for b in self._tables[k].values() if b is not None and b.numel()}.values())
        if tensors and self._collectives.world_size > 1:
            with torch.no_grad():
                parts = [b.detach().contiguous().view(-1).view(torch.uint8) for b in tensors]
                packed = self._collectives.broadcast(torch.cat(parts))
                if self._collectives.global_rank:
                    for b, part in zip(tensors, packed.split([b.nbytes for b in tensors]), strict=True):
                        b.copy_(part.clone().view(b.dtype).view(b.shape))  # cloned: a view of a dtype must be aligned
        for k in picked:
            self._seen[k] = _versions(self._tables[k])


def _versions(table: dict[str, Tensor | None]) -> list[tuple[int, int]]:
    return [(id(b), 0 if b.is_inference() else b._version) for b in table.values() if b is not None]


def _materialize_buffers(prefix: str, module: nn.Module) -> None:
    waiting = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    if not waiting:
        return
    if not hasattr(module, "reset_running_stats"):
        name = f"{prefix}.{waiting[0]}".lstrip(".")
        raise ValueError(
            f"Buffer {name!r} is on the meta device, and only the running statistics of norm layers can be initialised from "
            'there. Create it with `device="cpu"`.'
        )
    for name in waiting:
        module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
    module.reset_running_stats()
