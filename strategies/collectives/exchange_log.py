"""What a rank notes of its exchanges, and what is wrong where those of two ranks differ."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from zlib import crc32

import torch
from torch import Tensor

# a parameter's name, of what: an attribute of the `ExchangeLog`, and a checksum
Written = tuple[str, str, int]
# an optimizer's class, the number of a param group, an option and its value
Setting = tuple[str, int, str, float]
ASSIGNED = "gradient that was assigned to parameter "  # how an option begins that is one
CLEARED = "gradients, without that of parameter "  # the same
_NOTES = 10_000  # of what optimizers stepped with; when there are more they become one
_PIECE = 1 << 18  # words of 8 bytes that a checksum multiplies at a time
LOOK_FOR = (
    "All ranks must run the same modules in the same order, load and save together, and take the"
    " same number of steps; look for what one rank does alone, as under `if"
    " trainer.is_global_zero:` (a forward, a load, a save), for loaders of different length, for a"
    " branch or a loop that depends on a rank's own data (where texts end: `generate(...,"
    " synced_gpus=True)`, or a loop of your own in `with strategy.gathered(self):`) or random"
    " numbers (LayerDrop: `DataOptions(distinct_rank_rng=False)` gives all ranks the same; experts"
    " that some ranks alone run belong into one unit, by `unit_policy`), and for a term of the loss"
    " that one rank alone has (multiply it by 0 on the others; of several losses of one forward"
    " differentiate the sum)."
)


class DivergenceError(RuntimeError):
    """Ranks exchange different things: one took another branch, or ran another number of steps."""


class Meeting(enum.IntEnum):
    """Labels of exchanges that concern no unit, and what a rank is about to do there. Not -1: it
    hashes as -2 does.
    """

    description: str

    AGREEMENT = -2, "end its backward pass (or its part in an evaluation step)"
    SUM = -3, "reduce a value over the ranks (a logged value, a norm, an early stop)"
    VALUES = -4, "broadcast or all-gather values"
    OBJECTS = -5, "broadcast or collect Python objects (a path, a plan)"
    BARRIER = -6, "wait for the others at a barrier"
    EVALUATED = -7, "end an evaluation, having no batch left"
    END = -8, "end its training (it has no more batches, or was stopped)"
    GRAPHS = -9, "agree on what is captured and replayed as a CUDA graph"
    GATHERED = (
        -10,
        "enter `strategy.gathered`, which is for all ranks (inside of it one may work alone)",
    )
    GRADIENTS = -11, "let tensors that were assigned to `parameter.grad` follow a change of it"
    BATCH = -12, "end a batch of an evaluation"
    NOTES = (
        -13,
        (
            "compare what all have written (before a save, a state dict, `gathered`, an evaluation"
            " or another run, after training, or before a forward outside of a step, when it has"
            " stored parameters between steps)"
        ),
    )

    def __new__(cls, label: int, description: str) -> Meeting:
        """A member that is its label."""
        member = int.__new__(cls, label)
        member._value_, member.description = label, description
        return member


def first_difference(everyone: Sequence[Sequence[int]], describe: Callable[[int], str]) -> str:
    """Where the exchanges of some rank stop to be rank 0's, in words; empty if they do not.

    Args:
        everyone: labels of each rank's exchanges since the last agreement; one that has done fewer
            says nothing.
        describe: what a label stands for.
    """
    for rank, theirs in enumerate(everyone):
        for number, (a, b) in enumerate(zip(everyone[0], theirs, strict=False)):
            if a != b:
                return (
                    f"The ranks ran different things. At exchange {number} of this step rank 0 came"
                    f" to {describe(a)}, rank {rank} to {describe(b)}. {LOOK_FOR}"
                )
    return ""


def require_same_values(everyone: Sequence[Sequence[Written]]) -> None:
    """Parameters, and gradients that were read, must have got the same values on all ranks.

    Args:
        everyone: what each rank has noted, see :meth:`ExchangeLog.checksums`.

    Raises:
        DivergenceError: naming the first parameter that one rank gave other values, or another
            gradient, than another.
    """
    sets = [set(written) for written in everyone]
    name, what, _ = min(set.union(*sets) - set.intersection(*sets), default=("", "", 0))
    if what == "written":
        raise DivergenceError(
            f"A forward, or an evaluation step, changed parameter {name!r} in place, and not to the"
            " same values on all ranks (as an embedding with `max_norm` does, or an initialisation"
            " from a rank's own data): it has one value. Compute the change from what all ranks"
            " have (`torch.distributed.all_reduce`), or make it between steps, in `with"
            " strategy.gathered(module, modify=True):`, where rank 0's counts (leave `max_norm`"
            " out, and renormalise there)."
        )
    if what == "stored":
        raise DivergenceError(
            f"Parameter {name!r} was stored between steps (`load_state_dict`, `copy_`) on some"
            " ranks only, or with other values on each: it has one value, of which every rank"
            " stored its own part. Do it on all ranks with the same values, or in `with"
            " strategy.gathered(module, modify=True):`, where rank 0's count."
        )
    if what == "gradients":
        raise DivergenceError(
            f"Each rank assigned a gradient of its own to parameter {name!r}, and `parameter.grad`"
            " was read after that: what it gave is put together of all ranks' parts. Assign what"
            " is the same on all ranks: `torch.distributed.all_reduce(g)`, then `p.grad = g`; to"
            " drop a gradient call `zero_grad()`."
        )


def require_same_settings(everyone: Sequence[Sequence[Setting]]) -> None:
    """Optimizers must have the same options on all ranks, each of which steps its part of the
    model.

    Raises:
        DivergenceError: naming the first option that differs, and both values.
    """
    first, *others = map(_numbered, everyone)
    for rank, theirs in enumerate(others, 1):
        for setting in {**first, **theirs}:
            mine, other = first.get(setting), theirs.get(setting)
            if mine == other:
                continue
            optimizer, group, option, _ = setting
            if option.startswith("gradients"):
                raise _other_gradients(setting, mine, other, rank)
            if option.startswith(ASSIGNED):
                raise DivergenceError(
                    f"The {option} is not the same on ranks 0 and {rank}, or one has none: each"
                    " steps its part of the model with its own. `torch.distributed.all_reduce(g)`"
                    " first, and assign what it gives (`p.grad = g`), or compute it on one rank"
                    " and broadcast it (`DataOptions(distinct_rank_rng=False)` for noise)."
                )
            raise DivergenceError(
                f"{option!r} of param group {group} of {optimizer} is {mine} on rank 0 and {other}"
                f" on rank {rank}: each would step its part of the model with its own. Set it from"
                " what all ranks have: a scheduler that looks at a logged value needs"
                " `self.log(..., sync_dist=True)`."
            )


def _other_gradients(
    setting: Setting, mine: float | None, other: float | None, rank: int
) -> DivergenceError:
    optimizer, group, option, _ = setting
    having, lacking = (0, rank) if other is None else (rank, 0)
    if option.startswith(CLEARED):
        found = f"{option} on rank {having}, and with it on rank {lacking}"
    elif None in (mine, other):
        found = f"{option} on rank {having} alone; rank {lacking} did not come to that"
    else:
        found = f"{mine} {option} on rank 0 and {other} on rank {rank}"
    return DivergenceError(
        f"Param group {group} of {optimizer} had {found}. Each rank has a part of every gradient:"
        " step, clear (`zero_grad()`, `p.grad = None`) and assign on all of them alike. What one"
        " rank has computed is left out by a loss that is multiplied by 0 there."
    )


def _numbered(settings: Sequence[Setting]) -> dict[tuple[str, int, str, int], float]:
    """By class of the optimizer, group and option, and which optimizer of this class it is."""
    found: dict[tuple[str, int, str, int], float] = {}
    times: Counter[tuple[str, int, str]] = Counter()
    for *key, value in settings:
        optimizer, group, option = key
        found[optimizer, group, option, times[optimizer, group, option]] = value
        times[optimizer, group, option] += 1
    return found


def checksum(values: Tensor) -> Tensor:
    """An int64 [] that the bits of ``values`` [any shape] and their places decide; in pieces, on
    the device.
    """
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    padded = torch.zeros(-(-flat.nbytes // 8), dtype=torch.int64, device=flat.device)
    padded.view(torch.uint8)[: flat.nbytes].copy_(flat.contiguous().view(torch.uint8))
    # wraps, here and below
    places = torch.arange(1, min(len(padded), _PIECE) + 1, device=flat.device) * 0x1E3779B97F4A7C15
    # Not linear in the place: 1 + 4 are not 2 + 3. Odd: no bit of a word is lost.
    weights = (places ^ (places >> 31)) * 0x3F58476D1CE4E5B9 | 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in padded.split(_PIECE):
        total = fold((piece * weights[: len(piece)]).sum(), total)
    return total


def fold(total: Tensor, before: Tensor | None) -> Tensor:
    """One checksum of both, in this order."""
    return total if before is None else total + before * 0x14CB5EB1  # odd: no bit is lost


def digest(labels: Iterable[int], notes: Sequence[Written | Setting]) -> int:
    """A number of 62 bits that ``labels``, and what is noted with its value, decide, the same in
    every process.
    """
    names, values = repr([note[:-1] for note in notes]), [note[-1] for note in notes]
    # Of numbers, where -1 hashes as -2 does.
    return hash((*labels, crc32(names.encode()), *values, *[value == -2 for value in values])) >> 2


class ExchangeLog:
    """What a rank has exchanged; another thread may look at it.

    Attributes:
        trace: since when (a number that all ranks have then, or -1), then the labels of the
            exchanges since.
        written: names of the parameters that forwards have changed since the last agreement ->
            checksum of each.
        stored: the same of changes between steps. Nothing but an agreement makes them forgotten.
        gradients: the same of gradients that users assigned, and that were read from all ranks'
            parts since.
        describe: what a label stands for, for errors.
        settings: finds what must be alike on all ranks beside.
        stepped: what optimizers have stepped with since the last agreement, and how often.
        found: which gradients there were when the last backward began, which adds to them.
        progress: index of the unit that was asked for last, and exchanges begun.
    """

    def __init__(self) -> None:
        self._agreements = self._resumed = 0
        self.trace = [0]
        self.written: dict[str, Tensor] = {}
        self.stored: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._exchanges: dict[
            tuple[str, bool], int
        ] = {}  # begun when a parameter was written last, in a step or between
        self._latest: dict[tuple[str, bool], Tensor] = {}  # checksum of what was written then
        self.describe: Callable[[int], str] = str
        self.settings: Callable[[], list[Setting]] = list
        self.stepped: list[Setting] = []
        self.found: list[Setting] = []
        self.steps = 0
        self.progress: MutableSequence[int] | memoryview = [-1, 0]

    def wrote(self, name: str, values: Tensor, in_step: bool) -> None:
        """The parameter ``name`` was changed to ``values``, in a step or between two."""
        # What each rank wrote for itself is not forgotten once these values may come from a gather
        # of all ranks' parts. The same value again counts once: a forward that clamps a weight runs
        # more often on a rank with more batches to evaluate. Values that change and come back there
        # do not: ranks that assist gather their own parts as they were.
        sums, place, number = (
            self.written if in_step else self.stored,
            (name, in_step),
            checksum(values),
        )
        before = None if self._exchanges.get(place) == self.progress[1] else sums.get(name)
        total = (
            number
            if before is None
            else torch.where(number == self._latest[place], before, fold(number, before))
        )
        sums[name], self._exchanges[place], self._latest[place] = total, self.progress[1], number

    def read_gradient(self, name: str, assigned: Tensor) -> None:
        """The gradient of the parameter ``name`` was read from all ranks' parts; the checksum of
        what this one ``assigned``.
        """
        self.gradients[name] = fold(assigned, self.gradients.get(name))

    def begin_backward(self, found: list[Setting]) -> None:
        """A backward begins, which will add to the gradients that were ``found``."""
        self.found = [
            (name, group, f"{option} (when a backward began)", value)
            for name, group, option, value in found
        ]

    def step(self, used: list[Setting]) -> None:
        """An optimizer steps, with what it has ``used``, and with the settings of now."""
        number = self.steps = self.steps + 1
        now = [*used, *self.settings()]
        self.stepped += [
            (name, group, f"{option} (in step {number} since the last backward)", v)
            for name, group, option, v in now
        ]
        if len(self.stepped) > _NOTES:  # no backward comes, as with gradients that are assigned
            self.stepped = [
                ("an optimizer", 0, f"a digest of {number} steps", digest((), self.stepped))
            ]

    def all_settings(self) -> list[Setting]:
        """Those of now, and those of steps and of the last backward."""
        return [*self.settings(), *self.stepped, *self.found]

    def checksums(self) -> list[Written]:
        """Of what this rank has written and read, in an order that all ranks have; waits for the
        device.
        """
        noted = {"stored": self.stored, "written": self.written, "gradients": self.gradients}
        names = [(name, what) for what, sums in noted.items() for name in sorted(sums)]
        totals = torch.stack([noted[what][name] for name, what in names]).tolist() if names else []
        return [(name, what, total) for (name, what), total in zip(names, totals, strict=True)]

    def digest(self, written: Sequence[Written]) -> int:
        """A number that the trace, what was ``written`` and the settings decide, 62 bits."""
        return digest(self.trace[1:], [*written, *self.all_settings()])

    def agreed(self) -> None:
        """All ranks have compared what they did so far."""
        self.compared()
        self.found, self.steps = [], 0
        self._agreements, self._resumed = self._agreements + 1, 0
        self.trace[:] = [self._agreements << 16]

    def compared(self) -> None:
        """All ranks have compared what they wrote, read and stepped with so far."""
        self.written, self.stored, self.gradients, self.stepped = {}, {}, {}, []

    def forget(self) -> None:
        """From here on it cannot be told which exchange of this rank belongs to which of
        another.
        """
        self.trace[:] = [-1]

    def resume(self) -> None:
        """From here on it can, if it could not: all ranks begin a step."""
        if self.trace[0] < 0:
            self._resumed += 1
            self.trace[:] = [(self._agreements << 16) + self._resumed]
