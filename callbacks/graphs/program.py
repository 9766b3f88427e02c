"""`Program`: a step or a module that is run eagerly, captured, compared with a replay, replayed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .compare import States, first_difference, tensors_in, values_in
from .device import CudaGraphs, Graph, SoftwareGraphs
from .fingerprint import Fingerprint, attributes_of
from .log_tape import LogTape

MOST_SIGNATURES = 200  # signatures of inputs for which records are kept
MOST_IN_VAIN = 5  # captures in a row that went out of date before they paid
_PAYING_REPLAYS = 5  # a capture has paid after so many replays per eager run before it
_REMEDY = (
    "Move it to `on_train_batch_end`, which gets what `training_step` returns; keep tensors in"
    " buffers, and write into these (`self.name.copy_(...)`); draw random numbers with torch."
)


class NotCapturable(Exception):
    """A program cannot be captured with such inputs, or where it runs."""


@dataclass
class Fit:
    """A fit of which something is captured, and how.

    Attributes:
        trainer: its trainer.
        root: the module that it trains.
        graphs: makes the graphs.
        warmup: see `CUDAGraphStep`; so are the others.
    """

    trainer: Trainer
    root: LightningModule
    graphs: CudaGraphs | SoftwareGraphs
    warmup: int
    verify: int
    max_graphs: int
    strict: bool

    @property
    def device(self) -> torch.device:
        """The device of the training."""
        return self.trainer.strategy.root_device

    @property
    def engine(self) -> Any:
        """The engine of `zero3`; None with other strategies."""
        return getattr(self.trainer.strategy, "engine", None)


class _Printed:
    """Standard output that notes what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class EagerRun:
    """Runs a program eagerly, and looks what it did that a replay would not repeat.

    Args:
        fit: the fit.
        module: the module whose state the program may not change.
        problems: gets the reasons why a replay would differ, in words.
        states: copies what the program changes in place; without it nothing is copied.

    Attributes:
        values: all results of the forward, by name.
        before_forward: what ``states`` returned; likewise at the other ends of both passes.
        root_grads: the gradients that the backward began with.
        leaf_grads: what it computed, unless it added that to gradients.
        random_states: what tracks random states that the forward saves, on CUDA.
    """

    before_forward: States
    after_forward: States
    before_backward: States
    after_backward: States

    def __init__(
        self,
        fit: Fit,
        module: nn.Module,
        problems: list[str],
        states: Callable[[], Any] = lambda: None,
    ) -> None:
        self._graphs, self._module, self._problems, self._states = (
            fit.graphs,
            module,
            problems,
            states,
        )
        self._tape = LogTape(fit.root)
        self.values: dict[str, Any] = {}
        self.root_grads: Sequence[Tensor] = ()
        self.leaf_grads: Sequence[Tensor | None] = ()
        self.random_states = fit.graphs.track_random_states()

    def forward(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what ``program`` returns, after what it logs was logged."""
        self._inputs = tensors_in((args, kwargs))
        self.before_forward = self._states()
        tracking = self.random_states
        with (
            self._looking(),
            nullcontext() if tracking is None else tracking.track_calls(),
            self._tape.record(),
        ):
            output = program(*args, **kwargs)
        self.values = self._tape.values() | values_in(output)
        self.after_forward = self._states()
        self._tape.play()
        return output

    def backward(self, program: Callable[[], None]) -> None:
        """Run the backward of the forward's loss."""
        self.before_backward = self._states()
        with self._looking():
            program()
        self.after_backward = self._states()

    def _look(self) -> dict[str, Any]:
        """Return what a replay leaves as it is, by what changes it."""
        found = {f"changes `self.{n}`": s for n, s in attributes_of(self._module).items()}
        found["draws a random number of Python or numpy"] = (
            random.getstate(),
            repr(np.random.get_state()),
        )
        found["writes to its inputs, or to their gradients"] = [
            (t._version, t.is_leaf and t.grad is not None) for t in self._inputs
        ]
        with torch._C.DisableTorchFunctionSubclass():
            versions = [parameter._version for parameter in self._module.parameters()]
        found["writes to parameters"] = versions
        if not isinstance(self._module, LightningModule) and dist.is_initialized():
            # Ranks need not capture a module at the same time.
            group: Any = dist.group.WORLD
            exchanges = group._get_sequence_number_for_group()
            found["exchanges something with other ranks"] = exchanges
        return found

    @contextmanager
    def _looking(self) -> Iterator[None]:
        waits, printed = list[str](), _Printed(sys.stdout)
        before = {"prints": "", **self._look()}
        with contextlib.redirect_stdout(printed), self._graphs.report_waits(waits):
            yield
        after = {"prints": printed.text.strip()[:60], **self._look()}
        for wait in dict.fromkeys(waits):
            self._problems.append(
                f"{wait} needs a value, or a size that depends on values, on the host: nobody has"
                " computed it when the graph is captured. Keep it on the device (`torch.where` for"
                " `if` and for masks; log the tensor)."
            )
        for what in dict.fromkeys([*before, *after]):
            if before.get(what) != after.get(what):
                what += f" {after[what]!r}" if what == "prints" else ""
                self._problems.append(f"It {what}, which a replay would not do again. {_REMEDY}")


class Books:
    """What surrounds each capture and each replay, besides the graphs; see `ReplayedStep`."""

    def begin_forward(self) -> None:
        """Prepare a forward, before it is captured or replayed."""

    def end_forward(self) -> None:
        """Take note that a forward was replayed."""

    def open_backward(self) -> None:
        """Prepare the pass that leads from what became of the loss to the loss."""

    def begin_backward(self, parameters: list[Tensor]) -> None:
        """Prepare a backward, which adds to gradients of ``parameters``."""

    def end_backward(self) -> None:
        """Take note that a backward was replayed."""

    def capture_forward(self) -> AbstractContextManager[None]:
        """Wrap the captured forward, inside of the capture."""
        return nullcontext()

    def capture_backward(self, parameters: list[Tensor]) -> AbstractContextManager[None]:
        """Wrap the captured backward; may reduce ``parameters`` to those that get a gradient."""
        return nullcontext()


class Captured:
    """Two graphs of a program, for inputs of one signature, in memory of their own.

    The forward is captured when the object is made, the backward when it is first repeated, or
    before that.

    Args:
        name: what is captured, for messages.
        pair: the graphs of forward and backward, both empty.
        books: what surrounds captures and replays.
        root: the module whose calls of ``log`` are repeated.
        states: copies what the program changes in place.
        program: the program.
        inputs: its arguments, and those by name.

    Attributes:
        output: what the program returned; replays refill its tensors.
        leaf_grads: what the backward computed, unless it added that to gradients.
    """

    def __init__(
        self,
        name: str,
        pair: tuple[Graph, Graph],
        books: Any,
        root: LightningModule,
        states: Callable[[], States],
        program: Callable[..., Any],
        inputs: Any,
    ) -> None:
        self._name, self._pair, self.books, self._states = name, pair, books, states
        self._tape = LogTape(root)
        self._inputs = apply_to_collection(
            inputs, Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad)
        )
        self._static_inputs = tensors_in(self._inputs)
        self._roots, self._root_grads = list[Tensor](), list[Tensor]()
        self._leaves: list[Tensor] = []
        self.leaf_grads: Sequence[Tensor | None] = ()
        self._is_noisy: bool | None = None  # two replays of the same give other bits
        args, kwargs = self._inputs
        books.begin_forward()
        with (
            naming_failure(f"the forward of {name}"),
            pair[0].capture(),
            books.capture_forward(),
            self._tape.record(),
        ):
            self.output = program(*args, **kwargs)
        outputs = tensors_in(self.output)
        self.requires_grad = [t.requires_grad for t in outputs]
        self._roots, self._leaves = self._choose_ends(outputs)
        self._root_grads = [torch.zeros_like(t, requires_grad=False) for t in self._roots]
        self.output = apply_to_collection(self.output, Tensor, Tensor.detach)

    def _choose_ends(self, outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs that get gradients, and tensors whose gradients are computed."""
        raise NotImplementedError

    @torch.no_grad()
    def copy_inputs(self, inputs: Any) -> None:
        """Copy the values of other inputs, of the same signature, into the static ones."""
        for static, tensor in zip(self._static_inputs, tensors_in(inputs), strict=True):
            static.copy_(tensor, non_blocking=True)

    def repeat_forward(self) -> None:
        """Replay the forward, without its logging."""
        self.books.begin_forward()
        self._pair[0].replay()
        self.books.end_forward()

    def log(self) -> None:
        """Log what the program logs."""
        self._tape.play()

    def repeat_backward(self, root_grads: Sequence[Tensor]) -> None:
        """Replay the backward; the first call captures it."""
        for static, gradient in zip(self._root_grads, root_grads, strict=True):
            static.copy_(gradient)
        self.books.begin_backward(self._leaves)
        if self._roots:
            self.capture_backward()
        self._pair[1].replay()
        self.books.end_backward()

    def capture_backward(self) -> None:
        """Capture the backward of the captured forward."""
        with (
            naming_failure(f"the backward of {self._name}"),
            self._pair[1].capture(),
            self.books.capture_backward(self._leaves),
        ):
            self._differentiate()
        self._roots = []

    def _differentiate(self) -> None:
        torch.autograd.backward(self._roots, self._root_grads)

    def compare(
        self, eager: EagerRun, around_backward: Callable[[], AbstractContextManager] = nullcontext
    ) -> str | None:
        """Replay an eager run that is over; return in words the first difference, or None.

        What the eager run left stays.

        Args:
            eager: the run, whose inputs are the static ones.
            around_backward: returns a context for the replay of the backward.
        """
        end = self._states()

        def replay() -> dict[str, Any]:
            eager.before_forward.restore()
            self.repeat_forward()
            found = self._tape.values() | values_in(self.output)
            after_forward = self._states()
            eager.before_backward.restore()
            with around_backward():
                self.books.open_backward()
                self.repeat_backward(eager.root_grads)
            return all_results(found, after_forward, self._states(), self.leaf_grads)

        found = replay()
        if self._is_noisy is None:
            self._is_noisy = first_difference(found, replay()) is not None
        end.restore()
        theirs = all_results(
            eager.values, eager.after_forward, eager.after_backward, eager.leaf_grads
        )
        return first_difference(found, theirs, noisy=self._is_noisy)

    def reset(self) -> None:
        """Free the graphs."""
        for graph in self._pair:
            graph.reset()

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs."""
        return sum(t.nbytes for t in self._static_inputs)


def all_results(
    values: dict[str, Any],
    after_forward: States,
    after_backward: States,
    leaf_grads: Sequence[Tensor | None],
) -> dict[str, Any]:
    """Return all results of a run in one dict, in the order in which they come about."""
    first = {f"{n}, after the forward,": v for n, v in after_forward.values.items()}
    grads = {f"the gradient of input {k}": g for k, g in enumerate(leaf_grads)}
    return values | first | after_backward.values | grads


@contextmanager
def naming_failure(what: str) -> Iterator[None]:
    """Wrap the capture of ``what``: an error names it.

    Raises:
        RuntimeError: replaces a `RuntimeError` of the body, after which CUDA cannot go on.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"CUDAGraphStep: capturing {what} failed: it does something that no graph can hold and"
            " that eager steps did not show (see the error above). Run without `CUDAGraphStep`, or"
            " choose the modules that are captured, `CUDAGraphStep(modules=...)`."
        ) from error


def leaves_of(*outputs: Tensor) -> list[Tensor]:
    """Return the tensors whose ``grad`` a backward of ``outputs`` can add to."""
    found, seen, waiting = [], set(), [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # torch's `AccumulateGrad`
            found.append(node.variable)
        waiting += [next_node for next_node, _ in node.next_functions]
    return found


def signature(inputs: Any) -> Hashable:
    """Return a key that is equal for inputs which one graph can take.

    Raises:
        NotCapturable: there is a sparse tensor.
    """

    def describe(tensor: Tensor) -> tuple:
        if tensor.layout is not torch.strided:
            raise NotCapturable(
                f"A tensor of the inputs has layout {tensor.layout}. Pass dense ones."
            )
        place = tensor.stride(), tensor.device
        return tensor.shape, tensor.dtype, tensor.requires_grad, place

    # Recurrent layers read `batch_sizes` on the host: a graph would keep the values.
    plain = apply_to_collection(
        inputs, PackedSequence, lambda p: ("packed", p.data, p.batch_sizes.tolist())
    )
    return repr(apply_to_collection(plain, Tensor, describe))


class Run(Enum):
    """How a program is run."""

    PLAIN = auto()  # eagerly; it is not captured for such inputs
    WATCH = auto()  # eagerly, to see whether it may be captured
    CAPTURE = auto()
    VERIFY = auto()  # eagerly, and compared with a replay
    REPLAY = auto()


@dataclass
class Record:
    """The runs with inputs of one signature.

    Attributes:
        graphs: the captured graphs; None before the capture.
        problems: why a step with such inputs cannot be captured; one that comes seldom need not be.
        offsets: see :class:`~.random_states.RandomStates`; of the last eager run.
        given: of a module's last watched run with a backward, which outputs got gradients.
        kind: numbers, and shapes of tensors, that the last eager run returned and logged, by name.
        watched: number of watched runs.
        verified: number of replays that were compared with eager runs.
        epoch: of the last run.
    """

    graphs: Any = None
    problems: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    kind: dict[str, Any] | None = None
    watched: int = 0
    verified: int = 0
    epoch: int = -1


class Part:
    """A part of the training with graphs of its own: the step, an update, a module.

    Args:
        name: what it is called in messages.

    Attributes:
        problems: why this rank cannot capture it; empty again once all ranks know.
        is_eager: whether it runs eagerly from now on.
        replays: number of replays.
    """

    def __init__(self, name: str) -> None:
        self.name, self.problems = name, list[str]()
        self.is_eager, self.replays = False, 0

    @property
    def input_nbytes(self) -> int:
        """Bytes of static inputs."""
        return 0

    def drop(self) -> None:
        """Free the graphs."""

    def stop(self) -> None:
        """Run eagerly from now on."""
        self.is_eager = True
        self.drop()

    def uninstall(self) -> None:
        """Free the graphs and restore what was replaced."""
        self.drop()


class Program(Part):
    """The graphs of a step or of a module for all signatures of its inputs.

    Args:
        name: what it is called in messages.
        fit: the fit.
        module: the module whose method is captured.
        method: its method.

    Attributes:
        module: the module.
        records: the runs by the signature of their inputs.
        warmup: number of eager runs before a capture.
        verified: number of replays that were compared with eager runs.
        recaptures: number of times that the graphs went out of date.
    """

    def __init__(self, name: str, fit: Fit, module: nn.Module, method: str) -> None:
        super().__init__(name)
        self.fit, self.warmup, self.module, self._method = fit, fit.warmup, module, method
        self.records: dict[Hashable, Record] = {}
        self._fingerprint: Fingerprint | None = None
        self.verified = self.recaptures = self._in_vain = self._replays_before = 0

    @property
    def graphs(self) -> list[Any]:
        """All graphs."""
        return [record.graphs for record in self.records.values() if record.graphs is not None]

    def choose(self, key: Hashable) -> tuple[Run, Record]:
        """Return how to run the program with inputs of this signature, and their record.

        The first run in each epoch is eager, so a shape that comes once an epoch, such as a ragged
        last batch, is never captured.
        """
        record, captured, epoch = self.records.get(key), self.graphs, self.fit.trainer.current_epoch
        is_full = len(captured) >= self.fit.max_graphs
        if record is None and len(self.records) >= MOST_SIGNATURES:
            is_full = True
            if not captured:
                self.problems.append(
                    f"{MOST_SIGNATURES} kinds of inputs came, and none of them often. Shapes,"
                    " numbers and strings tell them apart: leave out ids and names, and pad to a"
                    " few lengths."
                )
        if is_full and (record is None or record.graphs is None):
            return Run.PLAIN, Record()
        record = self.records.setdefault(key, Record())
        begins_epoch, record.epoch = record.epoch != epoch, epoch
        if record.graphs is None:
            is_due = begins_epoch or record.watched < self.warmup
            return Run.WATCH if is_due else Run.CAPTURE, record
        if begins_epoch or record.verified < self.fit.verify:
            record.verified += 1
            self.verified += 1
            return Run.VERIFY, record
        return Run.REPLAY, record

    def problems_of(self, record: Record) -> list[str]:
        """Return the list that gets the problems of an eager run."""
        return self.problems

    def states(self) -> States:
        """Copy what the program changes in place."""
        return States(self.module, self.fit.device)

    def run_eagerly(
        self, record: Record, program: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the forward eagerly; return the run and the output."""
        graphs, problems = record.graphs, self.problems_of(record)
        states = [] if graphs is None else [self.states]
        eager = EagerRun(self.fit, self.module, problems, *states)
        output = eager.forward(program, *args, **kwargs)
        if graphs is None:
            record.watched += 1
            if eager.random_states is not None:
                record.offsets = eager.random_states.offsets
            before, record.kind = (
                record.kind,
                {
                    name: f"of shape {list(each.shape)}" if isinstance(each, Tensor) else each
                    for name, each in eager.values.items()
                },
            )
            turns = "in one step", "in the next"
            change = None if before is None else first_difference(before, record.kind, turns)
            if change is not None:
                problems.append(
                    f"What is logged or returned changes from step to step: {change}. {_REMEDY}"
                )
        return eager, output

    def add(self, record: Record, graphs: Captured) -> None:
        """Add the graphs of inputs with this record."""
        record.graphs = graphs
        self._fingerprint = Fingerprint(self.fit.trainer, self.module, self._method)
        if len(self.graphs) == self.fit.max_graphs:
            # No other signature will be captured: free the records of the others.
            self.records = {k: r for k, r in self.records.items() if r.graphs is not None}

    def changes(self) -> list[str]:
        """Return what has changed since the last capture."""
        return [] if self._fingerprint is None else self._fingerprint.changes()

    def drop(self) -> None:
        """Free all graphs."""
        for each in self.graphs:
            each.reset()
        self.records, self._fingerprint = {}, None

    def recapture(self, changes: list[str]) -> None:
        """Free the graphs, which are out of date, on this rank because of ``changes``.

        If the captures do not pay, this is a problem of the ranks that know of changes.
        """
        self.drop()
        has_paid = self.replays - self._replays_before >= _PAYING_REPLAYS * self.warmup
        self._in_vain = 0 if has_paid else self._in_vain + 1
        self.recaptures, self._replays_before = self.recaptures + 1, self.replays
        for change in changes[:1]:
            rank_zero_info(f"CUDAGraphStep: {change} changed; {self.name} is captured again")
            if self._in_vain > MOST_IN_VAIN:
                self.problems.append(
                    f"Its graphs went out of date {self._in_vain} times, each time before they had"
                    f" paid; the last time, {change} changed. Keep a number that changes in a"
                    " buffer of the module and fill it in `on_train_batch_start`:"
                    " `self.weight.fill_(...)`."
                )

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(each.input_nbytes for each in self.graphs)
