"""Buffers are whole on every rank, and rank 0's count: at set-up, and after a backward, or step, in
which some changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives

# A buffer's name, itself, the number of writes to it and its address, its shape (if it is not
# dense, what tells that it changed), its dtype.
_Seen = tuple[str, Tensor, tuple[int, int], tuple[object, ...], torch.dtype]
# of what was made under inference_mode: it may have been written any number of times
_UNCOUNTED = -1


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
        self._collectives, self._device = collectives, device
        self.differing: list[
            str
        ] = []  # names of those that were not rank 0's when they were placed
        moved: dict[
            Tensor, Tensor
        ] = {}  # by the object, not by its id: one that dies here leaves that to a new buffer
        for prefix, module in model.named_modules():
            _materialize_buffers(prefix, module)
            _require_dense_if_saved(prefix, module)
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer not in moved:
                    moved[buffer] = self._placed(f"{prefix}.{name}".lstrip("."), buffer.to(device))
                module._buffers[name] = moved[buffer]
        self._model = model
        self._numbers: dict[
            str, int
        ] = {}  # of modules with buffers, by prefix; all ranks have the same
        self._tables: list[dict[str, Tensor | None]] = []
        self._always = bytearray()  # of each module, whether its buffers count as changed each time
        self._seen: list[list[_Seen]] = []
        self._alike: list[list[str]] = []  # names of those that all ranks have in one shape
        for name, module in model.named_modules():
            if module._buffers:
                self._add(f"{name}.".lstrip("."), module._buffers)
                self._always[-1] |= _has_persistent(module)
        for k in range(len(self._tables)):
            self._see(k)
            self._alike[k] = [name for name, *_ in self._seen[k]]
        self.look_again()

    def _placed(self, name: str, buffer: Tensor) -> Tensor:
        if not _is_dense(buffer):
            _require_same(name, self._collectives.all_gather_object(_digest(buffer)))
            return buffer
        agreed = self._collectives.broadcast(_plain(buffer).clone())
        if self._collectives.global_rank and not torch.allclose(
            buffer, agreed, rtol=0, atol=0, equal_nan=True
        ):
            self.differing.append(name)
            _write(buffer, agreed)
        return buffer

    def _add(self, prefix: str, table: dict[str, Tensor | None]) -> None:
        self._numbers[prefix] = len(self._numbers)
        self._tables.append(table)
        self._always.append(not isinstance(table, dict))  # a scripted module's
        self._seen.append([])
        self._alike.append([])

    def look_again(self) -> None:
        """Modules came, went or have other names: local."""
        self._others = list(self._unknown().values())

    def _unknown(self) -> dict[str, dict[str, Tensor | None]]:
        """The tables of the other modules, by prefix: empty until a buffer is registered."""
        known = set(map(id, self._tables))
        found = ((f"{name}.".lstrip("."), m._buffers) for name, m in self._model.named_modules())
        return {prefix: table for prefix, table in found if id(table) not in known}

    def changed(self) -> bytes:
        """For each module, since the last :meth:`synchronize`, on this rank: 1 if buffers changed,
        2 if their shapes did.

        The last byte says whether there are modules with buffers that had none.
        """
        looks = map(_look, self._tables)
        found = bytes(map(max, map(_difference, looks, self._seen), self._always))
        return found + bytes([any(self._others)])

    def versions(self) -> list[tuple[Tensor, int]]:
        """All buffers, each with the number of times that it was written."""
        return [
            (b, b._version)
            for table in self._tables
            for b in table.values()
            if b is not None and not b.is_inference()
        ]

    def keep(self) -> Callable[[], None]:
        """Copy all buffers to the CPU; the result puts them back, assigned ones too."""
        tables = [
            (table, {name: b for name, b in table.items() if b is not None})
            for table in self._tables
        ]
        written = (
            b for _, kept in tables for b in kept.values() if _is_dense(b) and not b.is_inference()
        )
        copies = {b: b.detach().to("cpu", copy=True) for b in written}

        def put_back() -> None:
            for table, kept in tables:
                _put(table, kept)
            with torch.no_grad():
                for b, copy in copies.items():
                    if not torch.equal(b.cpu(), copy):  # one that is expanded cannot be written
                        b.copy_(copy)

        return put_back

    def synchronize(self, chosen: Sequence[int] | None = None) -> None:
        """Copy rank 0's buffers to the other ranks in one exchange; collective.

        Args:
            chosen: for each module what :meth:`changed` said on any rank; None takes all. Torch's
                own batch norm writes its statistics unnoticed when it is called as a function, so
                what a rank saw change may not be everything.
        """
        picked = {k for k in range(len(self._tables)) if chosen is None or chosen[k]}
        late = chosen is None or bool(chosen[-1])
        compared, places = self._compare(
            {k for k in picked if chosen is None or chosen[k] > 1}, late
        )
        ordered = sorted(picked | compared)
        if self._collectives.world_size > 1:
            if chosen is not None:
                places = [(k, name) for k in ordered for name in self._alike[k]]
            tensors = [self._tables[k][name] for k, name in places]
            self._copy([b for b in tensors if b is not None and b.numel()])
        for k in ordered:
            self._see(k)

    def _see(self, k: int) -> None:
        self._seen[k] = _look(self._tables[k])

    def _compare(self, modules: set[int], late: bool) -> tuple[set[int], list[tuple[int, str]]]:
        """Note which buffers of ``modules``, and of those that had none, all ranks have in one
        shape; collective if asked.

        Returns the modules, and these buffers, but only one place of each that has several on every
        rank.
        """
        if not modules and not late:
            return set(), []
        tables = {prefix: self._tables[k] for prefix, k in self._numbers.items() if k in modules}
        if late:
            tables |= {prefix: table for prefix, table in self._unknown().items() if table}
        ids: dict[int, int] = {}
        looks = [_look(table) for table in tables.values()]
        mine = [
            {
                n: (tuple(s) if _is_dense(b) else _digest(b), d, ids.setdefault(id(b), len(ids)))
                for n, b, _, s, d in look
            }
            for look in looks
        ]
        first, *others = self._collectives.all_gather_object(dict(zip(tables, mine, strict=True)))
        everywhere = [prefix for prefix in first if all(prefix in other for other in others)]
        numbers = [self._number(prefix, tables[prefix]) for prefix in everywhere]
        places: dict[tuple[int, ...], tuple[int, str]] = {}
        for k, prefix in zip(numbers, everywhere, strict=True):
            found = first[prefix], *(other[prefix] for other in others)
            for name in found[0]:
                _require_same(prefix + name, [each[name][0] for each in found if name in each])
            alike = [
                n
                for n in found[0]
                if all(n in each and each[n][:2] == found[0][n][:2] for each in found)
            ]
            self._alike[k] = [n for n in alike if isinstance(found[0][n][0], tuple)]
            for name in self._alike[k]:
                places.setdefault(tuple(each[name][2] for each in found), (k, name))
        if late:
            # what only some ranks have is their own
            self._others = [table for table in self._unknown().values() if not table]
        return set(numbers), list(places.values())

    def _number(self, prefix: str, table: dict[str, Tensor | None]) -> int:
        """Of the module that has ``table``, which may be a new one, or in the place of another."""
        if prefix not in self._numbers:
            self._add(prefix, table)
        k = self._numbers[prefix]
        if self._tables[k] is not table:
            self._tables[k], self._seen[k], self._always[k] = (
                table,
                [],
                not isinstance(table, dict),
            )
        return k

    def _copy(self, tensors: list[Tensor]) -> None:
        """Of rank 0, to the other ranks."""
        if not tensors:
            return
        # a forward may assign any
        parts = [_plain(b).view(-1).view(torch.uint8).to(self._device) for b in tensors]
        packed = self._collectives.broadcast(torch.cat(parts))
        if not self._collectives.global_rank:
            return
        own = {id(b): address for seen in self._seen for _, b, (_, address), *_ in seen}
        assigned: dict[Tensor, Tensor] = {}
        for b, part in zip(tensors, packed.split([b.nbytes for b in tensors]), strict=True):
            # cloned: a view of a dtype must be aligned
            value = part.clone().view(b.dtype).view(b.shape)
            if own.get(id(b)) == b.data_ptr():
                _write(b, value)
            elif id(b) in own:
                # `buffer.data` was set: an activation, or the user's data, may be the same memory
                b.data = _like(b, value)
            else:  # the buffer itself was
                assigned[b] = _like(b, value)
        for table in self._tables if assigned else ():
            _put(table, {name: assigned[b] for name, b in table.items() if b in assigned})


def _has_persistent(module: nn.Module) -> bool:
    return any(
        buffer is not None and buffer.is_floating_point() and _is_dense(buffer)
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )


def _put(table: dict[str, Tensor | None], buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():  # a scripted module's table has no `update`
        table[name] = buffer


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


def _is_dense(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_quantized and not buffer.is_nested


def _require_dense_if_saved(prefix: str, module: nn.Module) -> None:
    for name, buffer in module._buffers.items():
        if (
            buffer is not None
            and not _is_dense(buffer)
            and name not in module._non_persistent_buffers_set
        ):
            raise ValueError(
                f"Buffer {f'{prefix}.{name}'.lstrip('.')!r} is sparse, nested or quantized, and"
                " checkpoints hold dense tensors only. Register it with `persistent=False`, or"
                " make it dense."
            )


def _digest(buffer: Tensor) -> str:
    """Of what a buffer that is not dense holds."""
    if buffer.is_quantized:
        parts: tuple[Tensor, ...] = (buffer.dequantize(),)
    elif buffer.is_nested:
        parts = buffer.detach().unbind()
    else:
        coordinates = buffer.detach().to_sparse_coo().coalesce()
        parts = coordinates.indices(), coordinates.values()
    found = hashlib.sha256(
        f"{buffer.layout} {buffer.dtype} {[part.shape for part in parts]}".encode()
    )
    for part in parts:
        found.update(_plain(part).cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _require_same(name: str, kinds: Sequence[object]) -> None:
    """``kinds``: of all ranks, shapes or digests."""
    if any(isinstance(kind, str) for kind in kinds) and len(set(kinds)) > 1:
        raise ValueError(
            f"Buffer {name!r} is sparse, nested or quantized, and not the same on all ranks: only"
            " dense buffers are copied from rank 0. Give all ranks the same one, make it dense, or"
            " keep it in an attribute that is no buffer."
        )


def _look(table: dict[str, Tensor | None]) -> list[_Seen]:
    # The tensors themselves: a number or an address would soon be another one's.
    found: list[_Seen] = []
    with torch._C.DisableTorchFunctionSubclass():  # else a view of a weight refuses its address
        for name, b in table.items():
            if b is not None:
                dense = _is_dense(b)
                writes = (
                    _UNCOUNTED if b.is_inference() else b._version,
                    b.data_ptr() if dense else 0,
                )
                found.append((name, b, writes, b.shape if dense else (id(b), writes), b.dtype))
    return found


def _difference(now: list[_Seen], before: list[_Seen]) -> int:
    if [(name, *kind) for name, _, _, *kind in now] != [
        (name, *kind) for name, _, _, *kind in before
    ]:
        return 2
    return int(
        any(
            a[1] is not b[1] or a[2] != b[2] or a[2][0] == _UNCOUNTED
            for a, b in zip(now, before, strict=True)
        )
    )


def _materialize_buffers(prefix: str, module: nn.Module) -> None:
    waiting = [
        name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
    ]
    if not waiting:
        return
    if not hasattr(module, "reset_running_stats"):
        name = f"{prefix}.{waiting[0]}".lstrip(".")
        raise ValueError(
            f"Buffer {name!r} is on the meta device, and only the running statistics of norm layers"
            ' can be initialised from there. Create it with `device="cpu"`.'
        )
    for name in waiting:
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.empty_like(buffer, device="cpu")
    cast(Any, module).reset_running_stats()
