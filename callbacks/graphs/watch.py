"""Watches eager training steps for what a graph could not repeat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torchmetrics.metric
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ...strategies.support import without_collection
from .device import report_waits
from .frozen_values import freeze, is_opaque, random_state
from .log_tape import LogTape
from .python_effects import (
    METRIC,
    RANDOM,
    REMEDY_HOOK,
    WatchedIndex,
    builtin_problem,
    call_problem,
    plain,
)
from .random_states import HOME, LOST, RandomStates
from .software_graph import CaptureError, memory_of, waits_for_device, written_by
from .source_lines import (
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
from .static_inputs import UnsupportedBatch, signature, tensors_in


@dataclass(frozen=True)
class Problem:
    """The reason why a step cannot be captured, and its place."""

    what: str
    place: Place = None

    def __str__(self) -> str:
        return f"{self.what}\n    {describe_line(self.place)}" if self.place else self.what


@dataclass(frozen=True)
class Operation:
    """One tensor operation, as far as it must be the same in every step."""

    name: str
    constants: tuple
    shapes: tuple
    place: Place
    # For each tensor argument its storage, or 0 for tensors that the step made or got.
    sources: tuple = ()


_RANDOM = torch.Tag.nondeterministic_seeded
_LOST = (
    "{} draws random numbers in the backward pass from a state that a graph cannot go back to, as"
    " dropout does in a checkpoint inside of a re-entrant one. Make the outer one with"
    " `use_reentrant=False`."
)
_LEFT = (
    "The backward pass leaves the random state elsewhere. Restore the state that it found, as"
    " `torch.random.fork_rng` does."
)
_LOOKS = (
    "{} needs a value, or a size that depends on values, on the host: nobody has computed it when"
    " the graph is captured. Keep it on the device (`torch.where` for `if` and for masks; log the"
    " tensor; `torch.linalg.inv_ex`, `solve_ex` and `cholesky_ex` do not look at whether they"
    " succeeded)."
)
_CODE = (ModuleType, type, FunctionType, BuiltinFunctionType)  # globals that are code, not data
_OWN = {__name__, RandomStates.__module__}  # modules that read values on the host themselves


class Watch(TorchDispatchMode):
    """Notes the operations of one eager micro-batch, and all that a graph could not repeat.

    On CUDA the backward runs in a thread of autograd, in which only calls that lead to tensor
    operations are seen. There a function that only returns a number goes unnoticed, and so do the
    values that it reads.

    Args:
        device: the device of the training.
        inputs: inputs of the program, which it may not write to.

    Attributes:
        problems: problems found so far.
        operations: operations of the forward, and of the user's functions in the backward, in their
            order.
        globals: globals that the user's code mentions, as tables and names.
        values: the values of these, and of numbers in closures, in a form that can be compared.
        returned: likewise, the program's return value.
        program: the line where the program begins.
        given: for each output that needs a gradient, whether it got one; empty unless tracked.
        exchanges: a line that exchanged something with other ranks.
        names: names of all attributes that the program mentions.
        tape: the calls of ``self.log``.
        generators: generators of the device, besides the default one, that operations drew from.
        random: tracks which states of the default generator were saved and set.
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
        self._made: set[int] = set()  # storages that the step made
        # Storages on the host that operations of the device returned.
        self._of_device: set[int] = set()
        self._free: dict[Hashable, Any] = {}  # values in closures, by code and name
        self._local: set[Hashable] = set()  # keys of those closures that each step makes anew
        self._logging = self._capturing = False
        # Keeps memory alive that the step reads, because a graph would read the same addresses.
        self._held: list[Tensor] = []
        self._codes: dict[CodeType, bool] = {}  # all code that ran, and whether it is the user's

    def add(self, what: str, place: Place = None) -> None:
        """Add a problem, unless it is known for this place."""
        problem = Problem(what, place)
        if problem not in self.problems:
            self.problems.append(problem)

    def add_changes(self, names: list[str]) -> None:
        """Add a problem for each of these attributes, which the program changed."""
        for name in names:
            self.add(
                f"The step assigns or extends `self.{name}`; replays would not. Write into a"
                f" buffer: `self.{name}.copy_(...)`.",
                line_of_attribute(name.rpartition(".")[2], self.codes),
            )

    @contextmanager
    def watching(
        self, module: LightningModule | None, forward: bool, capturing: bool = False
    ) -> Iterator[None]:
        """Wrap a forward or a backward, and watch it.

        The operations of a backward follow from those of its forward and from which gradients there
        are.

        Args:
            module: the module whose calls of ``log`` are noted.
            forward: whether the body is a forward, otherwise a backward.
            capturing: whether a graph captures the body. An operation that the graph cannot repeat
                must not run then.

        Raises:
            CaptureError: with ``capturing``, before an operation runs, when there are problems.
        """
        profiler, self._forward, self._capturing = sys.getprofile(), forward, capturing
        if forward:
            self.random.note_start()
        listening = (
            nullcontext() if module is None else self.tape.listen(module, self._log_unwatched)
        )
        eager_on_cuda = self._device.type == "cuda" and not capturing
        waits = report_waits(self._note_wait) if eager_on_cuda else nullcontext()
        drawn = random_state(np.random)
        # hazard: finalizers that the garbage collector calls would count as a part of the step.
        with (
            without_collection(),
            listening,
            waits,
            self.random.track_calls(forward, self._note_save),
            self,
        ):
            sys.setprofile(self._on_call)
            try:
                yield
            finally:
                sys.setprofile(None)
                # A `cProfile.Profile`, as of Lightning's `AdvancedProfiler`, enables itself;
                # other profilers are functions.
                profiler.enable() if hasattr(profiler, "enable") else sys.setprofile(profiler)
        if self.random.position != HOME:
            self.add(_LEFT, self.random.set_line)
        # `sys.setprofile` does not show calls of numpy's functions, which are written in Cython.
        if random_state(np.random) != drawn:
            self.add(RANDOM, line_of_attribute("random", self.codes))
        for code in self._codes:
            self.names.update(code.co_names)
        if self.mentions("getattr", "hasattr", "vars", "__dict__"):
            self.names |= self._texts()
        self.values.update(
            {
                key: freeze(table.get(name), self.names)
                for key, (table, name) in self.globals.items()
            }
        )
        outer = {key: value for key, value in self._free.items() if key not in self._local}
        self.values.update({key: freeze(value, self.names) for key, value in outer.items()})

    @property
    def sources(self) -> set[int]:
        """Storages that the program read, and neither made nor got."""
        return {memory for operation in self.operations for memory in operation.sources} - {0}

    @property
    def codes(self) -> list[CodeType]:
        """The user's code that ran."""
        return [code for code, is_users in self._codes.items() if is_users]

    def mentions(self, *names: str) -> bool:
        """Return whether the user's code mentions one of these names."""
        return any(name in code.co_names for code in self.codes for name in names)

    def _texts(self) -> set[str]:
        constants = (value for code in self.codes for value in code.co_consts)
        return {
            v
            for value in constants
            for v in (value if isinstance(value, tuple) else [value])
            if isinstance(v, str)
        }

    def settings_of_groups(self, optimizer: Optimizer) -> set[str]:
        """Return the names of settings of the optimizer's groups that the user's code mentions.

        These are all settings if the code reads ``param_groups`` and no text in it names one.
        """
        settings = {name for group in optimizer.param_groups for name in group} - {"params"}
        found = (settings & self._texts() or settings) if self.mentions("param_groups") else set()
        return found | ({"lr"} if self.mentions("get_last_lr") else set())

    def note_output(self, output: Any, program: Callable[..., Any]) -> Any:
        """Check ``output``, which ``program`` returned, and return it without watched indices."""
        self.program = definition(program)
        if any(isinstance(value, WatchedIndex) for value in tree_leaves(output)):
            what = (
                "`batch_idx` is returned, and changes while the graph would keep the value of its"
                " capture."
            )
            self.add(f"{what} {REMEDY_HOOK}", self.program)
            output = apply_to_collection(output, WatchedIndex, plain)
        if foreign := [
            t for t in tensors_in(output) if self._is_foreign(t) and _memory(t) not in self._inputs
        ]:
            what = (
                f"A tensor on {foreign[0].device} is returned, and a graph would go on with that of"
                " its capture."
            )
            self.add(
                f"{what} Make it on {self._device.type}, or in `on_train_batch_end`.", self.program
            )
        try:
            self.returned = signature(output, "What is returned")
        except UnsupportedBatch as error:
            self.add(str(error), self.program)
        return output

    def follow_gradients(self, output: Any) -> None:
        """Note in the coming backward which tensors of ``output`` get gradients."""
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        self.given = [False] * len(outputs)
        for number, tensor in enumerate(outputs):
            tensor.register_hook(partial(self._note_gradient, number))

    def _note_gradient(self, number: int, gradient: Tensor) -> None:
        self.given[number] = True

    def _log_unwatched(
        self, log: Callable[..., None], name: str, value: Any, options: dict[str, Any]
    ) -> None:
        if isinstance(value, torchmetrics.Metric):
            self.add(METRIC, user_line())
        if isinstance(value, Tensor) and self._is_foreign(value):
            what = (
                f"`self.log({name!r}, ...)` gets a tensor on {value.device}, and a graph would log"
                " that of its capture."
            )
            self.add(
                f"{what} Make it on {self._device.type}, or log a Python number that stays the"
                " same.",
                user_line(),
            )
        sys.setprofile(None)
        self._logging = True
        try:
            with _disable_current_modes():
                log(name, value, **options)
        finally:
            self._logging = False
            sys.setprofile(self._on_call)

    def _note_wait(self, frame: FrameType | None) -> None:
        """Add a problem: the host waits for the device in an operation that looks harmless."""
        place = user_line(frame) or ELSEWHERE
        if (
            self._logging
            or runs_engine(frame)
            or any(problem.place == place for problem in self.problems)
        ):
            return
        self.add(
            "The host waits for the device here, which ends a capture. Keep values on the device.",
            place,
        )

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._note_code(frame)
            what = call_problem(frame.f_code, self._forward)
            if what is not None:
                self.add(what, user_line(frame.f_back))
        elif event == "c_call" and frame.f_globals.get("__name__") not in _OWN:
            what = builtin_problem(argument)
            if (
                what is not None
                and (place := user_line(frame)) is not None
                and not runs_engine(frame)
            ):
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
                elif not isinstance(value, _CODE) or (
                    isinstance(value, type) and not is_opaque(value.__module__)
                ):
                    self.globals[id(table), name] = table, name
        for inner in _codes_in(code):
            self._local |= {(inner, name) for name in code.co_cellvars if name in inner.co_freevars}
        if code.co_freevars:
            held = {
                name: value for name, value in frame.f_locals.items() if name in code.co_freevars
            }
            self._free |= {
                (code, name): value for name, value in held.items() if not _is_module(value)
            }

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
        self._check(func, args, kwargs, place)
        self._check_devices(func, tensors, kwargs, place)
        generators = [
            v
            for v in leaves
            if isinstance(v, torch.Generator) and v.device.type == self._device.type
        ]
        self.generators += [v for v in generators if v not in self.generators]
        if self._forward or place is not ELSEWHERE:
            self._note(func, leaves, tensors, place)
        if self._capturing and self.problems:
            raise CaptureError(str(self.problems[0]))
        result = self._run(func, args, kwargs)
        drawn = (
            [v for v in tree_leaves(result) if isinstance(v, Tensor)]
            if _RANDOM in func.tags
            else []
        )
        # The seed of attention's dropout is on the host, beside results on the device.
        if drawn and all(map(self._is_foreign, drawn)):
            what = f"{func.overloadpacket} draws random numbers on the host, and replays would not."
            self.add(f"{what} Draw them on {self._device.type}.", place)
        return result

    def _check(self, func: Any, args: tuple, kwargs: dict, place: Place) -> None:
        """Add problems of an operation that do not depend on the devices of its tensors."""
        if waits_for_device(func, args):
            self.add(_LOOKS.format(func.overloadpacket), place)
        written = written_by(func, args, kwargs)
        if any(_memory(t) in self._inputs for t in written):
            self.add(
                "The step writes into its inputs; a replay would write into copies of them.", place
            )
        if foreign := [t for t in written if self._is_foreign(t) and _memory(t) not in self._made]:
            what = (
                f"{func.overloadpacket} writes to a tensor on {foreign[0].device}, and replays"
                " would not."
            )
            self.add(f"{what} Keep it on {self._device.type}, in a buffer of the module.", place)
        if self.random.position == LOST and _RANDOM in func.tags:
            self.add(_LOST.format(func.overloadpacket), place)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        result = func(*args, **kwargs)
        given, got = (
            [v for v in tree_leaves(values) if isinstance(v, Tensor)]
            for values in ((args, kwargs), result)
        )
        self._made |= set(map(_memory, got)) - set(map(_memory, given))
        if not all(map(self._is_foreign, given)):
            # Attention's seeds are on the host in an eager step, and on the device in a capture.
            self._of_device |= {_memory(t) for t in got if self._is_foreign(t)}
        return result

    def _is_foreign(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._device.type

    def _note_save(self) -> None:
        if self._forward:
            self.operations.append(Operation("torch.get_rng_state", (), (), user_line()))

    def _note(self, func: Any, leaves: list, tensors: list[Tensor], place: Place) -> None:
        constants = [v for v in leaves if not isinstance(v, Tensor | torch.Generator)]
        if func.overloadpacket is torch.ops.aten.lift_fresh and tensors[0].numel() <= 64:
            with _disable_current_modes():
                constants += tensors[0].flatten().tolist()  # `torch.tensor(number)`
        shapes = tuple(t.shape for t in tensors)
        given = (
            [] if func.overloadpacket is torch.ops.aten.lift_fresh or not self._forward else tensors
        )
        sources = tuple(
            0 if memory in self._made or memory in self._inputs else memory
            for memory in map(_memory, given)
        )
        self._held += [t.detach() for t, memory in zip(given, sources, strict=True) if memory]
        self.operations.append(
            Operation(
                str(func.overloadpacket), tuple(map(plain, constants)), shapes, place, sources
            )
        )

    def _check_devices(self, func: Any, tensors: list[Tensor], kwargs: dict, place: Place) -> None:
        """Add problems of an operation that reads from, or copies to, another device."""
        if func.overloadpacket is torch.ops.aten.lift_fresh and tensors[0].device.type != "cpu":
            self.add(
                "Python numbers are copied to the device, which ends a capture. Make the tensor"
                " once, as a buffer.",
                place,
            )
            return
        target = kwargs.get("device")
        others = [t for t in tensors if self._is_foreign(t) and _memory(t) not in self._of_device]
        if others and (
            len(others) < len(tensors)
            or (target is not None and torch.device(target).type == self._device.type)
        ):
            self.add(
                f"{func.overloadpacket} reads a tensor on {others[0].device}, and the graph would"
                f" keep its value, or wait for its copy. Make it on {self._device.type}, or keep it"
                " in a buffer of the module.",
                place,
            )
        elif (
            tensors
            and not others
            and target is not None
            and torch.device(target).type != self._device.type
        ):
            self.add(
                f"{func.overloadpacket} copies a tensor to {target}, which waits for the device."
                " Keep it there.",
                place,
            )


def _memory(tensor: Tensor) -> int:
    return memory_of(tensor) if tensor.layout is torch.strided else 0


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of all functions that are written inside of ``code``."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes_in(inner)


def _is_module(value: Any) -> bool:
    """Return whether ``value`` is a module or a class of modules, which a `Guard` looks at."""
    return isinstance(value, nn.Module) or (
        isinstance(value, type) and issubclass(value, nn.Module)
    )
