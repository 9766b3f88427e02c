"""`SoftwareGraph`: a graph of tensor operations that follows the rules of `torch.cuda.CUDAGraph`.

It is for tests and examples on machines without CUDA: captured programs behave as on a GPU, but
nothing gets faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary, extract_stack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_map_only

from ...strategies.collectives import LocalCollectives
from ...strategies.engine import is_sharded
from ...strategies.support import (
    AutoDispatchBelowAutograd,
    DisableAutocast,
    DisableTorchFunctionSubclass,
    without_versions,
)
from .compare import replaced, tensors_in

_aten = torch.ops.aten
# The engine of `zero3` waits where a capture does not.
OURS = tuple(str(Path(__file__).parents[2] / name) for name in ("callbacks", "strategies"))
_TORCH = f"{Path(torch.__file__).parent}/"
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index_put}
_ON_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Methods of a communicator; exchanges of Python objects, which no graph can hold, are not here.
_EXCHANGES = (
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_in",
    "all_to_all",
    "all_reduce",
    "broadcast",
    "meet",
)


class SoftwareGraph:
    """Records the tensor operations of a program and repeats them in the same memory.

    Addresses and Python numbers are those of the capture, which changes no older tensor and no
    random state, and in which reading a value on the host is an error. Random operations draw new
    numbers in each replay, with random states saved and set as in the capture. Collectives are
    repeated, too, and end before anything else is done. The exchanges of a communicator, that of
    `zero3`'s engine, happen in the capture too, unlike other operations.
    """

    def __init__(self, communicator: LocalCollectives | None = None) -> None:
        self._communicator = communicator
        # What makes each call; and its results with memory of their own, by their position among
        # the tensors that the call returns.
        self._calls: list[tuple[Callable[[], Any], list[tuple[int, Tensor]]]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the operations of the body, and undo them at its end.

        Raises:
            RuntimeError: an operation needs a value on the host.
        """
        recorder = _Recorder(self._calls)
        real_get, real_set = torch.get_rng_state, torch.set_rng_state
        communicator: Any = self._communicator
        names = () if communicator is None else _EXCHANGES
        exchanges = {name: _recorded(communicator, name, recorder) for name in names}
        state = real_get()

        def get_rng_state() -> Tensor:
            found = state.clone()
            return recorder.record_call(lambda: found.copy_(real_get()))

        states = {
            "get_rng_state": get_rng_state,
            "set_rng_state": lambda new: recorder.record_call(lambda: real_set(new)),
        }
        methods = vars(communicator or self)
        try:
            with replaced(vars(torch), states), replaced(methods, exchanges), recorder:
                yield
        except BaseException:
            self.reset()
            raise
        finally:
            real_set(state)
            recorder.undo()

    def replay(self) -> None:
        """Repeat the recorded operations."""
        # hazard: a backward may be captured after replays of its forward; autograd would then find
        # that saved tensors were written.
        with (
            AutoDispatchBelowAutograd(),
            DisableAutocast(),
            without_versions(),
            DisableTorchFunctionSubclass(),
        ):
            for run, targets in self._calls:
                results = run()
                for position, target in targets:
                    target.copy_(tensors_in(results)[position])

    def reset(self) -> None:
        """Drop all recorded operations, and with them the graph's references to tensors."""
        self._calls = []


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Runs operations, appends them to ``calls``, and can restore the tensors that were there."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self._calls = calls
        # For each storage that was used: a tensor in it, and a copy of the storage before.
        self._saved: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits_for_device(func, args):
            raise RuntimeError(
                f"{func} was called while a graph was captured. It needs a value, or a size that"
                " depends on values, on the host, and there are no values yet."
            )
        given = tensors_in((args, kwargs))
        self._save_values(given)
        result = func(*args, **kwargs)
        shared = {_memory_of(tensor) for tensor in given}
        made = [
            (position, tensor.detach())
            for position, tensor in enumerate(tensors_in(result))
            if _memory_of(tensor) not in shared
        ]
        # Detached, so that the graph holds memory and no autograd history.
        fixed_args, fixed_kwargs = tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs))

        def run() -> Any:
            return func(*fixed_args, **fixed_kwargs)

        is_exchange = func.namespace == "c10d"
        self._calls.append(
            (lambda: Work.unbox(run()[1]).wait(), []) if is_exchange else (run, made)
        )
        return result

    def record_call(self, run: Callable[[], Any], written: Sequence[Tensor] = ()) -> Any:
        """Make a call and record it as one operation, which may write to ``written``."""
        self._save_values(written)
        self._calls.append((run, []))
        with _disable_current_modes():
            return run()

    def _save_values(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            key = _memory_of(tensor)
            # A sharded parameter has no memory that could be written to.
            if key not in self._saved and not is_sharded(tensor):
                self._saved[key] = tensor.detach(), tensor.untyped_storage().clone()

    def undo(self) -> None:
        """Restore what was written."""
        with DisableTorchFunctionSubclass():
            # hazard: slots of two units may share memory; reversed, the oldest values win.
            for tensor, values in reversed(self._saved.values()):
                # Copies storages, so that the versions of tensors stay as they are.
                tensor.untyped_storage().copy_(values)


def _recorded(communicator: LocalCollectives, name: str, recorder: _Recorder) -> Callable[..., Any]:
    """Return a replacement for a method of ``communicator`` that records the exchange as one call.

    Communicators on the CPU number their exchanges, and use other memory for each: of one the
    tensor operations cannot be repeated, but all of it can, in the same order on every rank.
    """
    real = getattr(communicator, name)

    def exchange(*args: Any) -> Any:
        if _get_current_dispatch_mode() is None:
            return real(*args)  # the recorded exchange, or a part of it

        def run() -> Any:
            # Looked up again: in a replay the method may be one that takes the time.
            result = getattr(communicator, name)(*args)
            return result, result.wait() if hasattr(result, "wait") else None

        work, result = recorder.record_call(run, tensors_in(args))
        return SimpleNamespace(wait=lambda: result) if hasattr(work, "wait") else work

    return exchange


def _waits_for_device(func: Any, args: tuple) -> bool:
    """Return whether an operation needs a value, or a size that depends on values, on the host."""
    if func.overloadpacket in _INDEXING:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    # Torch gives the check of `torch.linalg` no tag for this.
    is_check = func.overloadpacket is _aten._linalg_check_errors
    return is_check or not _ON_THE_HOST.isdisjoint(func.tags)


def describe_wait(place: FrameSummary, operation: str = "") -> str:
    """Return ``train.py:31: `x = loss.item()`...``, and what is wrong with it."""
    return (
        f"{place.filename}:{place.lineno}: `{place.line}`{operation} needs a value, or a size that"
        " depends on values, on the host: nobody has computed it when the graph is captured. Keep"
        " it on the device (`torch.where` for `if` and for masks; log the tensor)."
    )


class ReportsWaits(TorchDispatchMode):
    """Adds to ``problems`` each operation of the body that needs a value on the host."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__()
        self._problems = problems

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits_for_device(func, args):
            stack = [f for f in extract_stack()[:-1] if not f.filename.startswith(_TORCH)]
            if not stack[-1].filename.startswith(OURS):
                self._problems.append(describe_wait(stack[-1], f": {func.overloadpacket}"))
        return func(*args, **kwargs or {})
