"""`Program`: a step or a module that is run eagerly, captured, compared with a replay, replayed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import PackedSequence

from ...strategies.graph_replay import ReplayedStep, rehearsed_backward
from ...strategies.support import DisableTorchFunctionSubclass
from .compare import LogTape, States, first_difference, replaced, tensors_in, values_in
from .fingerprint import Fingerprint, attributes_of, state_of, tensors_of, value_of

MOST_SIGNATURES = 200  # signatures of inputs for which records are kept
MOST_IN_VAIN = 5  # captures in a row that went out of date before they paid
_PAYING_REPLAYS = 5  # a capture has paid after so many replays per eager run before it
_REMEDY = (
    "which a replay would not do again. Move it to `on_train_batch_end`, which gets what"
    " `training_step` returns; keep tensors in buffers, and write into these"
    " (`self.name.copy_(...)`); draw random numbers with torch."
)
_CHANGING = (
    "Keep a number that changes in a buffer of the module and fill it in `on_train_batch_start`:"
    " `self.weight.fill_(...)`."
)


class Captured:
    """Two graphs of a program, for inputs of one signature, in memory of their own.

    Attributes:
        given: for each output, whether the backward gets a gradient of it.
        sources: the static inputs and parameters that get gradients, by name.
        user: autograd's node of the last replay, until it has died.
    """

    user: weakref.ref[Any] | None = None

    def __init__(self, program: Program, record: Record, inputs: Any) -> None:
        self.program, self.given = program, record.given
        engine, graphs = program.engine, program.fit.graphs
        books = None if engine is None else ReplayedStep(engine)
        self._in_replay: Any = nullcontext if books is None else books.replaying
        self._in_capture: Any = nullcontext if books is None else books.capturing
        self._pair = graphs.make_pair(program.has_own_pool)
        self._tape = LogTape(program.fit.root)
        self._is_noisy: bool | None = None  # two replays of the same give other bits
        args, kwargs = static = apply_to_collection(
            inputs, Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad)
        )
        self._inputs = tensors_in(static)
        # hazard: the graph would always read casts of an earlier run, made of this step's weights;
        # a later run would find the graph's.
        torch.clear_autocast_cache()
        with self._capturing(0), self._tape.record():
            output = program.eager(*args, **kwargs)
        torch.clear_autocast_cache()
        outputs, state = tensors_in(output), program.snapshot()
        self.requires_grad = [t.requires_grad for t in outputs]
        roots = [t for t, is_given in zip(outputs, self.given, strict=True) if is_given]
        self._root_grads = [torch.zeros_like(t, requires_grad=False) for t in roots]
        sources = program.sources(self._inputs)
        with program.around_backward(), self._capturing(1):
            self._grads = program.differentiate(roots, self._root_grads, sources, keep=False)
        self.sources = {name: sources[name] for name in self._grads}
        state.restore()
        self.output = apply_to_collection(output, Tensor, Tensor.detach)

    @contextmanager
    def _capturing(self, part: int) -> Iterator[None]:
        """Capture the forward, 0, or the backward, 1; an error, which ends the run, names it."""
        with self._in_replay(part):
            try:
                with self._pair[part].capture(), self._in_capture(part):
                    yield
            except RuntimeError as error:
                raise RuntimeError(
                    f"CUDAGraphStep: capturing the {('forward', 'backward')[part]} of"
                    f" {self.program.name} failed: it does something that no graph can hold and"
                    " that eager steps did not show (see the error above). Run it without a graph:"
                    " capture other modules, `CUDAGraphStep(modules=...)`, or nothing."
                ) from error

    @torch.no_grad()
    def copy_inputs(self, inputs: Any) -> None:
        """Copy the values of other inputs, of the same signature, into the static ones."""
        for static, tensor in zip(self._inputs, tensors_in(inputs), strict=True):
            static.copy_(tensor, non_blocking=True)

    def replay(self, inputs: Any) -> Any:
        """Replay the forward and its logging; return the output, in memory of its own."""
        self._replay(0)
        self._tape.play()
        real = self.sources | named(tensors_in(inputs))
        # With `zero3` a step's gradients are none of autograd's: one input makes the node needed.
        anchor = torch.zeros((), requires_grad=True)
        results = iter(_Node.apply(self, anchor, *[real[name] for name in self._grads]))
        return apply_to_collection(self.output, Tensor, lambda _: next(results))

    def _replay(self, part: int) -> None:
        with self._in_replay(part):
            self._pair[part].replay()

    def replay_backward(self, root_grads: Sequence[Tensor]) -> list[Tensor]:
        """Replay the backward; return the gradients that there are."""
        for static, gradient in zip(self._root_grads, root_grads, strict=True):
            static.copy_(gradient)
        self._replay(1)
        return list(self._grads.values())

    def _replay_all(self, root_grads: Sequence[Tensor]) -> dict[str, Any]:
        """Replay forward and backward; return all results."""
        self._replay(0)
        values = self._tape.values() | values_in(self.output, "the output")
        with self.program.around_backward():
            self.replay_backward(root_grads)
        return values | self.program.results(self._grads)

    def compare(
        self, before: States, root_grads: Sequence[Tensor], expected: dict[str, Any]
    ) -> str | None:
        """Replay an eager run from the state before it; return in words the first difference of
        its results, or None.
        """
        if [each.shape for each in root_grads] != [each.shape for each in self._root_grads]:
            return "there are other outputs, or outputs of other shapes, that need gradients"
        before.restore()
        found = self._replay_all(root_grads)
        if self._is_noisy is None:
            before.restore()
            self._is_noisy = first_difference(found, self._replay_all(root_grads)) is not None
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
        return sum(t.nbytes for t in self._inputs)


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
        if ctx.is_over or graphs.user() is not ctx:
            # hazard: the memory of what a backward needs has other contents by then.
            raise RuntimeError(
                f"{name}, which is captured, is differentiated twice, or ran again before the"
                " backward of its earlier run. Run one backward after each run."
            )
        if [g is not None for g in grads] != graphs.given:
            raise RuntimeError(
                f"{name}: other outputs get gradients now than in its eager runs, as no graph can"
                " give. Run it without one."
            )
        ctx.is_over = True
        found = graphs.replay_backward([g for g in grads if g is not None])
        return None, None, *[g.clone() for g in found]


def named(inputs: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of inputs by a name for messages."""
    return {f"input {k}": tensor for k, tensor in enumerate(inputs)}


def signature(inputs: Any, device: torch.device) -> Hashable:
    """Return a key that is equal for inputs which one graph on ``device`` can take."""

    def describe(tensor: Tensor) -> tuple:
        place = tensor.layout is torch.strided and tensor.stride(), tensor.device
        kept = value_of(tensor, device)
        return tensor.shape, tensor.dtype, tensor.requires_grad, place, kept

    # Recurrent layers read `batch_sizes` on the host: a graph would keep the values.
    plain = apply_to_collection(
        inputs, PackedSequence, lambda p: ("packed", p.data, p.batch_sizes.tolist())
    )
    return repr(apply_to_collection(plain, Tensor, describe))


@dataclass
class Record:
    """The runs with inputs of one signature.

    Attributes:
        graphs: the captured graphs; None before the capture.
        is_replay: whether the current run is a replay, after a capture if need be; it is an eager
            run that is looked at, otherwise.
        looked: number of the latter before the capture, or since.
        problems: why a step with such inputs cannot be captured; one that comes seldom need not be.
        given: which outputs got gradients, in the last eager run with a backward.
        names: names of what the first eager run returned and logged.
        epoch: of the last run.
    """

    graphs: Captured | None = None
    is_replay: bool = False
    looked: int = 0
    problems: list[str] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    names: Set[str] = frozenset()
    epoch: int = -1


class _Replacement(partial):
    """Takes the place of a method; a copy of the method's owner gets its own method."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.__wrapped__,)  # type: ignore[attr-defined]  # of `functools.wraps`


def _itself(value: Any) -> Any:
    return value


class Part:
    """A part of the training with graphs of its own: the step, an update, a module.

    It replaces a method of an object during a fit.

    Attributes:
        name: what it is called in messages.
        fit: the :class:`~.runner.Runner`.
        paying: number of replays after which a capture has paid.
        remedy: what to do if its graphs go out of date again and again.
        eager: the method that was replaced.
        problems: why this rank cannot capture it; empty again once all ranks know.
        is_eager: whether it runs eagerly from now on.
        records: the runs of a program, by the signature of their inputs.
        steps: number of runs; those that are not replayed are eager.
        replays: number of replays.
        verified: number of replays that were compared with eager runs.
        recaptures: number of times that its graphs went out of date.
    """

    call: Callable[..., Any]  # takes the place of the method
    drop: Callable[[], None]  # frees the graphs
    paying, remedy = 1, _CHANGING

    def __init__(self, name: str, fit: Any, owner: Any, method: str) -> None:
        self.name, self.fit, self.problems = name, fit, list[str]()
        self.is_eager = False
        self.steps = self.replays = self.verified = self.recaptures = 0
        self.records: dict[Hashable, Record] = {}
        self._in_vain = self._replays_before = 0
        self._owner, self._method, self.eager = owner, method, getattr(owner, method)
        replacement = {method: wraps(self.eager)(_Replacement(self.call))}
        fit.stack.enter_context(replaced(vars(owner), replacement))

    @property
    def graphs(self) -> list[Captured]:
        """All graphs of a program."""
        return [record.graphs for record in self.records.values() if record.graphs is not None]

    def recapture(self, changes: list[str]) -> None:
        """Free the graphs, which are out of date, on this rank because of ``changes``.

        If the captures do not pay, this is a problem of the ranks that know of changes.
        """
        self.drop()
        has_paid = self.replays - self._replays_before >= self.paying
        self._in_vain = 0 if has_paid else self._in_vain + 1
        self.recaptures, self._replays_before = self.recaptures + 1, self.replays
        for change in changes[:1]:
            rank_zero_info(f"CUDAGraphStep: {change} changed; {self.name} is captured again")
            if self._in_vain > MOST_IN_VAIN:
                self.problems.append(
                    f"Its graphs went out of date {self._in_vain} times, each time before they had"
                    f" paid; the last time, {change} changed. {self.remedy}"
                )


class Program(Part):
    """The graphs of a step or of a module for all signatures of its inputs.

    Attributes:
        module: the module that is captured.
        engine: the engine of `zero3`, if the program adds to its gradients.
        has_own_pool: whether other graphs may be replayed between a forward and its backward.
        decide: returns the record of some inputs, which says how to run; None: eagerly, and not
            looked at.
    """

    decide: Callable[[Any], Record | None]
    engine: Any = None
    has_own_pool = False

    def __init__(self, name: str, fit: Any, module: nn.Module, method: str) -> None:
        super().__init__(name, fit, module, method)
        self.module, self.paying = module, _PAYING_REPLAYS * fit.options.warmup
        self._fingerprint: Fingerprint | None = None
        self._unverified = 0  # replays since the last comparison

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the method."""
        self.steps += 1
        is_training = self.fit.trainer.training and torch.is_grad_enabled()
        needed = is_training and not self.is_eager
        record = self.decide((args, kwargs)) if needed else None
        return self.eager(*args, **kwargs) if record is None else self.run(record, (args, kwargs))

    def choose(self, key: Hashable) -> Record | None:
        """Do what :meth:`decide` does, for inputs of this signature.

        The first run in each epoch is eager, so a shape that comes once an epoch, such as a ragged
        last batch, is never captured.
        """
        options, captured, epoch = self.fit.options, self.graphs, self.fit.trainer.current_epoch
        record = self.records.get(key)
        if record is None or record.graphs is None:
            is_beyond = record is None and len(self.records) >= MOST_SIGNATURES
            if is_beyond and not captured:
                self.problems.append(
                    f"{MOST_SIGNATURES} kinds of inputs came, and none of them often. Shapes,"
                    " numbers and strings tell them apart: leave out ids and names, and pad to a"
                    " few lengths."
                )
            if is_beyond or len(captured) >= options.max_graphs:
                return None
        record = self.records.setdefault(key, Record())
        begins_epoch, record.epoch = record.epoch != epoch, epoch
        most = options.warmup if record.graphs is None else options.verify
        record.is_replay = record.looked >= most and not begins_epoch
        if record.is_replay:
            self.problems += record.problems
        return record

    def sources(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        """Return the inputs and the module's parameters that get gradients, by name."""
        found = named(inputs) | dict(self.module.named_parameters())
        return {name: tensor for name, tensor in found.items() if tensor.requires_grad}

    def differentiate(
        self, roots: list[Tensor], grads: list[Tensor], sources: dict[str, Tensor], keep: bool
    ) -> dict[str, Tensor]:
        """Return the gradients of ``sources`` that there are, by name, or add to the engine's.

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
        return {n: grad for n, grad in zip(sources, found, strict=True) if grad is not None}

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Wrap a backward inside of the forward."""
        engine = self.engine
        rehearsed = nullcontext() if engine is None else rehearsed_backward(engine)
        with torch.autocast(self.fit.device.type, enabled=False), rehearsed:
            yield

    def snapshot(self) -> States:
        """Copy what the program changes in place."""
        return States(tensors_of(self.module), self.engine)

    def results(self, grads: dict[str, Tensor]) -> dict[str, Any]:
        """Return what a run has changed, and gradients that it computed, by name."""
        found = {f"the gradient of {name}": grad.clone() for name, grad in grads.items()}
        return self.snapshot().values | found

    def run(self, record: Record, inputs: Any) -> Any:
        """Run the program as was chosen."""
        if record.graphs is not None:
            record.graphs.copy_inputs(inputs)
        if not record.is_replay:
            return self._run_eagerly(record, inputs)
        if record.graphs is None:
            # The capture is this run in Python, so that what the program counts in Python is what
            # it counts in an eager run.
            record.graphs, record.looked = Captured(self, record, inputs), 0
            self._fingerprint = Fingerprint(self.fit.trainer, self.module, self._method)
        self.replays += 1
        self._unverified += 1
        return record.graphs.replay(inputs)

    def _run_eagerly(self, record: Record, inputs: Any) -> Any:
        """Run eagerly, and look what a replay would leave undone, or compare one.

        The outputs are differentiated once more, by gradients that are made up, as those of the
        loss are not there yet.
        """
        graphs, tape, before = record.graphs, LogTape(self.fit.root), self.snapshot()
        problems = record.problems if graphs is None else self.problems
        record.looked += 1
        if any(tensor.requires_grad for tensor in tensors_in(inputs)):
            # Containers are made anew: what the program puts into one, its caller would not see.
            inputs = apply_to_collection(inputs, Tensor, _alias)
        args, kwargs = inputs
        tensors, looks = tensors_in(inputs), self._look(inputs)
        with self.fit.graphs.watch(problems), tape.record():
            output = self.eager(*args, **kwargs)
        values, outputs = tape.values() | values_in(output, "the output"), tensors_in(output)
        tape.play()
        after, sources = self.snapshot(), self.sources(tensors)
        given = [t.requires_grad for t in outputs] if graphs is None else graphs.given
        roots = [t for t, is_given in zip(outputs, given, strict=False) if is_given]
        # Not all alike, or the gradients of a norm would be zero.
        root_grads = [t.detach().cos() for t in roots]
        grads = dict[str, Tensor]()
        try:
            with self.fit.graphs.watch(problems), self.around_backward():
                grads |= self.differentiate(roots, root_grads, sources, True) if roots else {}
        except RuntimeError as error:
            problems.append(
                "Its outputs cannot be differentiated an additional time (a checkpoint needs"
                f" `use_reentrant=False`): {error}"
            )
        now = self._look(inputs)
        for what in looks | now:
            if looks.get(what) != now.get(what):
                problems.append(f"It {what}, {_REMEDY}")
        problems += [
            f"A tensor of the inputs has layout {tensor.layout}. Pass dense ones."
            for tensor in tensors
            if tensor.layout is not torch.strided
        ]
        problems += self._find_foreign(tensors, outputs)
        if graphs is None:
            record.names = record.names or values.keys()
            problems += [
                f"{name} is logged or returned in some steps only, {_REMEDY}"
                for name in sorted(record.names ^ values.keys())[:1]
            ]
        else:
            change = graphs.compare(before, root_grads, values | self.results(grads))
            if change is not None:
                problems.append(self._differs(change))
            self._unverified = 0
            self.verified += 1
        after.restore()
        # The hook is one of other tensors, as one output may be computed from another.
        output = apply_to_collection(output, Tensor, _alias)
        needing = [t.requires_grad for t in tensors_in(output)]
        passes = list[None]()

        def note(grads: Sequence[Tensor | None]) -> None:
            now = iter(grads)
            record.given = [is_needing and next(now) is not None for is_needing in needing]
            passes.append(None)
            if len(passes) > 1:
                problems.append(
                    "It is differentiated twice, and a graph of its backward can be replayed only"
                    " once. Add up the losses, and run one backward."
                )
            if graphs is not None and record.given != given:
                problems.append(self._differs("other outputs get gradients than before"))

        if any(needing):
            tensors = [t for t in tensors_in(output) if t.requires_grad]
            torch.autograd.graph.register_multi_grad_hook(tensors, note)
        return output

    def _differs(self, difference: str) -> str:
        return (
            f"An eager run and its replay are not the same: {difference}\n    Since the last"
            f" comparison {self._unverified} runs were replayed."
        )

    def _find_foreign(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[str]:
        """Return what is wrong with parameters of others that ``outputs`` depend on."""
        groups = [group for each in self.fit.trainer.optimizers for group in each.param_groups]
        names = {p: "a tensor of the optimizer" for group in groups for p in group["params"]}
        names |= {parameter: name for name, parameter in self.fit.root.named_parameters()}
        foreign = leaves_between(inputs, outputs).difference(self.module.parameters())
        return [
            f"It computes with {names[leaf]}, which is none of its parameters: its gradient would"
            " be lost. Pass it to `forward`, or capture a module that has both."
            for leaf in foreign.intersection(names)
        ]

    def _look(self, inputs: Any) -> dict[str, Any]:
        """Return what a replay leaves as it is, by what changes it."""
        tensors, spots, device = tensors_in(inputs), attributes_of(self.module), self.fit.device
        found: dict[str, Any] = {f"changes `self.{n}`": state_of(get(), device) for n, get in spots}
        found["writes to its inputs"] = signature(inputs, device), [t._version for t in tensors]
        with DisableTorchFunctionSubclass():
            found["writes to parameters"] = [p._version for p in self.module.parameters()]
        return found

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


def leaves_between(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves of autograd's graph from ``inputs`` to ``outputs``."""
    seen: set[Any] = {None, *(t.grad_fn for t in inputs)}
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}
