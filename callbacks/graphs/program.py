"""`Program`: a step or a module that is run eagerly, captured, compared with a replay, replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import compress, count
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

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
_NO_ENGINE = SimpleNamespace(replaying=nullcontext, capturing=nullcontext)
_REMEDY = (
    "which a replay would not do again. Move it to `on_train_batch_end`, which gets what"
    " `training_step` returns; keep tensors in buffers, and write into these"
    " (`self.name.copy_(...)`); draw random numbers with torch."
)


class Captured:
    """The graphs of a program's forward and backward, for inputs of one signature.

    Attributes:
        given: whether the backward gets a gradient, of each output that requires one.
        sources: the static inputs and parameters that get gradients, by name.
        waiting: autograd's node of the last replay, while its backward is to come.
    """

    def __init__(self, program: Program, given: list[bool], inputs: Any) -> None:
        self.program, self.given, self.waiting = program, given, WeakSet[Any]()
        self._books: Any = _NO_ENGINE if program.engine is None else ReplayedStep(program.engine)
        self._pair = program.fit.graphs.make_pair(program.has_own_pool)
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
        roots = [*compress(requiring(outputs), given)]
        sources = program.sources(self._inputs)
        self._root_grads = [torch.zeros_like(t, requires_grad=False) for t in roots]
        with program.around_backward(), self._capturing(1):
            self._grads = program.differentiate(roots, self._root_grads, sources, keep=False)
        self.sources = {name: sources[name] for name in self._grads}
        state.restore()
        self.output = apply_to_collection(output, Tensor, Tensor.detach)
        program.fit.options.graph_input_nbytes += self._input_nbytes

    @property
    def _input_nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._inputs)

    @contextmanager
    def _capturing(self, part: int) -> Iterator[None]:
        """Capture the forward, 0, or the backward, 1; an error, which ends the run, names it."""
        with self._books.replaying(part):
            try:
                with self._pair[part].capture(), self._books.capturing(part):
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
        with self._books.replaying(part):
            self._pair[part].replay()

    def replay_backward(self, root_grads: Sequence[Tensor]) -> list[Tensor]:
        """Replay the backward; return the gradients that there are."""
        for static, gradient in zip(self._root_grads, root_grads, strict=True):
            static.copy_(gradient)
        self._replay(1)
        return list(self._grads.values())

    def _replay_all(self, before: States, root_grads: list[Tensor]) -> dict[str, Any]:
        """Replay forward and backward from a state; return all results."""
        before.restore()
        self._replay(0)
        values = self._tape.values() | values_in(self.output, "the output")
        with self.program.around_backward():
            self.replay_backward(root_grads)
        return values | self.program.results(self._grads)

    def compare(
        self, before: States, root_grads: list[Tensor], expected: dict[str, Any]
    ) -> str | None:
        """Replay an eager run; return in words the first difference of its results, or None."""
        if [each.shape for each in root_grads] != [each.shape for each in self._root_grads]:
            return "there are other outputs, or outputs of other shapes, that need gradients"
        found = self._replay_all(before, root_grads)
        if self._is_noisy is None:
            again = self._replay_all(before, root_grads)
            self._is_noisy = first_difference(found, again) is not None
        return first_difference(found, expected, noisy=self._is_noisy)

    def reset(self) -> None:
        """Free the graphs. Those of a module whose backward is to come are freed after it."""
        self.program.fit.options.graph_input_nbytes -= self._input_nbytes
        for graph in () if self.program.has_own_pool and self.waiting else self._pair:
            graph.reset()


class _Node(torch.autograd.Function):
    """A replay."""

    @staticmethod
    def forward(ctx: Any, graphs: Captured, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs, graphs.waiting = graphs, WeakSet([ctx])
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
        if ctx not in graphs.waiting:
            # hazard: the memory of what a backward needs has other contents by then.
            raise RuntimeError(
                f"{name}, which is captured, is differentiated twice, or ran again before the"
                " backward of its earlier run. Run one backward after each run."
            )
        if [g is not None for g in compress(grads, graphs.requires_grad)] != graphs.given:
            raise RuntimeError(
                f"{name}: other outputs get gradients now than in its eager runs, as no graph can"
                " give. Run it without one."
            )
        graphs.waiting.clear()
        found = graphs.replay_backward([g for g in grads if g is not None])
        return None, None, *[g.clone() for g in found]


def named(inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of inputs by a name for messages."""
    return {f"input {k}": tensor for k, tensor in enumerate(inputs)}


def requiring(tensors: list[Tensor]) -> list[Tensor]:
    """Return those that require gradients."""
    return [tensor for tensor in tensors if tensor.requires_grad]


def leaves_between(inputs: list[Tensor], outputs: list[Tensor]) -> set[Tensor]:
    """Return the leaves of autograd's graph from ``inputs`` to ``outputs``."""
    seen: set[Any] = {None, *(t.grad_fn for t in inputs)}
    waiting: list[Any] = [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.variable for node in seen if hasattr(node, "variable")}


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
        eager_runs: number of eager runs that are to come, before the capture or since.
        problems: why a step with such inputs cannot be captured; one that comes seldom need not be.
        given: which outputs got gradients, in the last eager run with a backward.
        names: names of what the first eager run returned and logged.
        epoch: of the last run.
    """

    eager_runs: int
    graphs: Captured | None = None
    problems: list[str] = field(default_factory=list)
    given: list[bool] = field(default_factory=list)
    names: Set[str] = frozenset()
    epoch: int = -1


class _Replacement(partial):
    """Takes the place of a method; a copy of the method's owner gets its own method."""

    def __reduce__(self) -> tuple[Any, ...]:
        method = self.__wrapped__  # type: ignore[attr-defined]  # of `functools.wraps`
        return itemgetter(0), ((method,),)  # what makes the copy is the method itself


class Part:
    """A part of the training with graphs of its own: the step, an update, a module.

    During a fit, a :class:`~.runner.Runner`, it replaces a method of an object.

    Attributes:
        eager: the method that was replaced.
        problems: why this rank cannot capture it; empty again once all ranks know.
        is_eager: whether it runs eagerly from now on.
        steps: number of runs; those that are not replayed are eager.
        verified: number of replays that were compared with eager runs.
        recaptures: number of times that its graphs went out of date.
    """

    call: Callable[..., Any]  # takes the place of the method
    drop: Callable[[], None]  # frees the graphs
    remedy = (
        "Keep a number that changes in a buffer of the module and fill it in"
        " `on_train_batch_start`: `self.weight.fill_(...)`."
    )

    def __init__(self, name: str, fit: Any, owner: Any, method: str) -> None:
        self.name, self.fit, self.problems, self.is_eager = name, fit, list[str](), False
        self.steps = self.replays = self.verified = self.recaptures = 0
        self._in_vain = self._replays_before = 0
        self._method, self.eager = method, getattr(owner, method)
        replacement = {method: wraps(self.eager)(_Replacement(self.call))}
        fit.stack.enter_context(replaced(vars(owner), replacement))

    def recapture(self, changes: list[str]) -> None:
        """Free the graphs, which are out of date, on this rank because of ``changes``.

        If the captures do not pay, this is a problem of the ranks that know of changes.
        """
        self.drop()
        paying = _PAYING_REPLAYS * self.fit.options.warmup
        has_paid = self.replays - self._replays_before >= paying
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
    """The graphs of a step or of a module, for all signatures of its inputs.

    Attributes:
        decide: returns the record of some inputs, which says how to run; None: eagerly, and not
            looked at.
        engine: the engine of `zero3`, if the program adds to its gradients.
        has_own_pool: whether other graphs may be replayed between a forward and its backward.
    """

    decide: Callable[[Any], Record | None]
    engine: Any = None
    has_own_pool = False

    def __init__(self, name: str, fit: Any, module: nn.Module, method: str) -> None:
        super().__init__(name, fit, module, method)
        self.module, self.records = module, dict[Hashable, Record]()
        self._fingerprint: Fingerprint | None = None
        self._unverified = 0  # replays since the last comparison

    @property
    def graphs(self) -> list[Captured]:
        """All graphs, of all signatures."""
        return [record.graphs for record in self.records.values() if record.graphs is not None]

    def changes(self) -> list[str]:
        """Return what has changed since the last capture."""
        return [] if self._fingerprint is None else self._fingerprint.changes()

    def drop(self) -> None:
        """Free all graphs."""
        for each in self.graphs:
            each.reset()
        self.records, self._fingerprint = {}, None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the method."""
        self.steps += 1
        is_training = self.fit.trainer.training and torch.is_grad_enabled()
        record = self.decide((args, kwargs)) if is_training and not self.is_eager else None
        return self.eager(*args, **kwargs) if record is None else self.run(record, (args, kwargs))

    def choose(self, key: Hashable) -> Record | None:
        """Do what :meth:`decide` does, for inputs of this signature.

        The first run in each epoch is eager, so a shape that comes once an epoch, such as a ragged
        last batch, is never captured.
        """
        options, epoch = self.fit.options, self.fit.trainer.current_epoch
        record = self.records.get(key)
        if record is None and len(self.records) < MOST_SIGNATURES:
            record = self.records[key] = Record(options.warmup)
        elif record is None and not self.graphs:
            self.problems.append(
                f"{MOST_SIGNATURES} kinds of inputs came, and none of them often. Shapes, numbers"
                " and strings tell them apart: leave out ids and names, and pad to a few lengths."
            )
        is_full = len(self.graphs) >= options.max_graphs
        if record is None or (record.graphs is None and is_full):
            return None
        if record.epoch != epoch:
            record.epoch, record.eager_runs = epoch, max(record.eager_runs, 1)
        if not record.eager_runs:
            self.problems += record.problems
        return record

    def run(self, record: Record, inputs: Any) -> Any:
        """Run the program as was chosen."""
        if record.graphs is not None:
            record.graphs.copy_inputs(inputs)
        if record.eager_runs:
            record.eager_runs -= 1
            return self._run_eagerly(record, inputs)
        if record.graphs is None:
            # The capture is this run in Python, so that what the program counts in Python is what
            # it counts in an eager run.
            record.graphs = Captured(self, record.given, inputs)
            record.eager_runs = self.fit.options.verify
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
        if requiring(tensors_in(inputs)):
            # Containers are made anew: what the program puts into one, its caller would not see.
            inputs = apply_to_collection(inputs, Tensor, _alias)
        args, kwargs = inputs
        tensors, looks = tensors_in(inputs), self._look(inputs)
        with self.fit.graphs.watch(problems), tape.record():
            output = self.eager(*args, **kwargs)
        values, outputs = tape.values() | values_in(output, "the output"), tensors_in(output)
        tape.play()
        after, sources = self.snapshot(), self.sources(tensors)
        given = [True] * len(requiring(outputs)) if graphs is None else graphs.given
        roots, grads = [*compress(requiring(outputs), given)], dict[str, Tensor]()
        # Not all alike, or the gradients of a norm would be zero.
        root_grads = [t.detach().cos() for t in roots]
        try:
            with self.fit.graphs.watch(problems), self.around_backward():
                grads |= self.differentiate(roots, root_grads, sources, True) if roots else {}
        except RuntimeError as error:
            problems.append(
                "Its outputs cannot be differentiated an additional time (a checkpoint needs"
                f" `use_reentrant=False`): {error}"
            )
        now = self._look(inputs)
        changed = [what for what in looks | now if looks.get(what) != now.get(what)]
        problems += [f"It {what}, {_REMEDY}" for what in changed]
        problems += self._find_foreign(tensors, outputs)
        layouts = {tensor.layout for tensor in tensors} - {torch.strided}
        problems += [f"A tensor of the inputs has layout {x}. Pass dense ones." for x in layouts]
        if graphs is None:
            record.names = record.names or values.keys()
            problems += [
                f"{name} is logged or returned in some steps only, {_REMEDY}"
                for name in sorted(record.names ^ values.keys())[:1]
            ]
        else:
            change = graphs.compare(before, root_grads, values | self.results(grads))
            problems += [] if change is None else [self._differs(change)]
            self._unverified = 0
            self.verified += 1
        after.restore()
        # The hook is one of other tensors, as one output may be computed from another.
        output = apply_to_collection(output, Tensor, _alias)
        passes = count(1)

        def note(grads: Sequence[Tensor | None]) -> None:
            record.given = [gradient is not None for gradient in grads]
            if next(passes) > 1:
                problems.append(
                    "It is differentiated twice, and a graph of its backward can be replayed only"
                    " once. Add up the losses, and run one backward."
                )
            if graphs is not None and record.given != given:
                problems.append(self._differs("other outputs get gradients than before"))

        if hooked := requiring(tensors_in(output)):
            torch.autograd.graph.register_multi_grad_hook(hooked, note)
        return output

    def _differs(self, difference: str) -> str:
        return (
            f"An eager run and its replay are not the same: {difference}\n    Since the last"
            f" comparison {self._unverified} runs were replayed."
        )

    def _look(self, inputs: Any) -> dict[str, Any]:
        """Return what a replay leaves as it is, by what changes it."""
        tensors, spots, device = tensors_in(inputs), attributes_of(self.module), self.fit.device
        found: dict[str, Any] = {f"changes `self.{n}`": state_of(get(), device) for n, get in spots}
        found["writes to its inputs"] = signature(inputs, device), [t._version for t in tensors]
        with DisableTorchFunctionSubclass():
            found["writes to parameters"] = [p._version for p in self.module.parameters()]
        return found

    def snapshot(self) -> States:
        """Copy what the program changes in place."""
        return States(tensors_of(self.module), self.engine)

    def results(self, grads: dict[str, Tensor]) -> dict[str, Any]:
        """Return what a run has changed, and gradients that it computed, by name."""
        found = {f"the gradient of {name}": grad.clone() for name, grad in grads.items()}
        return self.snapshot().values | found

    def sources(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        """Return the inputs and the module's parameters that get gradients, by name."""
        found = named(inputs) | dict(self.module.named_parameters())
        return {name: tensor for name, tensor in found.items() if tensor.requires_grad}

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

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Wrap a backward inside of the forward."""
        engine = self.engine
        rehearsed = nullcontext() if engine is None else rehearsed_backward(engine)
        with torch.autocast(self.fit.device.type, enabled=False), rehearsed:
            yield

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


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor
