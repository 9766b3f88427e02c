"""Watches eager training steps for what a graph could not repeat."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torchmetrics.metric
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .graph_batch import UnsupportedBatch, signature, tensors_in
from .graph_lines import (
    ELSEWHERE,
    Place,
    definition,
    describe_line,
    is_users,
    line_of_attribute,
    runs_engine,
    user_frames,
    user_line,
)
from .graph_random import HOME, LOST, RandomStates
from .graph_software import memory_of, waits_for_device, written_by
from .graph_tape import LogTape
from .graph_values import freeze, is_constant, is_opaque


@dataclass(frozen=True)
class Problem:
    """Why a step cannot be captured, and where."""

    what: str
    place: Place = None

    def __str__(self) -> str:
        return f"{self.what}\n    {describe_line(self.place)}" if self.place else self.what


@dataclass(frozen=True)
class Operation:
    """One tensor operation: what has to be the same in every step."""

    name: str
    constants: tuple
    shapes: tuple
    place: Place
    sources: tuple = ()  # memory of the tensors that the step did not make, nor get; 0 for others


# Calls whose answers change from step to step, or which would happen only once.
_CHANGES = "is read, and changes while the graph would keep the value of its capture"
_ONCE = "is called, and would be called only once, at the capture"
REMEDY_NUMBER = "Keep the number in a buffer of the module and fill it in `on_train_batch_start`: `self.weight.fill_(...)`."
REMEDY_HOOK = "Move it to `on_train_batch_end`, which gets what `training_step` returns."


def _code(function: Any) -> CodeType:
    return (function.fget if isinstance(function, property) else function).__code__


_PYTHON_CALLS = {
    _code(LightningModule.global_step): f"`global_step` {_CHANGES}. {REMEDY_NUMBER}",
    _code(LightningModule.current_epoch): f"`current_epoch` {_CHANGES}. {REMEDY_NUMBER}",
    _code(Trainer.global_step): f"`trainer.global_step` {_CHANGES}. {REMEDY_NUMBER}",
    _code(Trainer.current_epoch): f"`trainer.current_epoch` {_CHANGES}. {REMEDY_NUMBER}",
    _code(LightningModule.logger): f"`self.logger` is used, and would be used only once. Use `self.log`. {REMEDY_HOOK}",
    _code(LightningModule.loggers): f"`self.loggers` is used, and would be used only once. Use `self.log`. {REMEDY_HOOK}",
    _code(LightningModule.print): f"`self.print` {_ONCE}. {REMEDY_HOOK}",
    _code(LightningModule.log): f"`self.log` of a module in the middle of a graph {_ONCE}. {REMEDY_HOOK}",
    _code(torch.cuda.synchronize): f"`torch.cuda.synchronize` {_ONCE}. Remove it.",
}
_SETS_RANDOM_STATE = (torch.random.set_rng_state, torch.random.manual_seed, torch.cuda.set_rng_state, torch.cuda.manual_seed)
_SETS_RANDOM_STATE = tuple(map(_code, _SETS_RANDOM_STATE))
_RANDOM = torch.Tag.nondeterministic_seeded
_LOST = (
    "{} draws random numbers in the backward pass from a state that a graph cannot go back to, as dropout does in a checkpoint "
    "inside of a re-entrant one. Make the outer one with `use_reentrant=False`."
)
_LEFT = "The backward pass leaves the random state elsewhere. Restore the state that it found, as `torch.random.fork_rng` does."
_CODE = (ModuleType, type, FunctionType, BuiltinFunctionType)  # of what a program is made
_METRICS = torchmetrics.metric.__file__
_METRIC = f"A torchmetrics metric is used, and would be updated only once. {REMEDY_HOOK}"
_OWN = {__name__, RandomStates.__module__}  # which read values on the host themselves
_CLOCKS = (time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns)


def _builtin_problem(function: Any) -> str | None:
    if function is print:
        return f"`print` {_ONCE}. {REMEDY_HOOK}"
    if function in _CLOCKS:
        return f"The time {_CHANGES}. {REMEDY_HOOK}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Tensor) and function.__name__ in ("numpy", "tolist"):
        return f"`Tensor.{function.__name__}` reads values on the host: a graph would keep those of its capture. {REMEDY_HOOK}"
    if isinstance(owner, random.Random) or type(owner).__module__.startswith("numpy.random"):
        return f"A random number of Python or numpy {_CHANGES}. Draw it with torch, on the device of the batch."
    return None


class Watch(TorchDispatchMode):
    """Of one eager micro-batch: its operations, and what a graph could not repeat.

    On CUDA the backward runs in a thread of autograd's, where no calls are seen but those from which tensor operations come:
    there, a function that only returns a number goes unnoticed, as does what it reads.

    Args:
        device: where all is computed.
        inputs: of the program, which it may not write to.

    Attributes:
        problems: found so far.
        operations: of the forward, and of the user's functions in the backward, in their order.
        globals: that the user's code mentions, as tables and names.
        values: of these, and of numbers in closures, in a form to be compared.
        returned: likewise, what the program returned.
        program: where that begins.
        given: for each output that needs a gradient, whether it got one, where that is followed.
        exchanges: where something was exchanged with other ranks.
        names: of all attributes that the program mentions.
        tape: what was logged.
        generators: that random operations drew from, other than the default.
        random: states of the default generator that were saved and set.
    """

    def __init__(self, device: torch.device, inputs: Any) -> None:
        super().__init__()
        self._device = device
        self._inputs = set(map(_memory, tensors_in(inputs)))
        self.problems: list[Problem] = []
        self.operations: list[Operation] = []
        self.names: set[str] = set()
        self.generators: list[torch.Generator] = []
        self.random = RandomStates(torch.cuda if device.type == "cuda" else torch)
        self.tape = LogTape()
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.values: dict[Hashable, Any] = {}
        self.returned: Hashable = None
        self.program: Place = None
        self.given: list[bool] = []
        self.exchanges: Place = None
        self._made: set[int] = set()  # memory
        self._held: list[torch.UntypedStorage] = []  # a graph knows their addresses
        self._codes: dict[CodeType, bool] = {}  # whether it is the user's
        self._set_random: Place = None  # where the backward last set the state of a generator

    def add(self, what: str, place: Place = None) -> None:
        """Note a problem, once for each place."""
        problem = Problem(what, place)
        if problem not in self.problems:
            self.problems.append(problem)

    def add_changes(self, names: list[str]) -> None:
        """Note attributes that the program changed."""
        for name in names:
            self.add(
                f"The step assigns or extends `self.{name}`; replays would not. Write into a buffer: `self.{name}.copy_(...)`.",
                line_of_attribute(name.rpartition(".")[2], self.codes),
            )

    @contextmanager
    def watching(self, module: LightningModule | None, forward: bool) -> Iterator[None]:
        """Around a forward or a backward, whose operations follow from the forward and from what gradients there are."""
        profiler, self._forward = sys.getprofile(), forward
        collecting = gc.isenabled()
        gc.disable()  # callbacks of the garbage collector are no part of the step
        if forward:
            self.random.begin()
        listening = nullcontext() if module is None else self.tape.listen(module, self._log_unwatched)
        with listening, self.random.following(forward, self._note_save), self:
            sys.setprofile(self._on_call)
            try:
                yield
            finally:
                sys.setprofile(None)
                # A `cProfile.Profile`, as of Lightning's AdvancedProfiler, comes back by itself.
                profiler.enable() if hasattr(profiler, "enable") else sys.setprofile(profiler)
                if collecting:
                    gc.enable()
        if self.random.place != HOME:
            self.add(_LEFT, self._set_random)
        for code in self._codes:
            self.names.update(code.co_names)
        self.values.update({key: freeze(table.get(name), self.names) for key, (table, name) in self.globals.items()})

    @property
    def codes(self) -> list[CodeType]:
        """Of the user's that ran."""
        return [code for code, is_users in self._codes.items() if is_users]

    def mentions(self, *names: str) -> bool:
        """Whether the user's code has one of these names."""
        return any(name in code.co_names for code in self.codes for name in names)

    def settings_of_groups(self, optimizer: Optimizer) -> set[str]:
        """Names of settings of an optimizer's groups that the user's code mentions; all, if it does not say which."""
        settings = {name for group in optimizer.param_groups for name in group} - {"params"}
        constants = {value for code in self.codes for value in code.co_consts if isinstance(value, str)}
        found = (settings & constants or settings) if self.mentions("param_groups") else set()
        return found | ({"lr"} if self.mentions("get_last_lr") else set())

    def note_output(self, output: Any, program: Callable[..., Any]) -> Any:
        """What ``program`` returned; gives back what the caller should see of it."""
        self.program = definition(program)
        if any(isinstance(value, WatchedIndex) for value in tree_leaves(output)):
            what = "`batch_idx` is returned, and changes while the graph would keep the value of its capture."
            self.add(f"{what} {REMEDY_HOOK}", self.program)
            output = apply_to_collection(output, WatchedIndex, plain)
        try:
            self.returned = signature(output, "What is returned")
        except UnsupportedBatch as error:
            self.add(str(error), self.program)
        return output

    def follow_gradients(self, output: Any) -> None:
        """Note which tensors of ``output`` the backward that comes has gradients for."""
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        self.given = [False] * len(outputs)
        for number, tensor in enumerate(outputs):
            tensor.register_hook(partial(self._note_gradient, number))

    def _note_gradient(self, number: int, gradient: Tensor) -> None:
        self.given[number] = True

    def _log_unwatched(self, log: Callable[..., None], name: str, value: Any, options: dict[str, Any]) -> None:
        if isinstance(value, torchmetrics.Metric):
            self.add(_METRIC, user_line())
        sys.setprofile(None)
        try:
            with _disable_current_modes():
                log(name, value, **options)
        finally:
            sys.setprofile(self._on_call)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            self._note_code(frame)
            what = _METRIC if code.co_filename == _METRICS else _PYTHON_CALLS.get(code)
            if code in _SETS_RANDOM_STATE:
                if self._forward:
                    what = f"`torch.{code.co_name}` {_ONCE}. {REMEDY_HOOK}"
                else:  # as a checkpoint does
                    self._set_random = user_line(frame.f_back)
            if what is not None:
                self.add(what, user_line(frame.f_back))
        elif event == "c_call" and frame.f_globals.get("__name__") not in _OWN:
            what = _builtin_problem(argument)
            if what is not None and (place := user_line(frame)) is not None and not runs_engine(frame):
                self.add(what, place)

    def _note_code(self, frame: FrameType) -> None:
        if frame.f_code not in self._codes:
            self._codes[frame.f_code] = is_users(frame)
            if is_users(frame) and not is_opaque(frame.f_globals.get("__name__", "")):
                self._note_surroundings(frame)

    def _note_surroundings(self, frame: FrameType) -> None:
        code, tables = frame.f_code, [frame.f_globals]
        for table in tables:
            for name in filter(table.__contains__, code.co_names):
                value = table[name]
                if isinstance(value, ModuleType):
                    inside = [vars(value)] if not is_opaque(value.__name__) else []
                    tables += [t for t in inside if all(t is not known for known in tables)]
                elif not isinstance(value, _CODE) or (isinstance(value, type) and not is_opaque(value.__module__)):
                    self.globals[id(table), name] = table, name
        for name in code.co_freevars:
            value = frame.f_locals.get(name)
            if all(map(is_constant, value if isinstance(value, list | tuple) else [value])):
                self.values[code, name] = freeze(value, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if runs_engine():
            return self._run(func, args, kwargs)
        if not self._forward:
            for frame in user_frames(sys._getframe()):
                self._note_code(frame)
        place = user_line() or ELSEWHERE
        leaves = tree_leaves((args, kwargs))
        tensors = [v for v in leaves if isinstance(v, Tensor)]
        if "c10d" in func.namespace:
            self.exchanges = place
        if waits_for_device(func, args):
            self.add(
                f"{func.overloadpacket} needs a value, or a size that depends on values, on the host: nobody has computed it "
                "when the graph is captured. Keep it on the device (`torch.where` for `if` and for masks; log the tensor).",
                place,
            )
        if any(_memory(t) in self._inputs for t in written_by(func, args, kwargs)):
            self.add("The step writes into its inputs; a replay would write into copies of them.", place)
        self._check_devices(func, tensors, kwargs, place)
        if self.random.place == LOST and _RANDOM in func.tags:
            self.add(_LOST.format(func.overloadpacket), place)
        self.generators += [v for v in leaves if isinstance(v, torch.Generator) and v not in self.generators]
        if self._forward or place is not ELSEWHERE:
            self._note(func, leaves, tensors, place)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        result = func(*args, **kwargs)
        memory = [{_memory(v) for v in tree_leaves(values) if isinstance(v, Tensor)} for values in (result, (args, kwargs))]
        self._made |= memory[0] - memory[1]
        return result

    def _note_save(self) -> None:
        if self._forward:
            self.operations.append(Operation("torch.get_rng_state", (), (), user_line()))

    def _note(self, func: Any, leaves: list, tensors: list[Tensor], place: Place) -> None:
        constants = [v for v in leaves if not isinstance(v, Tensor | torch.Generator)]
        if func.overloadpacket is torch.ops.aten.lift_fresh and tensors[0].numel() <= 64:
            with _disable_current_modes():
                constants += tensors[0].flatten().tolist()  # `torch.tensor(number)`
        shapes = tuple(t.shape for t in tensors)
        given = [] if func.overloadpacket is torch.ops.aten.lift_fresh or not self._forward else tensors
        sources = tuple(0 if memory in self._made or memory in self._inputs else memory for memory in map(_memory, given))
        self._held += [t.untyped_storage() for t, memory in zip(given, sources, strict=True) if memory]
        self.operations.append(Operation(str(func.overloadpacket), tuple(map(plain, constants)), shapes, place, sources))

    def _check_devices(self, func: Any, tensors: list[Tensor], kwargs: dict, place: Place) -> None:
        """Nothing may come from, or go to, another device than that of the graph."""
        if func.overloadpacket is torch.ops.aten.lift_fresh and tensors[0].device.type != "cpu":
            self.add("Python numbers are copied to the device, which ends a capture. Make the tensor once, as a buffer.", place)
            return
        target = kwargs.get("device")
        others = [t for t in tensors if t.device.type != self._device.type]
        if others and (len(others) < len(tensors) or (target is not None and torch.device(target).type == self._device.type)):
            self.add(
                f"{func.overloadpacket} reads a tensor on {others[0].device}, and the graph would keep its value, or wait for "
                f"its copy. Make it on {self._device.type}, or keep it in a buffer of the module.",
                place,
            )
        elif tensors and not others and target is not None and torch.device(target).type != self._device.type:
            self.add(f"{func.overloadpacket} copies a tensor to {target}, which waits for the device. Keep it there.", place)


def _memory(tensor: Tensor) -> int:
    return memory_of(tensor) if tensor.layout is torch.strided else 0


def plain(value: Any) -> Any:
    """Something that equals itself: NaN does not, and objects may not."""
    if isinstance(value, WatchedIndex):
        return int.__int__(value)
    if isinstance(value, torch.ScriptObject):
        return None  # a process group in a new wrapper
    return value if isinstance(value, int | bool | str | None | torch.dtype | torch.device) else repr(value)


class WatchedIndex(int):
    """A ``batch_idx`` that tells when something is computed from it."""

    watch: Watch

    def __new__(cls, value: int, watch: Watch) -> WatchedIndex:  # noqa: D102
        index = super().__new__(cls, value)
        index.watch = watch
        return index


def _tell(name: str) -> Callable[..., Any]:
    def method(self: WatchedIndex, *args: Any) -> Any:
        self.watch.add(f"`batch_idx` {_CHANGES}. {REMEDY_NUMBER}", user_line())
        return getattr(int, name)(self, *args)

    return method


_ARITHMETIC = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod pow neg"
_CONVERSIONS = "eq ne lt le gt ge bool int float index str repr format"
for _name in f"{_ARITHMETIC} {_CONVERSIONS}".split():
    setattr(WatchedIndex, f"__{_name}__", _tell(f"__{_name}__"))
WatchedIndex.__hash__ = int.__hash__  # type: ignore[method-assign]
