"""Buffers are whole on every rank, and rank 0's count: at set-up, and after a backward, or step, in which some changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives
from ..residency.home import ResidencyError
from ..residency.past_python import is_gathered, note_uncounted

_Seen = tuple[str, Tensor, int, torch.Size, torch.dtype]  # a buffer's name, itself, the number of writes to it
_UNCOUNTED = -1  # of what was made under inference_mode: it may have been written any number of times


class Buffers:
    """Keeps the buffers of all ranks equal to rank 0's, as ``DistributedDataParallel(broadcast_buffers=True)`` does.

    Only modules whose buffers changed take part, so constant ones (masks, rotary tables) cost nothing. A buffer that got
    another shape on some rank (a table that grows with a rank's own sequences) is each rank's own until all have one shape.
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
                    agreed = collectives.broadcast(_plain(local).clone())
                    if collectives.global_rank and not torch.allclose(local, agreed, rtol=0, atol=0, equal_nan=True):
                        self.differing.append(f"{prefix}.{name}".lstrip("."))
                        _write(local, agreed)
                module._buffers[name] = moved[buffer]
        owned = [(name, m) for name, m in model.named_modules() if any(b is not None for b in m._buffers.values())]
        self._prefixes, owners = [f"{name}.".lstrip(".") for name, _ in owned], [m for _, m in owned]
        # A scripted module's table is not a dict, and gives other tensor objects at each look.
        self._tables = [m._buffers if isinstance(m._buffers, dict) else dict(m._buffers.items()) for m in owners]
        # For each module, whether its buffers may be written so that torch does not count it: by `buffer.data`, in a script.
        # Then they are as changed from there on.
        self._uncounted = bytearray(not isinstance(m._buffers, dict) for m in owners)
        self._seen: list[list[_Seen]] = [[] for _ in self._tables]
        for k in range(len(self._tables)):
            self._see(k)
        self._alike = [[name for name, *_ in seen] for seen in self._seen]  # names of those that all ranks have in one shape

    def changed(self) -> bytes:
        """For each module, since the last :meth:`synchronize`, on this rank: 1 if buffers changed, 2 if their shapes did."""
        looks = [_look(table) for table in self._tables]
        found = bytes(map(max, map(_difference, looks, self._seen), self._uncounted))
        for k in (k for k, flag in enumerate(found) if flag):
            self._require_own_memory(k, looks[k])
        return found

    def _require_own_memory(self, k: int, look: list[_Seen]) -> None:
        known = {id(buffer) for _, buffer, *_ in self._seen[k]}
        for name, buffer, *_ in look:
            if id(buffer) not in known and is_gathered(buffer):
                raise ResidencyError(
                    f"Buffer {(self._prefixes[k] + name)!r} was set to a view of a sharded parameter, whose memory will be "
                    "another unit's. Set it to a copy (`.clone()`)."
                )

    def versions(self) -> list[tuple[Tensor, int]]:
        """All buffers, each with the number of times that it was written."""
        return [(b, b._version) for table in self._tables for b in table.values() if b is not None and not b.is_inference()]

    def keep(self) -> Callable[[], None]:
        """Copy all buffers to the CPU; the result puts them back, assigned ones too."""
        tables = [(table, {name: b for name, b in table.items() if b is not None}) for table in self._tables]
        copies = {b: b.detach().to("cpu", copy=True) for _, kept in tables for b in kept.values() if not b.is_inference()}

        def put_back() -> None:
            for table, kept in tables:
                table.update(kept)
            with torch.no_grad():
                for b, copy in copies.items():
                    if not torch.equal(b.cpu(), copy):  # one that is expanded cannot be written
                        b.copy_(copy)

        return put_back

    def synchronize(self, chosen: Sequence[int] | None = None) -> None:
        """Copy rank 0's buffers to the other ranks in one exchange; collective.

        Args:
            chosen: for each module what :meth:`changed` said on any rank; None takes all. Torch's own batch norm writes its
                statistics unnoticed when it is called as a function, so what a rank saw change may not be everything.
        """
        picked = [k for k in range(len(self._tables)) if chosen is None or chosen[k]]
        if self._collectives.world_size > 1:
            compared = self._compare([k for k in picked if chosen is None or chosen[k] > 1])
            places = compared if chosen is None else [(k, name) for k in picked for name in self._alike[k]]
            self._copy([b for b in (self._tables[k][name] for k, name in places) if b.numel()])
        for k in picked:
            self._see(k)

    def _see(self, k: int) -> None:
        known = {id(buffer) for _, buffer, *_ in self._seen[k]}
        self._seen[k] = _look(self._tables[k])
        for _, buffer, *_ in self._seen[k]:
            if id(buffer) not in known:
                note_uncounted(buffer, self._uncounted, k)

    def _compare(self, modules: list[int]) -> list[tuple[int, str]]:
        """Note which buffers of ``modules`` all ranks have in one shape; collective if there are any.

        Returns these, but only one place of each that has several on every rank.
        """
        if not modules:
            return []
        numbers: dict[int, int] = {}
        looks = [_look(self._tables[k]) for k in modules]
        mine = [{n: (tuple(s), d, numbers.setdefault(id(b), len(numbers))) for n, b, _, s, d in look} for look in looks]
        places: dict[tuple[int, ...], tuple[int, str]] = {}
        for k, first, *others in zip(modules, *self._collectives.all_gather_object(mine), strict=True):
            self._alike[k] = [n for n in first if all(n in other and other[n][:2] == first[n][:2] for other in others)]
            for name in self._alike[k]:
                places.setdefault(tuple(found[name][2] for found in (first, *others)), (k, name))
        return list(places.values())

    def _copy(self, tensors: list[Tensor]) -> None:
        """Of rank 0, to the other ranks."""
        if not tensors:
            return
        parts = [_plain(b).view(-1).view(torch.uint8) for b in tensors]
        packed = self._collectives.broadcast(torch.cat(parts))
        if not self._collectives.global_rank:
            return
        own = {id(b) for seen in self._seen for _, b, *_ in seen}
        assigned: dict[Tensor, Tensor] = {}
        for b, part in zip(tensors, packed.split([b.nbytes for b in tensors]), strict=True):
            value = part.clone().view(b.dtype).view(b.shape)  # cloned: a view of a dtype must be aligned
            if id(b) in own:
                _write(b, value)
            else:  # an activation, or the user's data, may be the same memory
                assigned[b] = _like(b, value)
        for table in self._tables if assigned else ():
            table.update({name: assigned[b] for name, b in table.items() if b in assigned})


def _plain(buffer: Tensor) -> Tensor:
    """Its elements one after another; its own memory if they are."""
    return buffer.detach().resolve_conj().resolve_neg().contiguous()


def _write(buffer: Tensor, value: Tensor) -> None:
    for dim, step in enumerate(buffer.stride()):
        if not step:  # expanded: what is written to must have its own memory
            buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with torch.inference_mode():  # what was made under it can be written in no other way
        buffer.copy_(value)


def _like(buffer: Tensor, value: Tensor) -> Tensor:
    with torch.inference_mode(buffer.is_inference()):
        return torch.empty_like(buffer).copy_(value).requires_grad_(buffer.requires_grad)


def _look(table: dict[str, Tensor | None]) -> list[_Seen]:
    # The tensors themselves: a number or an address would soon be another one's.
    return [(n, b, _UNCOUNTED if b.is_inference() else b._version, b.shape, b.dtype) for n, b in table.items() if b is not None]


def _difference(now: list[_Seen], before: list[_Seen]) -> int:
    if [(name, *kind) for name, _, _, *kind in now] != [(name, *kind) for name, _, _, *kind in before]:
        return 2
    return int(any(a[1] is not b[1] or a[2] != b[2] or a[2] == _UNCOUNTED for a, b in zip(now, before, strict=True)))


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
