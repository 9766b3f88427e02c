"""A graph of tensor operations for machines without CUDA, with the rules of `torch.cuda.CUDAGraph`.

It is for tests and examples: what is captured behaves as on a GPU, but nothing gets faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...strategies.collectives import LocalCollectives
from ...strategies.engine import show
from .software_exchanges import record_exchanges

_aten = torch.ops.aten
# Their results hold nothing yet.
_EMPTY = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
)
# Write to arguments (by position) that their schemas do not mark.
_UNMARKED_WRITES = {_aten.native_batch_norm: (3, 4)}


class CaptureError(RuntimeError):
    """The program did something that a graph cannot contain."""


@dataclass
class _Node:
    """One recorded call, and the tensors that its results go to."""

    run: Callable[[], Any]
    # (number among the tensors that a call returns, where it goes)
    results: list[tuple[int, Tensor]]
    numbers: list[Tensor]  # arguments of one element

    def replay(self) -> None:
        for number in self.numbers:
            show(number)  # a view of a weight is hidden when its unit's use ends
        values = (
            [v for v in tree_leaves(self.run()) if isinstance(v, Tensor)]
            if self.results
            else self.run()
        )
        for number, target in self.results:
            target.copy_(values[number])


class SoftwareGraph:
    """Records the tensor operations of a piece of a program and repeats them in the same memory,
    without the program.

    Like a CUDA graph: addresses and Python numbers are those of the capture; a capture itself
    changes no tensor that was there before and no random state; reading a value on the host is an
    error in it; random operations draw new numbers in each replay, after random states were saved
    and set as in the capture. Operations of the calling thread are recorded, and backward passes
    that it runs on the CPU. Collectives (of `DistributedDataParallel`, say) are repeated too, each
    to its end.

    Args:
        communicator: of `zero3`'s engine, if there is one: its exchanges are recorded, and happen
            in the capture too.
    """

    def __init__(self, communicator: LocalCollectives | None = None) -> None:
        self._nodes: list[_Node] = []
        self._communicator = communicator

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Inside, operations are recorded, and undone at the end."""
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
        """Repeat what was recorded."""
        with _below_autograd():
            for node in self._nodes:
                node.replay()

    def reset(self) -> None:
        """Forget everything; the memory goes when nobody else holds its tensors."""
        self._nodes = []

    def __len__(self) -> int:
        """Number of recorded calls."""
        return len(self._nodes)


@contextmanager
def _below_autograd() -> Iterator[None]:
    # Nor are version counters touched: a backward may be captured after replays of its forward.
    no_versions = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(no_versions):
        with torch._C.DisableTorchFunctionSubclass():
            yield


def memory_of(tensor: Tensor) -> int:
    """Tells the storage of ``tensor`` from others."""
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Runs operations, notes them in ``nodes``, and can undo what they did to older tensors."""

    def __init__(self, nodes: list[_Node]) -> None:
        super().__init__()
        self._nodes = nodes
        self._own: dict[int, torch.UntypedStorage] = {}  # memory that was made during the capture
        self._before: dict[
            int, tuple[Tensor, torch.UntypedStorage]
        ] = {}  # of older memory a view, and a copy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _require_capturable(func, args)
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        written = written_by(func, args, kwargs)
        for tensor in written:
            self.keep(tensor)
        result = func(*args, **kwargs)
        outputs = [v for v in tree_leaves(result) if isinstance(v, Tensor)]
        shared = {memory_of(t) for t in inputs}
        made = [(k, t.detach()) for k, t in enumerate(outputs) if memory_of(t) not in shared]
        for _, tensor in made:
            self._own[memory_of(tensor)] = tensor.untyped_storage()
        if (made or written) and func.overloadpacket not in _EMPTY:
            # Detached, so that the graph holds memory and no autograd history.
            fixed_args, fixed_kwargs = tree_map_only(Tensor, lambda t: t.detach(), (args, kwargs))
            numbers = [
                t
                for t in tree_leaves((fixed_args, fixed_kwargs))
                if isinstance(t, Tensor) and t.numel() == 1
            ]
            self._nodes.append(_Node(lambda: func(*fixed_args, **fixed_kwargs), made, numbers))
            if func.namespace == "c10d":
                self._nodes[-1] = _Node(
                    lambda: Work.unbox(func(*fixed_args, **fixed_kwargs)[1]).wait(), [], numbers
                )
        return result

    def call(self, run: Callable[[], Any], written: Sequence[Tensor]) -> Any:
        """Make a call, which writes to tensors, and note it as a whole; its result must be the same
        object in each replay.
        """
        for tensor in written:
            self.keep(tensor)
        self._nodes.append(_Node(run, [], []))
        with _disable_current_modes():
            return run()

    def keep(self, tensor: Tensor) -> None:
        key = memory_of(tensor)
        if key not in self._own and key not in self._before:
            self._before[key] = tensor.detach(), tensor.untyped_storage().clone()

    def undo(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            # slots of two units may share memory
            for view, before in reversed(self._before.values()):
                # of storages: versions of tensors stay as they are
                view.untyped_storage().copy_(before)


@contextmanager
def _record_random_states(recorder: _Recorder) -> Iterator[None]:
    real = torch.get_rng_state, torch.set_rng_state

    def save() -> Tensor:
        with _disable_current_modes():
            state = real[0]()
        recorder.call(lambda: state.copy_(real[0]()), [])
        return state

    torch.get_rng_state = save
    torch.set_rng_state = lambda state: recorder.call(lambda: real[1](state), [])
    try:
        yield
    finally:
        torch.get_rng_state, torch.set_rng_state = real


def written_by(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Tensors that an operation writes to."""
    if func.namespace == "c10d":  # collectives, whose schemas say nothing
        return [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    found = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += [v for v in tree_leaves(value) if isinstance(v, Tensor)]
    for k in _UNMARKED_WRITES.get(func.overloadpacket, ()):
        found += [args[k]] if isinstance(args[k], Tensor) else []
    return found


def waits_for_device(func: Any, args: tuple) -> bool:
    """Whether an operation needs a value, or a size that depends on values, on the host."""
    if func.overloadpacket in (
        _aten.index,
        _aten.index_put,
        _aten.index_put_,
        _aten._unsafe_index_put,
    ):
        indices = args[1]
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)
    if func.overloadpacket is _aten._linalg_check_errors:
        return True  # though its tags do not say so
    return (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )


def _require_capturable(func: Any, args: tuple) -> None:
    if waits_for_device(func, args):
        raise CaptureError(
            f"{func} was called while a graph was captured. It needs a value, or a size that"
            " depends on values, on the host, and there are no values yet."
        )
