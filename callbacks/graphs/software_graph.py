"""`SoftwareGraph`: a graph of tensor operations that follows the rules of `torch.cuda.CUDAGraph`.

It is for tests and examples on machines without CUDA: captured programs behave as on a GPU, but
nothing gets faster.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...strategies.collectives import LocalCollectives
from .software_exchanges import record_exchanges

_aten = torch.ops.aten
# The engine of `zero3` waits where a capture does not.
OURS = tuple(str(Path(__file__).parents[2] / name) for name in ("callbacks", "strategies"))
_TORCH = Path(torch.__file__).parent
# Code of torch between an operation and a mode.
_PLUMBING = tuple(str(_TORCH / name) for name in ("_compile", "_dynamo", "utils/_python_dispatch"))
# Operations whose results have no values yet.
_EMPTY = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
)
# Operations that write to arguments (by position) which their schemas do not mark as written.
_UNMARKED_WRITES = {_aten.native_batch_norm: (3, 4)}


class CaptureError(RuntimeError):
    """The program did something that a graph cannot contain."""


@dataclass
class _Node:
    """One recorded call, and the tensors that its results are copied to.

    Attributes:
        run: makes the call.
        targets: for each result with memory of its own, its position among the tensors that the
            call returns, and the tensor that it is copied to.
    """

    run: Callable[[], Any]
    targets: list[tuple[int, Tensor]]

    def replay(self) -> None:
        results = self.run()
        if self.targets:
            results = [v for v in tree_leaves(results) if isinstance(v, Tensor)]
        for position, target in self.targets:
            target.copy_(results[position])


class SoftwareGraph:
    """Records the tensor operations of a program and repeats them in the same memory.

    The rules are those of a CUDA graph. Addresses and Python numbers are those of the capture. A
    capture changes no older tensor and no random state, and reading a value on the host in it is an
    error. Random operations draw new numbers in each replay, with random states saved and set as in
    the capture. The graph records the operations of the calling thread and of backward passes that
    this thread runs on the CPU. It also repeats collectives (of `DistributedDataParallel`, say),
    and waits for each to end.

    Args:
        communicator: the communicator of `zero3`'s engine, if there is one. Its exchanges are
            recorded; unlike other operations they happen in the capture too.
    """

    def __init__(self, communicator: LocalCollectives | None = None) -> None:
        self._nodes: list[_Node] = []
        self._communicator = communicator

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the operations of the body, and undo them at its end.

        Raises:
            CaptureError: an operation needs a value on the host.
        """
        recorder = _Recorder(self._nodes)
        generator_state = torch.get_rng_state()
        try:
            exchanges = (
                nullcontext()
                if self._communicator is None
                else record_exchanges(self._communicator, recorder)
            )
            with recorder, exchanges, _record_random_states(recorder):
                yield
        except BaseException:
            self.reset()
            raise
        finally:
            torch.set_rng_state(generator_state)
            recorder.undo()

    def replay(self) -> None:
        """Repeat the recorded operations."""
        with _below_autograd():
            for node in self._nodes:
                node.replay()

    def reset(self) -> None:
        """Drop all recorded operations, and with them the graph's references to tensors."""
        self._nodes = []

    def __len__(self) -> int:
        """Number of recorded calls."""
        return len(self._nodes)


@contextmanager
def _below_autograd() -> Iterator[None]:
    # hazard: a backward may be captured after replays of its forward; autograd would then find that
    # saved tensors were written. So replays touch no version counters.
    no_versions = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(no_versions):
        with torch._C.DisableTorchFunctionSubclass():
            yield


def memory_of(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor``."""
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Runs operations, appends them to ``nodes``, and can restore older tensors that they wrote."""

    def __init__(self, nodes: list[_Node]) -> None:
        super().__init__()
        self._nodes = nodes
        self._new_storages: dict[int, torch.UntypedStorage] = {}  # made during the capture
        # For each older storage that was written: a tensor in it, and a copy of the storage.
        self._saved: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits_for_device(func, args):
            raise CaptureError(
                f"{func} was called while a graph was captured. It needs a value, or a size that"
                " depends on values, on the host, and there are no values yet."
            )
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        written = _written_by(func, args, kwargs)
        for tensor in written:
            self.save_values(tensor)
        result = func(*args, **kwargs)
        outputs = [v for v in tree_leaves(result) if isinstance(v, Tensor)]
        shared = {memory_of(t) for t in inputs}
        made = [(k, t.detach()) for k, t in enumerate(outputs) if memory_of(t) not in shared]
        for _, tensor in made:
            self._new_storages[memory_of(tensor)] = tensor.untyped_storage()
        if (made or written) and func.overloadpacket not in _EMPTY:
            # Detached, so that the graph holds memory and no autograd history.
            fixed_args, fixed_kwargs = tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs))
            self._nodes.append(_Node(lambda: func(*fixed_args, **fixed_kwargs), made))
            if func.namespace == "c10d":
                self._nodes[-1] = _Node(
                    lambda: Work.unbox(func(*fixed_args, **fixed_kwargs)[1]).wait(), []
                )
        return result

    def record_call(self, run: Callable[[], Any], written: Sequence[Tensor]) -> Any:
        """Make a call and record it as one operation.

        Args:
            run: makes the call; its result must be the same object in each replay.
            written: tensors that the call writes to.
        """
        for tensor in written:
            self.save_values(tensor)
        self._nodes.append(_Node(run, []))
        with _disable_current_modes():
            return run()

    def save_values(self, tensor: Tensor) -> None:
        key = memory_of(tensor)
        if key not in self._new_storages and key not in self._saved:
            self._saved[key] = tensor.detach(), tensor.untyped_storage().clone()

    def undo(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            # hazard: slots of two units may share memory; reversed, the oldest values win.
            for tensor, values in reversed(self._saved.values()):
                # Copies storages, so that the versions of tensors stay as they are.
                tensor.untyped_storage().copy_(values)


@contextmanager
def _record_random_states(recorder: _Recorder) -> Iterator[None]:
    real_get, real_set = real = torch.get_rng_state, torch.set_rng_state

    def get_rng_state() -> Tensor:
        with _disable_current_modes():
            state = real_get()
        recorder.record_call(lambda: state.copy_(real_get()), [])
        return state

    torch.get_rng_state = get_rng_state
    torch.set_rng_state = lambda new_state: recorder.record_call(lambda: real_set(new_state), [])
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = real


def _written_by(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if func.namespace == "c10d":  # schemas of collectives mark no writes
        return [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    found = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [v for v in tree_leaves(value) if isinstance(v, Tensor)]
    for k in _UNMARKED_WRITES.get(func.overloadpacket, ()):
        found += [args[k]] if isinstance(args[k], Tensor) else []
    return found


def _waits_for_device(func: Any, args: tuple) -> bool:
    """Return whether an operation needs a value, or a size that depends on values, on the host."""
    if func.overloadpacket in (
        _aten.index,
        _aten.index_put,
        _aten.index_put_,
        _aten._unsafe_index_put,
    ):
        indices = args[1]
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)
    if func.overloadpacket is _aten._linalg_check_errors:
        return True  # torch gives it no tag for this
    return (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )


def describe_line(file: str, line: int) -> str:
    """Return ``train.py:31: `x = loss.item()` ``."""
    return f"{file}:{line}: `{linecache.getline(file, line).strip()}`"


class ReportsWaits(TorchDispatchMode):
    """Adds to ``found`` each operation of the body for which the host would wait for a device."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits_for_device(func, args):
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and caller.f_code.co_filename.startswith(_PLUMBING):
                caller = caller.f_back
            if caller is not None and not caller.f_code.co_filename.startswith(OURS):
                place = describe_line(caller.f_code.co_filename, caller.f_lineno)
                self._found.append(f"{place}: {func.overloadpacket}")
        return func(*args, **kwargs or {})
