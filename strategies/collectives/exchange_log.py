"""The log that each rank keeps of its exchanges, and the errors where two ranks' logs differ."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from zlib import crc32

import torch
from torch import Tensor

# a parameter's name; "written", "stored" or "assigned"; the checksum of the values
NamedChecksum = tuple[str, str, int]
# an optimizer's class, the number of a param group, an option and its value
Setting = tuple[str, int, str, float]
# an option that begins so counts the gradients of a group that lacks one
CLEARED = "gradients, without that of parameter "
_MAX_STEP_SETTINGS = 10_000  # a longer list of step settings is replaced by its digest
_CHUNK_WORDS = 1 << 18  # words of 8 bytes that a checksum multiplies at a time
LOOK_FOR = (
    "\nAll ranks must run the same modules in the same order, load and save together, and take the"
    " same number of steps. Look for what one rank does alone (`strategy.gathered` is for that),"
    " loaders of different length, and branches on a rank's own data or random numbers"
    " (docs/GUIDE.md, Diverging ranks)."
)


class DivergenceError(RuntimeError):
    """Ranks exchange different things: one took another branch, or ran another number of steps."""


class Meeting(enum.IntEnum):
    """Labels of exchanges that concern no unit, with what a rank is about to do in each.

    No label is -1, because Python's ``hash(-1)`` equals ``hash(-2)``.
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
        """Make the member, an int that equals its label."""
        member = int.__new__(cls, label)
        member._value_, member.description = label, description
        return member


def first_difference(everyone: Sequence[Sequence[int]], describe: Callable[[int], str]) -> str:
    """Describe the first exchange in which some rank differs from rank 0; empty if none does.

    Args:
        everyone: labels of each rank's exchanges since the last agreement. A rank with fewer labels
            does not differ by that: it may be late.
        describe: returns in words what a label stands for.
    """
    for rank, labels in enumerate(everyone):
        for number, (expected, label) in enumerate(zip(everyone[0], labels, strict=False)):
            if expected != label:
                return (
                    f"The ranks ran different things. At exchange {number} of this step rank 0 came"
                    f" to {describe(expected)}, rank {rank} to {describe(label)}.{LOOK_FOR}"
                )
    return ""


def require_same_values(everyone: Sequence[Sequence[NamedChecksum]]) -> None:
    """Require that all ranks wrote the same values to parameters, and to their gradients.

    Args:
        everyone: of each rank, what its :meth:`ExchangeLog.checksums` returned.

    Raises:
        DivergenceError: two ranks gave a parameter different values or gradients; the error names
            the first such parameter.
    """
    sets = [set(checksums) for checksums in everyone]
    name, kind, _ = min(sets[0].union(*sets) - sets[0].intersection(*sets), default=("", "", 0))
    if kind == "written":
        raise DivergenceError(
            f"A forward, or an evaluation step, changed parameter {name!r} in place, and not to the"
            " same values on all ranks (as an embedding with `max_norm` does).\nCompute the change"
            " from what all ranks have (`torch.distributed.all_reduce`), or make it between steps,"
            " in `with strategy.gathered(module, modify=True):`, where rank 0's counts."
        )
    if kind == "stored":
        raise DivergenceError(
            f"Parameter {name!r} was stored between steps (`load_state_dict`, `copy_`) on some"
            " ranks only, or with other values on each.\nDo it on all ranks with the same"
            " values, or in `with strategy.gathered(module, modify=True):`, where rank 0's count."
        )
    if kind == "assigned":
        raise DivergenceError(
            f"Each rank assigned a gradient of its own to parameter {name!r}, or changed it in its"
            " own way.\nAssign the same on all ranks (`dist.all_reduce(g)`, then `p.grad = g`);"
            " noise is the same with `DataOptions(distinct_rank_rng=False)`."
        )


def require_same_settings(everyone: Sequence[Sequence[Setting]]) -> None:
    """Require the same optimizer options on all ranks, each of which steps its part of the model.

    Raises:
        DivergenceError: an option differs; the error names the first one and both values.
    """
    first, *others = map(_index_settings, everyone)
    for rank, settings in enumerate(others, 1):
        for setting in {**first, **settings}:
            expected, value = first.get(setting), settings.get(setting)
            if expected == value:
                continue
            optimizer, group, option, _ = setting
            if option.startswith("gradients"):
                raise _gradient_error(setting, expected, value, rank)
            raise DivergenceError(
                f"{option!r} of param group {group} of {optimizer} is {expected} on rank 0 and"
                f" {value} on rank {rank}.\nSet it from what all ranks have: a scheduler that looks"
                " at a logged value needs `self.log(..., sync_dist=True)`."
            )


def _gradient_error(
    setting: Setting, expected: float | None, value: float | None, rank: int
) -> DivergenceError:
    """Describe a difference in gradients of a param group; None: that rank lacks the entry."""
    optimizer, group, option, _ = setting
    having, lacking = (0, rank) if value is None else (rank, 0)
    if option.startswith(CLEARED):
        difference = f"{option} on rank {having}, and with it on rank {lacking}"
    elif None in (expected, value):
        difference = f"{option} on rank {having} alone; rank {lacking} did not come to that"
    else:
        difference = f"{expected} {option} on rank 0 and {value} on rank {rank}"
    return DivergenceError(
        f"Param group {group} of {optimizer} had {difference}. Each rank has a part of every"
        " gradient: step, clear (`zero_grad()`, `p.grad = None`) and assign on all ranks alike. To"
        " leave out what one rank has computed, multiply its loss by 0."
    )


def _index_settings(settings: Sequence[Setting]) -> dict[tuple[str, int, str, int], float]:
    """Return settings by optimizer class, group, option, and occurrence of these three so far."""
    indexed: dict[tuple[str, int, str, int], float] = {}
    times: Counter[tuple[str, int, str]] = Counter()
    for optimizer, group, option, value in settings:
        key = optimizer, group, option
        indexed[optimizer, group, option, times[key]] = value
        times[key] += 1
    return indexed


def checksum(values: Tensor) -> Tensor:
    """Return an int64 [] of the bits of ``values`` [any shape] and of where each word stands.

    The device computes it, in chunks.
    """
    flat = values.detach().resolve_conj().resolve_neg().reshape(-1)
    padded = torch.zeros(-(-flat.nbytes // 8), dtype=torch.int64, device=flat.device)
    padded.view(torch.uint8)[: flat.nbytes].copy_(flat.contiguous().view(torch.uint8))
    # All products and sums here wrap around at 64 bits, on purpose.
    count = min(len(padded), _CHUNK_WORDS)
    places = torch.arange(1, count + 1, device=flat.device) * 0x1E3779B97F4A7C15
    # Weights are not linear in the place, so that the words 1 and 4 give another sum than 2 and 3.
    # They are odd, so that a product loses no bit of a word.
    weights = (places ^ (places >> 31)) * 0x3F58476D1CE4E5B9 | 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in padded.split(_CHUNK_WORDS):
        total = fold((chunk * weights[: len(chunk)]).sum(), total)
    return total


def fold(total: Tensor, before: Tensor) -> Tensor:
    """Combine the checksum ``before`` with the later one ``total``, in this order."""
    return total + before * 0x14CB5EB1  # odd: no bit is lost


def digest(labels: Iterable[int], entries: Sequence[NamedChecksum | Setting]) -> int:
    """Return 62 bits of ``labels`` and ``entries`` that every process computes alike."""
    names, values = repr([entry[:-1] for entry in entries]), [entry[-1] for entry in entries]
    # `hash` of a str differs between processes, so names enter by their CRC. `hash(-1)` equals
    # `hash(-2)`, so a flag for each value says whether it is -2.
    return hash((*labels, crc32(names.encode()), *values, *[value == -2 for value in values])) >> 2


class ExchangeLog:
    """The exchanges of one rank since the last agreement; other threads may read it.

    Attributes:
        trace: first a number that all ranks have had since they last agreed or began a step (-1:
            exchanges of two ranks cannot be matched by position), then the labels of the exchanges
            since.
        has_stored: whether parameters were changed between steps since the last comparison.
        describe: returns in words what a label stands for, for errors.
        settings: returns what else must be the same on all ranks.
        step_settings: settings of each optimizer step since the last comparison.
        backward_settings: the gradients that there were when the last backward, which adds to them,
            began.
        progress: index of the last unit that was used, and number of exchanges that were begun.
    """

    def __init__(self) -> None:
        self._agreements = self._resumed = 0
        self.trace = [0]
        self.has_stored = False
        # by parameter and kind: checksums of all values since the last comparison, and of the last
        self._writes: dict[tuple[str, str], Tensor] = {}
        self._latest: dict[tuple[str, str], Tensor] = {}
        self.describe: Callable[[int], str] = str
        self.settings: Callable[[], list[Setting]] = list
        self.step_settings: list[Setting] = []
        self.backward_settings: list[Setting] = []
        self.progress: MutableSequence[int] | memoryview = [-1, 0]

    def record_write(self, name: str, kind: str, values: Tensor) -> None:
        """Record that parameter ``name`` was changed to ``values``.

        ``kind`` is "written" (in a step), "stored" (between steps) or "assigned" (its gradient).
        """
        # All values count, and not the last alone: that may come from a gather of all ranks' parts,
        # and be the same on all ranks although the earlier ones were not. The same value again
        # counts once: a forward that clamps a weight runs more often on a rank with more batches to
        # evaluate.
        key, total = (name, kind), checksum(values)
        latest, self._latest[key] = self._latest.get(key, total), total
        if (before := self._writes.get(key)) is not None:
            total = torch.where(total == latest, before, fold(total, before))
        self._writes[key] = total
        self.has_stored |= kind == "stored"

    def record_backward(self, gradients: list[Setting]) -> None:
        """Record the ``gradients`` that there are when a backward, which adds to them, begins."""
        self.backward_settings = [
            (name, group, f"{option} (when a backward began)", value)
            for name, group, option, value in gradients
        ]

    def record_step(self, gradients: list[Setting]) -> None:
        """Record an optimizer step, with the ``gradients`` it uses and the current settings."""
        self.step_settings += [*gradients, *self.settings()]
        # Steps on gradients that the user assigns need no backward, which would end the list.
        if len(self.step_settings) > _MAX_STEP_SETTINGS:
            many = digest((), self.step_settings)
            self.step_settings = [("an optimizer", 0, "a digest of many steps", many)]

    def all_settings(self) -> list[Setting]:
        """Return the current settings, those of steps and those of the last backward."""
        return [*self.settings(), *self.step_settings, *self.backward_settings]

    def checksums(self) -> list[NamedChecksum]:
        """Return checksums of writes, in one order on all ranks.

        It waits for the device.
        """
        keys = sorted(self._writes)
        totals = torch.stack([self._writes[key] for key in keys]).tolist() if keys else []
        return [(*key, total) for key, total in zip(keys, totals, strict=True)]

    def digest(self, checksums: Sequence[NamedChecksum]) -> int:
        """Return 62 bits of the trace, the ``checksums`` and all settings."""
        return digest(self.trace[1:], [*checksums, *self.all_settings()])

    def start_trace(self) -> None:
        """Clear the log after all ranks have compared everything, the trace included."""
        self.clear_records()
        self.backward_settings = []
        self._agreements, self._resumed = self._agreements + 1, 0
        self.trace[:] = [self._agreements << 16]

    def clear_records(self) -> None:
        """Clear writes and step settings after all ranks have compared them."""
        self._writes, self.step_settings, self.has_stored = {}, [], False

    def suspend_trace(self) -> None:
        """Mark that from here on exchanges of two ranks cannot be matched by position."""
        self.trace[:] = [-1]

    def resume_trace(self) -> None:
        """Start the trace again if it was suspended, because all ranks begin a step."""
        if self.trace[0] < 0:
            self._resumed += 1
            self.trace[:] = [(self._agreements << 16) + self._resumed]
