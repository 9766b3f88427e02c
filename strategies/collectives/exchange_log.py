"""The log that each rank keeps of its exchanges, and the errors where two ranks' logs differ."""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Steps on gradients that the user assigns need no backward, which would end the list.
_MAX_STEP_SETTINGS = 10_000
_CHUNK_WORDS = 1 << 18  # words of 8 bytes that a checksum multiplies at a time
LOOK_FOR = (
    "\nAll ranks must run alike, in one order. Look for what one rank does alone, or with other"
    " values on each (`gathered(module, modify=True)`, `self.log(..., sync_dist=True)`), loaders"
    " of different length, branches or `should_stop` by a rank's own data"
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


def first_difference(everyone: Sequence[Sequence[Any]], describe: Callable[[Any], str]) -> str:
    """Describe the first entry in which some rank differs from rank 0; empty if none does.

    Args:
        everyone: of each rank what it did since the last agreement. A rank with fewer entries does
            not differ by that: it may be late.
        describe: returns in words what an entry stands for.
    """
    for rank, entries in enumerate(everyone):
        for number, (expected, entry) in enumerate(zip(everyone[0], entries, strict=False)):
            if expected != entry:
                return (
                    f"The ranks ran different things. At entry {number} of this step rank 0 came to"
                    f" {describe(expected)}, rank {rank} to {describe(entry)}.{LOOK_FOR}"
                )
    return ""


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
        writes: by parameter and kind ("written" in a step, "stored" between steps, "assigned as
            gradient") a checksum of all values since the last comparison.
        describe: returns in words what a label stands for, for errors.
        settings: returns what else must be the same on all ranks, in words.
        step_settings: settings of each optimizer step and backward since the last comparison.
        progress: index of the last unit that was used, and number of exchanges that were begun.
    """

    def __init__(self) -> None:
        self._number = 0  # the upper bits count agreements
        self.trace = [0]
        self.writes: dict[tuple[str, str], Tensor] = {}
        self.describe: Callable[[int], str] = str
        self.settings: Callable[[], list[str]] = list
        self.step_settings: deque[str] = deque(maxlen=_MAX_STEP_SETTINGS)
        self.progress: MutableSequence[int] | memoryview = [-1, 0]

    def record_write(self, name: str, kind: str, values: Tensor) -> None:
        """Record that parameter ``name`` was changed to ``values``; see :attr:`writes`."""
        # All values count, and not the last alone: that may come from a gather of all ranks' parts,
        # and be the same on all ranks although the earlier ones were not. In an evaluation a
        # forward that clamps a weight runs more often on a rank with more batches.
        key, total = (name, kind), checksum(values)
        is_repeated = kind == "written" and self.trace[0] < 0
        if key in self.writes and not is_repeated:
            total = fold(total, self.writes[key])
        self.writes[key] = total

    def record_step(self, gradients: list[str]) -> None:
        """Record an optimizer step, with the ``gradients`` it uses and the current settings."""
        self.step_settings += [*gradients, *self.settings()]

    def records(self) -> list[str]:
        """Return what must be the same on all ranks beside the trace, in words.

        It waits for the device.
        """
        keys = sorted(self.writes)
        totals = torch.stack([self.writes[key] for key in keys]).tolist() if keys else []
        written = [
            f"a value {kind} to parameter {name!r} (checksum {total:x})"
            for (name, kind), total in zip(keys, totals, strict=True)
        ]
        return [*written, *self.settings(), *self.step_settings, "nothing more"]

    def start_trace(self) -> None:
        """Clear the trace after all ranks have compared it."""
        self._number = (self._number | 0xFFFF) + 1
        self.trace[:] = [self._number]

    def clear_records(self) -> None:
        """Clear writes and step settings after all ranks have compared them."""
        self.step_settings.clear()
        self.writes = {}

    def suspend_trace(self) -> None:
        """Mark that from here on exchanges of two ranks cannot be matched by position."""
        self.trace[:] = [-1]

    def resume_trace(self) -> None:
        """Start the trace again if it was suspended, because all ranks begin a step."""
        if self.trace[0] < 0:
            self._number += 1
            self.trace[:] = [self._number]
