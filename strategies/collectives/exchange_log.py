"""The log that each rank keeps of its exchanges, and the errors where two ranks' logs differ."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

# a parameter's name; "written", "stored" or "assigned"; the checksum of the values
NamedChecksum = tuple[str, str, int]
# an optimizer's class, the number of a param group, an option and its value
Setting = tuple[str, int, str, Any]
# Steps on gradients that the user assigns need no backward, which would end the list.
_MAX_STEP_SETTINGS = 10_000
_WRITES = {
    "written": "A forward, or an evaluation step, changed parameter {!r} in place",
    "stored": "Parameter {!r} was stored between steps (`load_state_dict`, `copy_`)",
    "assigned": "Each rank assigned a gradient of its own to parameter {!r}, or changed it",
}
_CHUNK_WORDS = 1 << 18  # words of 8 bytes that a checksum multiplies at a time
LOOK_FOR = (
    "\nAll ranks must run the same modules in the same order, load and save together, and take as"
    " many steps. Look for what one rank does alone (`strategy.gathered` is for that), loaders of"
    " different length, and branches or `should_stop` by a rank's own data"
    " (docs/understand/failures.md#diverging-ranks)."
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
    BATCH = -12, "end a batch"
    NOTES = (
        -13,
        (
            "compare what all have written (before an evaluation or another run, after training, or"
            " before a forward outside of a step, when it has stored parameters between steps)"
        ),
    )
    SAVE = -14, "save a checkpoint, weights or a state dict, which is for all ranks"

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
    for name, kind, _ in sorted(sets[0].union(*sets) - sets[0].intersection(*sets)):
        raise DivergenceError(
            f"{_WRITES[kind].format(name)}: on some ranks only, or with other values on each.\nDo"
            " it on all ranks with the same values (`torch.distributed.all_reduce`, or noise with"
            " `DataOptions(distinct_rank_rng=False)`), or between steps in `with"
            " strategy.gathered(module, modify=True):`, where rank 0's count."
        )


def require_same_settings(everyone: Sequence[Sequence[Setting]]) -> None:
    """Require the same optimizer options on all ranks, each of which steps its part of the model.

    Raises:
        DivergenceError: an option differs; the error names the first one and both values.
    """
    for rank, settings in enumerate(everyone):
        for expected, setting in zip_longest(everyone[0], settings):
            if repr(expected) != repr(setting):  # nan is not nan
                raise DivergenceError(
                    f"Optimizers differ: {_show(expected)} on rank 0 and"
                    f" {_show(setting, expected)} on rank {rank}.\nEach rank has a part of"
                    " every gradient: step, clear (`zero_grad()`, `p.grad = None`), assign and set"
                    " options on all ranks alike. A scheduler that looks at a logged value needs"
                    " `self.log(..., sync_dist=True)`. To leave out what one rank has computed,"
                    " multiply its loss by 0."
                )


def _show(setting: Setting | None, expected: Setting | None = None) -> str:
    """Describe ``setting``, by its value alone where it is of the same option as ``expected``."""
    if setting is None:
        return "nothing more"
    optimizer, group, option, value = setting
    if expected is not None and setting[:3] == expected[:3]:
        return str(value)
    return f"{option!r} of param group {group} of {optimizer} is {value}"


def checksum(values: Tensor) -> Tensor:
    """Return an int64 [] of the bits of ``values`` [any shape] and of where each word stands.

    The device computes it, in chunks.
    """
    raw = values.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    padded = nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    # All products and sums here wrap around at 64 bits, on purpose.
    count = min(len(padded), _CHUNK_WORDS)
    places = torch.arange(1, count + 1, device=raw.device) * 0x1E3779B97F4A7C15
    # Weights are not linear in the place, so that the words 1 and 4 give another sum than 2 and 3.
    # They are odd, so that a product loses no bit of a word.
    weights = (places ^ (places >> 31)) * 0x3F58476D1CE4E5B9 | 1
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for chunk in padded.split(_CHUNK_WORDS):
        total = fold((chunk * weights[: len(chunk)]).sum(), total)
    return total


def fold(total: Tensor, before: Tensor) -> Tensor:
    """Combine the checksum ``before`` with the later one ``total``, in this order."""
    return total + before * 0x14CB5EB1  # odd: no bit is lost


def digest(*entries: Sequence[object]) -> int:
    """Return 56 bits of ``entries`` that every process computes alike."""
    text = repr([list(each) for each in entries])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


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
        self.step_settings: deque[Setting] = deque(maxlen=_MAX_STEP_SETTINGS)
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

    def record_step(self, gradients: list[Setting]) -> None:
        """Record an optimizer step, with the ``gradients`` it uses and the current settings."""
        self.step_settings += [*gradients, *self.settings()]

    def all_settings(self) -> list[Setting]:
        """Return the current settings, those of the last backward and those of steps."""
        return [*self.settings(), *self.backward_settings, *self.step_settings]

    def checksums(self) -> list[NamedChecksum]:
        """Return checksums of writes, in one order on all ranks.

        It waits for the device.
        """
        keys = sorted(self._writes)
        totals = torch.stack([self._writes[key] for key in keys]).tolist() if keys else []
        return [(*key, total) for key, total in zip(keys, totals, strict=True)]

    def start_trace(self) -> None:
        """Clear the log after all ranks have compared everything, the trace included."""
        self.clear_records()
        self._agreements, self._resumed = self._agreements + 1, 0
        self.trace[:] = [self._agreements << 16]

    def clear_records(self) -> None:
        """Clear writes and step settings after all ranks have compared them."""
        self.step_settings.clear()
        self._writes, self.has_stored = {}, False

    def suspend_trace(self) -> None:
        """Mark that from here on exchanges of two ranks cannot be matched by position."""
        self.trace[:] = [-1]

    def resume_trace(self) -> None:
        """Start the trace again if it was suspended, because all ranks begin a step."""
        if self.trace[0] < 0:
            self._resumed += 1
            self.trace[:] = [(self._agreements << 16) + self._resumed]
