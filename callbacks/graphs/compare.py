"""Compares two eager steps with inputs of the same signature."""

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
    """Return the first difference of two steps with batches of one signature, as a problem.

    The list has one element, or none if the steps did the same.
    """
    for a, b in zip(before.operations, after.operations, strict=False):
        if a.name != b.name:
            return [_other_operation_problem(a, b)]
        if a.constants != b.constants:
            x, y = next((x, y) for x, y in zip(a.constants, b.constants, strict=False) if x != y)
            text = (
                f"A Python number that changes goes into {b.name}: {x}, then {y}. A graph would"
                " keep the first."
            )
            return [Problem(f"{text} {REMEDY_NUMBER}", b.place or a.place)]
        if a.shapes != b.shapes:
            return [
                Problem(
                    f"Shapes change from step to step in {b.name}: {_format_shapes(a)}, then"
                    f" {_format_shapes(b)}.",
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
            text = (
                f"{b.name} reads a tensor of before the step, and another one in each step. A graph"
                " would go on with the first."
            )
            return [
                Problem(
                    f"{text} Keep one, in a buffer of the module, and write into it:"
                    " `self.name.copy_(...)`.",
                    b.place,
                )
            ]
    for key, value in before.values.items():
        if key in after.values and after.values[key] != value:
            text = (
                f"`{key[1]}`, which belongs to no module, changes from step to step; a graph would"
                " keep its first value."
            )
            remedy = "Keep tensors in buffers, or move it to `on_train_batch_end`."
            return [Problem(f"{text} {remedy}", line_of_attribute(key[1], after.codes))]
    return []


@dataclass
class SignatureRecord:
    """The eager runs and the graphs of inputs of one signature.

    Attributes:
        watches: notes on the last two eager runs, the latest last.
        eager_runs: number of watched eager runs.
        last_epoch: epoch of the last of these.
        graphs: the captured graphs, a `CapturedStep` or a `CapturedCall`; None before the capture.
        first_batch: number of the micro-batch that was the first to have such inputs.
    """

    watches: list[Watch] = field(default_factory=list)
    eager_runs: int = 0
    last_epoch: int = 0
    graphs: Any = None
    first_batch: int = 0

    def add_run(self, watch: Watch, epoch: int) -> None:
        """Add one more watched eager run."""
        self.watches = [*self.watches[-1:], watch]
        self.eager_runs += 1
        self.last_epoch = epoch

    def find_problems(self) -> list[Problem]:
        """Return why these inputs cannot be captured."""
        has_gradient = [watch.given for watch in self.watches if any(watch.given)]
        found = self.watches[-1].problems + compare(*self.watches)
        if len(has_gradient) > 1 and has_gradient[0] != has_gradient[1]:
            found.append(Problem("Not the same outputs get gradients each time."))
        return found


def _other_operation_problem(a: Operation, b: Operation) -> Problem:
    return Problem(
        f"Steps run different operations, {a.name} ({describe_line(a.place)}), then {b.name}: a"
        " branch in Python that depends on values which change. A graph would keep one side.",
        b.place or a.place,
    )


def _format_shapes(operation: Operation) -> str:
    return " ".join(str(list(shape)) for shape in operation.shapes)


def _compare_logs(before: LogTape, after: LogTape) -> list[Problem]:
    names, others = [c.name for c in before.calls], [c.name for c in after.calls]
    if names != others:
        # The same names may come in another order, or another number of times.
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
        is_python = not isinstance(b.value, Tensor | torchmetrics.Metric)
        if is_python and plain(a.value) != plain(b.value):
            text = (
                f"`self.log({b.name!r}, ...)` logs a Python number that changes: {a.value}, then"
                f" {b.value}. {REMEDY_HOOK}"
            )
            return [Problem(text, b.place)]
        if {k: repr(v) for k, v in a.options.items()} != {k: repr(v) for k, v in b.options.items()}:
            return [Problem(f"The options of `self.log({b.name!r}, ...)` change.", b.place)]
    return []
