"""Whether two steps with inputs of the same shapes did the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torchmetrics.metric
from torch import Tensor

from .log_tape import LogTape
from .python_effects import REMEDY_HOOK, REMEDY_NUMBER, plain
from .source_lines import describe_line, line_of_attribute
from .watch import Operation, Problem, Watch


def compare(before: Watch, after: Watch) -> list[Problem]:
    """What two steps with batches of the same shapes did differently; the first difference only."""
    for a, b in zip(before.operations, after.operations, strict=False):
        if a.name != b.name:
            return [_other_way(a, b)]
        if a.constants != b.constants:
            x, y = next((x, y) for x, y in zip(a.constants, b.constants, strict=False) if x != y)
            what = (
                f"A Python number that changes goes into {b.name}: {x}, then {y}. A graph would"
                " keep the first."
            )
            return [Problem(f"{what} {REMEDY_NUMBER}", b.place or a.place)]
        if a.shapes != b.shapes:
            return [
                Problem(
                    f"Shapes change from step to step in {b.name}: {_sizes(a)}, then {_sizes(b)}.",
                    b.place,
                )
            ]
    if len(before.operations) != len(after.operations):
        longer = max(before.operations, after.operations, key=len)
        extra = longer[min(len(before.operations), len(after.operations))]
        return [
            Problem(
                f"Not every step runs {extra.name}: a branch in Python, of which a graph would keep"
                " one side.",
                extra.place,
            )
        ]
    return _compare_logs(before.tape, after.tape) or _compare_surroundings(before, after)


def _compare_surroundings(before: Watch, after: Watch) -> list[Problem]:
    if before.returned != after.returned:
        return [
            Problem(
                f"What the step returns changes, apart from the values of tensors. {REMEDY_HOOK}",
                after.program,
            )
        ]
    for a, b in zip(before.operations, after.operations, strict=True):
        if a.sources != b.sources:
            what = (
                f"{b.name} reads a tensor of before the step, and another one in each step. A graph"
                " would go on with the first."
            )
            return [
                Problem(
                    f"{what} Keep one, in a buffer of the module, and write into it:"
                    " `self.name.copy_(...)`.",
                    b.place,
                )
            ]
    for key, value in before.values.items():
        if key in after.values and after.values[key] != value:
            what = (
                f"`{key[1]}`, which belongs to no module, changes from step to step; a graph would"
                " keep what it was."
            )
            remedy = "Keep tensors in buffers, or move it to `on_train_batch_end`."
            return [Problem(f"{what} {remedy}", line_of_attribute(key[1], after.codes))]
    return []


@dataclass
class Shape:
    """What is known of inputs of one signature.

    Attributes:
        watches: of the last two eager runs.
        watched: number of eager runs.
        epoch: of the last one.
        graphs: that were captured.
        batch: number of the micro-batch that was the first to have such inputs.
    """

    watches: list[Watch] = field(default_factory=list)
    watched: int = 0
    epoch: int = 0
    graphs: Any = None
    batch: int = 0

    def add(self, watch: Watch, epoch: int) -> None:
        """One more eager run was watched."""
        self.watches, self.watched, self.epoch = (
            [*self.watches[-1:], watch],
            self.watched + 1,
            epoch,
        )

    def problems(self) -> list[Problem]:
        """Why it cannot be captured."""
        given = [watch.given for watch in self.watches if any(watch.given)]
        found = self.watches[-1].problems + compare(*self.watches)
        if len(given) > 1 and given[0] != given[1]:
            found.append(Problem("Not the same outputs get gradients each time."))
        return found


def _other_way(a: Operation, b: Operation) -> Problem:
    return Problem(
        f"Steps run different operations, {a.name} ({describe_line(a.place)}), then {b.name}: a"
        " branch in Python that depends on values which change. A graph would keep one side.",
        b.place or a.place,
    )


def _sizes(operation: Operation) -> str:
    return " ".join(str(list(shape)) for shape in operation.shapes)


def _compare_logs(before: LogTape, after: LogTape) -> list[Problem]:
    names, others = [c.name for c in before.calls], [c.name for c in after.calls]
    if names != others:
        name = min(set(names) ^ set(others), default=(names + others)[0])
        place = next((c.place for c in before.calls + after.calls if c.name == name), None)
        return [
            Problem(
                f"`self.log({name!r}, ...)` is not called in every step: a graph would always, or"
                " never, log it.",
                place,
            )
        ]
    for a, b in zip(before.calls, after.calls, strict=True):
        if not isinstance(b.value, Tensor | torchmetrics.Metric) and plain(a.value) != plain(
            b.value
        ):
            what = (
                f"`self.log({b.name!r}, ...)` logs a Python number that changes: {a.value}, then"
                f" {b.value}. {REMEDY_HOOK}"
            )
            return [Problem(what, b.place)]
        if {k: repr(v) for k, v in a.options.items()} != {k: repr(v) for k, v in b.options.items()}:
            return [Problem(f"The options of `self.log({b.name!r}, ...)` change.", b.place)]
    return []
