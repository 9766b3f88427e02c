"""`Program`: a step or a module that is run eagerly, captured, compared with a replay, replayed."""

from __future__ import annotations

import io
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from ...strategies.engine import ReplayedStep, rehearsed_backward
from .compare import LogTape, States, first_difference, tensors_in, values_in
from .device import CudaGraphs, SoftwareGraphs
from .fingerprint import Fingerprint, attributes_of

MOST_SIGNATURES = 200  # signatures of inputs for which records are kept
MOST_IN_VAIN = 5  # captures in a row that went out of date before they paid
_PAYING_REPLAYS = 5  # a capture has paid after so many replays per eager run before it
_REMEDY = (
    "Move it to `on_train_batch_end`, which gets what `training_step` returns; keep tensors in"
    " buffers, and write into these (`self.name.copy_(...)`); draw random numbers with torch."
)
_CHANGING = (
    "Keep a number that changes in a buffer of the module and fill it in `on_train_batch_start`:"
    " `self.weight.fill_(...)`."
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


class NoBooks:
    """Takes the place of `ReplayedStep`, which keeps an engine's books, where there is none."""

    def begin(self, *_: Any) -> None:
        """Nothing to do."""

    def capture(self, *_: Any) -> AbstractContextManager[None]:
        """Wrap what is captured."""
        return nullcontext()

    begin_forward = end_forward = open_backward = begin_backward = end_backward = begin
    capture_forward = capture_backward = capture


class Captured:
    """Two graphs of a program, for inputs of one signature, in memory of their own.

    Args:
        program: the program.
        record: the runs with such inputs.
        inputs: the arguments, and those by name.

    Attributes:
        given: for each output, whether the backward gets a gradient of it.
        user: autograd's node of the last replay, until it has died.
    """

    user: weakref.ref[Any] | None = None

    def __init__(self, program: Program, record: Record, inputs: Any) -> None:
        self.program, self.given, engine = program, record.given, program.engine
        self._books: Any = NoBooks() if engine is None else ReplayedStep(engine)
        self._pair = program.fit.graphs.make_pair(record.offsets, program.has_own_pool)
        self._tape = LogTape(program.fit.root)
        self._inputs = apply_to_collection(
            inputs, Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad)
        )
        self._static_inputs = tensors_in(self._inputs)
        self._leaf_grads: dict[str, Tensor | None] = {}
        self._is_noisy: bool | None = None  # two replays of the same give other bits
        args, kwargs = self._inputs
        # hazard: the graph would always read casts of an earlier run, made of this step's weights;
        # a later run would find the graph's.
        torch.clear_autocast_cache()
        self._books.begin_forward()
        with (
            naming_failure(f"the forward of {program.name}"),
            self._pair[0].capture(),
            self._books.capture_forward(),
            self._tape.record(),
        ):
            self.output = program.eager(*args, **kwargs)
        torch.clear_autocast_cache()
        outputs = tensors_in(self.output)
        self.requires_grad = [t.requires_grad for t in outputs]
        self._roots = [t for t, is_given in zip(outputs, self.given, strict=True) if is_given]
        self._root_grads = [torch.zeros_like(t, requires_grad=False) for t in self._roots]
        self.output = apply_to_collection(self.output, Tensor, Tensor.detach)
        state = program.snapshot()
        self._repeat(self._root_grads)  # captures the backward
        state.restore()

    @torch.no_grad()
    def copy_inputs(self, inputs: Any) -> None:
        """Copy the values of other inputs, of the same signature, into the static ones."""
        for static, tensor in zip(self._static_inputs, tensors_in(inputs), strict=True):
            static.copy_(tensor, non_blocking=True)

    def replay(self, inputs: Any) -> Any:
        """Replay the forward and its logging; return the output, in memory of its own."""
        self._repeat_forward()
        self._tape.play()
        real = self.program.sources(inputs)
        sources = [real[name] for name, grad in self._leaf_grads.items() if grad is not None]
        # With `zero3` a step's gradients are none of autograd's: one input makes the node needed.
        anchor = torch.zeros((), requires_grad=True)
        results = iter(_Node.apply(self, anchor, *sources))
        return apply_to_collection(self.output, Tensor, lambda _: next(results))

    def _repeat_forward(self) -> None:
        self._books.begin_forward()
        self._pair[0].replay()
        self._books.end_forward()

    def repeat_backward(self, root_grads: Sequence[Tensor]) -> list[Tensor]:
        """Replay the backward, which the first call captures; return gradients that there are."""
        self._books.open_backward()
        for static, gradient in zip(self._root_grads, root_grads, strict=True):
            static.copy_(gradient)
        self._books.begin_backward([])
        if self._roots:
            with (
                naming_failure(f"the backward of {self.program.name}"),
                self._pair[1].capture(),
                self._books.capture_backward([]),
            ):
                sources = self.program.sources(self._inputs)
                self._leaf_grads = self.program.differentiate(
                    self._roots, self._root_grads, sources, keep=False
                )
            self._roots = []
        self._pair[1].replay()
        self._books.end_backward()
        return [grad for grad in self._leaf_grads.values() if grad is not None]

    def _repeat(self, root_grads: Sequence[Tensor]) -> dict[str, Any]:
        """Replay all; return all results."""
        self._repeat_forward()
        values = self._tape.values() | values_in(self.output, "the output")
        with self.program.around_backward():
            self.repeat_backward(root_grads)
        return values | self.program.results(self._leaf_grads)

    def compare(
        self, before: States, root_grads: Sequence[Tensor], expected: dict[str, Any]
    ) -> str | None:
        """Replay an eager run; return in words the first difference, or None.

        Args:
            before: the state before that run.
            root_grads: the gradients that its backward began with.
            expected: its results.
        """
        before.restore()
        found = self._repeat(root_grads)
        if self._is_noisy is None:
            before.restore()
            self._is_noisy = first_difference(found, self._repeat(root_grads)) is not None
        return first_difference(found, expected, noisy=self._is_noisy)

    @property
    def is_busy(self) -> bool:
        """Whether the backward of a module's replay still needs the graphs' memory."""
        user = None if self.user is None else self.user()
        return self.program.has_own_pool and user is not None and not user.is_over

    def reset(self) -> None:
        """Free the graphs, unless a backward still needs them; autograd's node frees those."""
        for graph in () if self.is_busy else self._pair:
            graph.reset()

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs."""
        return sum(t.nbytes for t in self._static_inputs)


class _Node(torch.autograd.Function):
    """A replay."""

    @staticmethod
    def forward(ctx: Any, graphs: Captured, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs, ctx.is_over, graphs.user = graphs, False, weakref.ref(ctx)
        outputs = [t.clone() for t in tensors_in(graphs.output)]
        pairs = zip(outputs, graphs.requires_grad, strict=True)
        ctx.mark_non_differentiable(*[t for t, needed in pairs if not needed])
        ctx.set_materialize_grads(False)
        # Autograd compares the versions of saved tensors.
        ctx.save_for_backward(*[t for t in sources if t.is_leaf])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        graphs, name = ctx.graphs, ctx.graphs.program.name
        _ = ctx.saved_tensors  # raises if a weight was written since the forward
        if graphs.user() is not ctx:
            raise RuntimeError(
                f"{name}, which is captured, ran again before a second backward of its earlier"
                " run. Run backward first."
            )
        if [g is not None for g in grads] != graphs.given:
            raise RuntimeError(
                f"{name}: other outputs get gradients now than in its eager runs. Leave it out of"
                " `CUDAGraphStep(modules=...)`."
            )
        ctx.is_over = True
        found = graphs.repeat_backward([g for g in grads if g is not None])
        return None, None, *[g.clone() for g in found]


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
        offsets: see :func:`~.random_states.note_offsets`; of the last watched run.
        given: which outputs got gradients, in the last eager run with a backward.
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
        paying: number of replays after which a capture has paid.
        remedy: what to do if its graphs go out of date again and again.

    Attributes:
        problems: why this rank cannot capture it; empty again once all ranks know.
        is_eager: whether it runs eagerly from now on.
        replays: number of replays.
        recaptures: number of times that its graphs went out of date.
    """

    def __init__(self, name: str, paying: int = 1, remedy: str = _CHANGING) -> None:
        self.name, self.problems = name, list[str]()
        self.is_eager, self.replays, self.recaptures = False, 0, 0
        self._paying, self._remedy = paying, remedy
        self._in_vain = self._replays_before = 0

    @property
    def graphs(self) -> list[Captured]:
        """All graphs of programs."""
        return []

    def drop(self) -> None:
        """Free the graphs."""

    def stop(self) -> None:
        """Run eagerly from now on."""
        self.is_eager = True
        self.drop()

    def uninstall(self) -> None:
        """Free the graphs and restore what was replaced."""
        self.drop()

    def recapture(self, changes: list[str]) -> None:
        """Free the graphs, which are out of date, on this rank because of ``changes``.

        If the captures do not pay, this is a problem of the ranks that know of changes.
        """
        self.drop()
        has_paid = self.replays - self._replays_before >= self._paying
        self._in_vain = 0 if has_paid else self._in_vain + 1
        self.recaptures, self._replays_before = self.recaptures + 1, self.replays
        for change in changes[:1]:
            rank_zero_info(f"CUDAGraphStep: {change} changed; {self.name} is captured again")
            if self._in_vain > MOST_IN_VAIN:
                self.problems.append(
                    f"Its graphs went out of date {self._in_vain} times, each time before they had"
                    f" paid; the last time, {change} changed. {self._remedy}"
                )


class Program(Part):
    """The graphs of a step or of a module for all signatures of its inputs.

    It replaces a method, during a fit.

    Args:
        name: what it is called in messages.
        fit: the fit.
        module: the module that is captured.
        method: the name of the method that is replaced.
        owner: the object whose method it is; by default the module.

    Attributes:
        module: the module.
        eager: the method that was replaced.
        records: the runs by the signature of their inputs.
        verified: number of replays that were compared with eager runs.
        has_own_pool: whether other graphs may be replayed between a forward and its backward.
    """

    has_own_pool = False

    def __init__(
        self, name: str, fit: Fit, module: nn.Module, method: str, owner: Any = None
    ) -> None:
        super().__init__(name, _PAYING_REPLAYS * fit.warmup)
        self.fit, self.module, self._method = fit, module, method
        self._owner = module if owner is None else owner
        self._own, self.eager = vars(self._owner).get(method), getattr(self._owner, method)
        vars(self._owner)[method] = wraps(self.eager)(partial(self.call))
        self.records: dict[Hashable, Record] = {}
        self._fingerprint: Fingerprint | None = None
        self.verified = self._unverified = 0  # since the last comparison

    def uninstall(self) -> None:
        """Free the graphs and restore the method."""
        del vars(self._owner)[self._method]
        if self._own is not None:
            vars(self._owner)[self._method] = self._own
        self.drop()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the method."""
        raise NotImplementedError

    @property
    def engine(self) -> Any:
        """The engine of `zero3`, if the program adds to its gradients."""
        return None

    @property
    def graphs(self) -> list[Captured]:
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
            # The backward of the last run may be still to come, or there was none.
            is_known = record.watched >= self.fit.warmup and (any(record.given) or record.problems)
            if begins_epoch or not is_known:
                return Run.WATCH, record
            self.problems += record.problems
            return Run.CAPTURE, record
        if begins_epoch or record.verified < self.fit.verify:
            record.verified += 1
            self.verified += 1
            return Run.VERIFY, record
        return Run.REPLAY, record

    def sources(self, inputs: Any) -> dict[str, Tensor]:
        """Return the inputs and parameters that get gradients, by name."""
        found = {f"input {k}": tensor for k, tensor in enumerate(tensors_in(inputs))}
        found |= self.module.named_parameters()
        return {name: tensor for name, tensor in found.items() if tensor.requires_grad}

    def differentiate(
        self, roots: list[Tensor], grads: list[Tensor], sources: dict[str, Tensor], keep: bool
    ) -> dict[str, Tensor | None]:
        """Return gradients of ``sources``, by name, or add them to the engine's.

        Raises:
            RuntimeError: autograd refuses, or a hook of a parameter would run twice.
        """
        if self.engine is not None:
            torch.autograd.backward(roots, grads, retain_graph=keep)
            return {}
        for name, source in sources.items():
            if source._backward_hooks:
                raise RuntimeError(f"{name} has a hook, which would run twice.")
        found = torch.autograd.grad(
            roots, list(sources.values()), grads, retain_graph=keep, allow_unused=True
        )
        return dict(zip(sources, found, strict=True))

    def around_backward(self) -> AbstractContextManager[Any]:
        """Return a context for a backward inside of the forward."""
        if self.engine is not None:
            return rehearsed_backward(self.engine)
        return torch.autocast(self.fit.device.type, enabled=False)

    def snapshot(self) -> States:
        """Copy what the program changes in place."""
        return States(self.module, self.engine)

    def results(self, grads: dict[str, Tensor | None]) -> dict[str, Any]:
        """Return what a run has changed, and gradients that it computed, by name."""
        found = {f"the gradient of {n}": g if g is None else g.clone() for n, g in grads.items()}
        return self.snapshot().values | found

    def run(self, run: Run, record: Record, inputs: Any) -> Any:
        """Run the program as was chosen."""
        if record.graphs is not None:
            record.graphs.copy_inputs(inputs)
        if run in (Run.WATCH, Run.VERIFY):
            return self._run_eagerly(record, inputs)
        if record.graphs is None:
            # The capture is this run in Python, so that what the program counts in Python is what
            # it counts in an eager run.
            record.graphs = Captured(self, record, inputs)
            self._fingerprint = Fingerprint(self.fit.trainer, self.module, self._method)
        self.replays += 1
        self._unverified += 1
        return record.graphs.replay(inputs)

    def _run_eagerly(self, record: Record, inputs: Any) -> Any:
        """Run eagerly, and look what a replay would leave undone, or compare one.

        The outputs are differentiated once more, by gradients that are made up, as those of the
        loss are not there yet.
        """
        graphs, tape = record.graphs, LogTape(self.fit.root)
        problems = record.problems if graphs is None else self.problems
        args, kwargs = apply_to_collection(inputs, Tensor, _alias)
        sources, before = self.sources((args, kwargs)), self.snapshot()
        offsets = record.offsets if graphs is None else []
        with self._looking(problems, inputs, offsets), tape.record():
            output = self.eager(*args, **kwargs)
        values, outputs = tape.values() | values_in(output, "the output"), tensors_in(output)
        tape.play()
        after = self.snapshot()
        given = [t.requires_grad for t in outputs] if graphs is None else graphs.given
        roots = [t for t, is_given in zip(outputs, given, strict=False) if is_given]
        # Not all alike, or the gradients of a norm would be zero.
        root_grads = [t.detach().cos() for t in roots]
        grads: dict[str, Tensor | None] = {}
        try:
            with self._looking(problems, inputs, []), self.around_backward():
                grads |= self.differentiate(roots, root_grads, sources, True) if roots else {}
        except RuntimeError as error:
            problems.append(
                "Its outputs cannot be differentiated an additional time (a checkpoint needs"
                f" `use_reentrant=False`): {error}"
            )
        problems += self._find_foreign(outputs, sources)
        if graphs is None:
            record.watched += 1
            last, record.kind = record.kind, {n: _kind(value) for n, value in values.items()}
            turns = "in one step", "in the next"
            change = None if last is None else first_difference(last, record.kind, turns)
            if change is not None:
                problems.append(
                    f"What is logged or returned changes from step to step: {change}. {_REMEDY}"
                )
        else:
            change = graphs.compare(before, root_grads, values | self.results(grads))
            if change is not None:
                problems.append(self._differs(change))
            self._unverified = 0
        after.restore()
        seen = [False] * len(outputs)

        def note(k: int, gradient: Tensor | None) -> None:
            if gradient is None:  # as of `DistributedDataParallel`
                return
            seen[k], record.given = True, seen
            if graphs is not None and not given[k]:
                problems.append(self._differs("other outputs get gradients than before"))

        # The hooks are those of other tensors, as one output may be computed from another.
        output = apply_to_collection(output, Tensor, _alias)
        for k, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(partial(note, k))
        return output

    def _differs(self, difference: str) -> str:
        return (
            f"An eager run and its replay are not the same: {difference}\n    Since the last"
            f" comparison {self._unverified} runs were replayed."
        )

    def _find_foreign(self, outputs: list[Tensor], sources: dict[str, Tensor]) -> list[str]:
        """Return what is wrong with parameters, other than ``sources``, that outputs depend on."""
        optimizers = self.fit.trainer.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        names = {p: "a tensor of the optimizer" for group in groups for p in group["params"]}
        names |= {parameter: name for name, parameter in self.fit.root.named_parameters()}
        leaves = set(_leaves_between(sources.values(), outputs)).difference(sources.values())
        return [
            f"It computes with {names[leaf]}, which is none of its parameters: its gradient would"
            " be lost. Pass it to `forward`, or capture a module that has both."
            for leaf in leaves.intersection(names)
        ]

    def _look(self, inputs: Any) -> dict[str, Any]:
        """Return what a replay leaves as it is, by what changes it."""
        found = {f"changes `self.{n}`": s for n, s in attributes_of(self.module).items()}
        found["writes to its inputs"] = [(t._version, t.requires_grad) for t in tensors_in(inputs)]
        with torch._C.DisableTorchFunctionSubclass():
            found["writes to parameters"] = [p._version for p in self.module.parameters()]
        return found

    @contextmanager
    def _looking(self, problems: list[str], inputs: Any, offsets: list[int]) -> Iterator[None]:
        waits, printed, before = list[str](), io.StringIO(), self._look(inputs)
        try:
            with redirect_stdout(printed), self.fit.graphs.watch(waits, offsets):
                yield
        finally:
            text = printed.getvalue()
            sys.stdout.write(text)
        after = self._look(inputs)
        if text:
            after[f"prints {text.strip()[:60]!r}"] = text
        for wait in dict.fromkeys(waits):
            problems.append(
                f"{wait} needs a value, or a size that depends on values, on the host: nobody has"
                " computed it when the graph is captured. Keep it on the device (`torch.where` for"
                " `if` and for masks; log the tensor)."
            )
        for what in dict.fromkeys([*before, *after]):
            if before.get(what) != after.get(what):
                problems.append(f"It {what}, which a replay would not do again. {_REMEDY}")

    def changes(self) -> list[str]:
        """Return what has changed since the last capture."""
        return [] if self._fingerprint is None else self._fingerprint.changes()

    def drop(self) -> None:
        """Free all graphs."""
        for each in self.graphs:
            each.reset()
        self.records, self._fingerprint = {}, None


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _kind(value: Any) -> Any:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else value


def _leaves_between(inputs: Iterable[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Return the leaves of autograd's graph from ``inputs`` to ``outputs``."""
    found, seen = [], {None, *(t.grad_fn for t in inputs)}
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # torch's `AccumulateGrad`
            found.append(node.variable)
        waiting += [next_node for next_node, _ in node.next_functions]
    return found
