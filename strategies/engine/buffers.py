"""Buffers are whole on every rank, and rank 0's count: at set-up, and after a backward, or step, in
which some changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives

# of what was made under inference_mode: it may have been written any number of times
_UNCOUNTED = -1
_SAME, _CHANGED, _RESHAPED = range(3)


@dataclass(eq=False)
class _Table:
    """The buffers of a module that all ranks have."""

    buffers: dict[str, Tensor | None]
    alike: list[str]  # names of the dense ones that all ranks have in one shape and dtype
    always: bool  # whether they count as changed each time
    kinds: list[tuple[object, ...]] = field(init=False)
    # of each: itself, the number of writes to it, and its address. The tensors themselves: a number
    # or an address would soon be another one's.
    seen: list[tuple[Tensor, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.kinds = _kinds(self.buffers)
        self.see()

    def see(self) -> None:
        """They are rank 0's now."""
        self.seen = self._look()

    def _look(self) -> list[tuple[Tensor, int, int]]:
        with torch._C.DisableTorchFunctionSubclass():  # else a view of a weight has no address
            return [
                (b, _UNCOUNTED if b.is_inference() else b._version, b.data_ptr())
                for name in self.alike
                if (b := self.buffers[name]) is not None
            ]

    def change(self) -> int:
        """What happened to them on this rank since they were rank 0's: :data:`_SAME`, ..."""
        if _kinds(self.buffers) != self.kinds:
            return _RESHAPED
        same = not self.always and all(
            now[0] is then[0] and now[1:] == then[1:] and now[1] != _UNCOUNTED
            for now, then in zip(self._look(), self.seen, strict=True)
        )
        return _SAME if same else _CHANGED


class Buffers:
    """Keeps the buffers of all ranks equal to rank 0's, as
    ``DistributedDataParallel(broadcast_buffers=True)`` does.

    Modules with persistent floating buffers take part each time, because torch does not count what
    is written to ``buffer.data``; others when torch has counted a change, so constant ones (masks,
    rotary tables) with ``persistent=False`` cost nothing. A buffer that got another shape on some
    rank (a table that grows with a rank's own sequences) is each rank's own until all have one
    shape; so is one that is sparse, nested or quantized after set-up.
    """

    def __init__(
        self, model: nn.Module, collectives: LocalCollectives, device: torch.device
    ) -> None:
        self._model, self._collectives, self._device = model, collectives, device
        self._tables: list[_Table] = []
        self._others: list[dict[str, Tensor | None]] = []  # the other modules'
        # by the object, not by its id: one that dies here leaves that to a new buffer
        moved: dict[Tensor, Tensor] = {}
        for prefix, module in model.named_modules():
            _require_dense_if_saved(prefix, module)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if buffer not in moved:
                        moved[buffer] = buffer.to(device)
                    module._buffers[name] = moved[buffer]
        self._agree_on_tables()
        self.synchronize()

    def _agree_on_tables(self) -> None:
        """Find the buffers that all ranks have in one shape; collective."""
        modules = {prefix: m for prefix, m in self._model.named_modules() if m._buffers}
        mine = {prefix: _kinds(module._buffers) for prefix, module in modules.items()}
        everyone = self._collectives.all_gather_object(mine)
        self._tables = []
        for prefix, kinds in everyone[0].items():
            if all(prefix in each for each in everyone):
                alike = [
                    kind[0] for kind in kinds if all(kind in each[prefix] for each in everyone)
                ]
                module = modules[prefix]
                # torch counts no writes of a scripted module's
                always = not isinstance(module._buffers, dict) or _has_persistent(module)
                self._tables.append(_Table(module._buffers, alike, always))
        self.look_again()
        # what only some ranks have is their own
        self._others = [table for table in self._others if not table]

    def look_again(self) -> None:
        """Modules came, went or have other names: local."""
        known = {id(table.buffers) for table in self._tables}
        # empty until a buffer is registered
        tables: list[dict[str, Tensor | None]] = [m._buffers for m in self._model.modules()]
        self._others = [table for table in tables if id(table) not in known]

    def changed(self) -> bytes:
        """For each module, whether its buffers changed on this rank since the last
        :meth:`synchronize`; the last byte: whether modules have buffers, or buffers shapes, that
        they had not.
        """
        found = [table.change() for table in self._tables]
        return bytes(map(bool, found)) + bytes([_RESHAPED in found or any(self._others)])

    def versions(self) -> list[tuple[Tensor, int]]:
        """All buffers, each with the number of times that it was written."""
        return [
            (b, b._version)
            for table in self._tables
            for b in table.buffers.values()
            if b is not None and not b.is_inference()
        ]

    def keep(self) -> Callable[[], None]:
        """Copy all buffers to the CPU; the result puts them back, assigned ones too."""
        kept = [
            (table.buffers, name, b)
            for table in self._tables
            for name, b in table.buffers.items()
            if b is not None
        ]
        copies = {
            b: b.detach().to("cpu", copy=True)
            for *_, b in kept
            if _is_dense(b) and not b.is_inference()
        }

        def put_back() -> None:
            for table, name, b in kept:
                table[name] = b
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
        before = {id(b) for table in self._tables for b, *_ in table.seen}
        tables = self._tables
        if chosen is None or chosen[-1]:
            self._agree_on_tables()
            tables = self._tables
        else:
            tables = [table for table, is_one in zip(tables, chosen, strict=False) if is_one]
        if self._collectives.world_size > 1:
            self._copy(tables, before)
        for table in tables:
            table.see()

    def _copy(self, tables: list[_Table], before: set[int]) -> None:
        """Of rank 0, to the other ranks; ``before``: the `id` of each that was not assigned
        since.
        """
        places = [
            (table.buffers, name, b)
            for table in tables
            for name in table.alike
            if (b := table.buffers[name]) is not None and b.numel()
        ]
        if not places:
            return
        # a forward may assign any
        parts = [_plain(b).view(-1).view(torch.uint8).to(self._device) for *_, b in places]
        packed = self._collectives.broadcast(torch.cat(parts))
        if not self._collectives.global_rank:
            return
        assigned: dict[Tensor, Tensor] = {}
        for (table, name, b), part in zip(
            places, packed.split([part.numel() for part in parts]), strict=True
        ):
            # cloned: a view of a dtype must be aligned
            value = part.clone().view(b.dtype).view(b.shape)
            if id(b) in before:
                _write(b, value)
            else:  # autograd may have saved it
                table[name] = assigned.setdefault(b, _like(b, value))


def _kinds(table: dict[str, Tensor | None]) -> list[tuple[object, ...]]:
    """Name, shape and dtype of dense buffers."""
    return [
        (name, tuple(b.shape), b.dtype)
        for name, b in table.items()
        if b is not None and _is_dense(b)
    ]


def _has_persistent(module: nn.Module) -> bool:
    return any(
        buffer is not None and buffer.is_floating_point() and _is_dense(buffer)
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )


def _plain(buffer: Tensor) -> Tensor:
    """Its elements one after another; its own memory if they are."""
    return buffer.detach().resolve_conj().resolve_neg().contiguous()


def _write(buffer: Tensor, value: Tensor) -> None:
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
