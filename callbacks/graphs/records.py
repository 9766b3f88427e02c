"""What was run with inputs of one signature, what comes next, and the graphs of all signatures."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from .compare import first_difference
from .eager_run import REMEDY, EagerRun
from .fingerprint import Fingerprint
from .static_inputs import NotCapturable

MOST_SIGNATURES = 200  # signatures of inputs for which records are kept
MOST_IN_VAIN = 5  # captures in a row that went out of date before they paid
_PAYING_REPLAYS = 5  # a capture has paid after so many replays per eager run before it

TOO_MANY = (
    f"{MOST_SIGNATURES} kinds of inputs came, and none of them often. Shapes, numbers and strings"
    " tell them apart: leave out ids and names, and pad to a few lengths."
)


class Graphs(Protocol):
    """The graphs of one signature."""

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs."""

    def reset(self) -> None:
        """Free the graphs."""


Captured = TypeVar("Captured", bound=Graphs)


class Run(Enum):
    """How a micro-batch or a module is run."""

    WATCH = auto()  # eagerly, to see whether it may be captured
    CAPTURE = auto()
    VERIFY = auto()  # eagerly, and compared with a replay
    REPLAY = auto()


@dataclass(frozen=True)
class Options:
    """Options of `CUDAGraphStep`."""

    warmup: int
    verify: int
    max_graphs: int
    strict: bool


@dataclass
class Record(Generic[Captured]):
    """The runs with inputs of one signature.

    Attributes:
        graphs: the captured graphs; None before the capture.
        problems: why these inputs cannot be captured.
        offsets: see :class:`~.random_states.RandomStates`; of the last eager run.
        eager_runs: number of watched runs.
        verified: number of replays that were compared with eager runs.
        first_batch: number of the micro-batch that was the first to have such inputs.
        given: for each output of a module that needs a gradient, whether it got one.
        last_given: likewise, in the last run; filled by its backward.
    """

    graphs: Captured | None = None
    problems: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    eager_runs: int = 0
    verified: int = 0
    first_batch: int = 0
    given: list[bool] = field(default_factory=list)
    last_given: list[bool] = field(default_factory=list)
    _kind: dict | None = None  # see `EagerRun.kind`; of the last run
    _last_epoch: int = -1  # of the last run that was no replay

    def next_run(self, options: Options, epoch: int) -> Run:
        """Return what to do next.

        The first run in each epoch is eager, so a shape that comes once an epoch, such as a ragged
        last batch, is never captured.
        """
        begins_epoch, self._last_epoch = self._last_epoch != epoch, epoch
        if self.graphs is None:
            is_due = begins_epoch or self.eager_runs < options.warmup
            return Run.WATCH if is_due else Run.CAPTURE
        return Run.VERIFY if begins_epoch or self.verified < options.verify else Run.REPLAY

    def add_run(self, eager: EagerRun) -> None:
        """Add one more watched run, whose forward is over."""
        self.eager_runs += 1
        self.offsets = eager.offsets
        for problem in self.problems:
            eager.add(problem)
        self.problems = eager.problems  # of which the backward may still add some
        kind, self._kind = self._kind, eager.kind
        turns = "in one step", "in the next"
        change = None if kind is None else first_difference(kind, eager.kind, turns)
        if change is not None:
            eager.add(f"What is logged or returned changes from step to step: {change}. {REMEDY}")

    def note_given(self) -> None:
        """Note which outputs of the last run got gradients."""
        if any(self.given) and any(self.last_given) and self.given != self.last_given:
            self.problems.append("Not the same outputs get gradients each time.")
        if not any(self.given):
            self.given = self.last_given


class Captures(Generic[Captured]):
    """The graphs of a step or of a module for all signatures of its inputs.

    Args:
        options: how to capture.

    Attributes:
        records: the runs by the signature of their inputs.
        fingerprint: what the graphs depend on.
        recaptures: number of captures that went out of date.
        in_vain: length of the latest series of these that were replayed too seldom to pay.
        replays: number of replays.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.records: dict[Hashable, Record[Captured]] = {}
        self.fingerprint: Fingerprint | None = None
        self.recaptures = self.in_vain = self.replays = self._replays_before = 0

    def graphs(self) -> list[Captured]:
        """Return all graphs."""
        return [record.graphs for record in self.records.values() if record.graphs is not None]

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(each.input_nbytes for each in self.graphs())

    def find_record(self, key: Hashable, number: int) -> Record[Captured] | None:
        """Return the record of inputs with this signature; None if they run eagerly.

        Args:
            key: the signature.
            number: the number of the micro-batch.

        Raises:
            NotCapturable: too many signatures came without a capture.
        """
        record, captured = self.records.get(key), len(self.graphs())
        if (record is None or record.graphs is None) and captured >= self.options.max_graphs:
            return None
        if record is None and len(self.records) >= MOST_SIGNATURES:
            if not captured:
                raise NotCapturable(TOO_MANY)
            return None
        return self.records.setdefault(key, Record(first_batch=number))

    def add(self, record: Record[Captured], graphs: Captured, fingerprint: Fingerprint) -> None:
        """Add the graphs of inputs with this record."""
        record.graphs, self.fingerprint = graphs, fingerprint
        if len(self.graphs()) == self.options.max_graphs:
            # No other signature will be captured: free the records of the others.
            self.records = {k: r for k, r in self.records.items() if r.graphs is not None}

    def changes(self) -> list[str]:
        """Return what has changed since the last capture."""
        return [] if self.fingerprint is None else self.fingerprint.changes()

    def drop(self) -> None:
        """Free all graphs."""
        for each in self.graphs():
            each.reset()
        self.records, self.fingerprint = {}, None

    def drop_stale(self) -> bool:
        """Free all graphs, as they are out of date; return whether other captures may pay."""
        self.drop()
        has_paid = self.replays - self._replays_before >= _PAYING_REPLAYS * self.options.warmup
        self.in_vain = 0 if has_paid else self.in_vain + 1
        self.recaptures, self._replays_before = self.recaptures + 1, self.replays
        return self.in_vain <= MOST_IN_VAIN
