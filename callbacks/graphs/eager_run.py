"""`EagerRun`: one eager micro-batch, and what of it a replay would not repeat."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from ...strategies.engine import Zero3Engine
from .compare import Gradients, States
from .device import CudaGraphs, SoftwareGraphs
from .fingerprint import attributes_of
from .log_tape import LogTape
from .static_inputs import NotCapturable, leaves, tensors_in

REMEDY = "Move it to `on_train_batch_end`, which gets what `training_step` returns."
_ONCE = "which a graph would do only once, at its capture"


class _Printed:
    """Standard output that notes whether something is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.text = stream, ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class EagerRun:
    """Runs a program eagerly, and looks what it did besides computing with tensors.

    Args:
        graphs: makes the graphs.
        root: the module whose calls of ``log`` are recorded.
        module: the module whose state the program may not change.

    Attributes:
        problems: why a replay would differ, in words.
        tape: the calls of ``self.log``.
        values: all results of the forward, by name.
        kind: what of these must be the same in each run, by name: numbers, shapes of tensors.
        offsets: see :class:`~.random_states.RandomStates`.
    """

    def __init__(
        self,
        graphs: CudaGraphs | SoftwareGraphs,
        root: LightningModule,
        module: nn.Module,
    ) -> None:
        self._graphs, self._root, self._module = graphs, root, module
        self.problems: list[str] = []
        self.tape = LogTape()
        self.values: dict[str, Any] = {}
        self.kind: dict[str, Any] = {}
        self._random = graphs.track_random_states()

    @property
    def offsets(self) -> list[int]:
        """See :class:`~.random_states.RandomStates`."""
        return [] if self._random is None else self._random.offsets

    def add(self, problem: str) -> None:
        """Add a problem, unless it is known."""
        if problem not in self.problems:
            self.problems.append(problem)

    def forward(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what ``program`` returns, after what it logs was logged."""
        self._inputs = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        with self._looking(forward=True), self.tape.record(self._root):
            output = program(*args, **kwargs)
        self.values = self.tape.values()
        try:
            self.values |= values_in(output)
        except NotCapturable as error:
            self.add(str(error))
        self.kind = {
            name: f"of shape {list(each.shape)}" if isinstance(each, Tensor) else each
            for name, each in self.values.items()
        }
        self.tape.play(self._root)
        return output

    def backward(self, program: Callable[[], None]) -> None:
        """Run the backward of the forward's loss."""
        with self._looking(forward=False):
            program()
        if any(tensor.is_leaf and tensor.grad is not None for tensor, _ in self._inputs):
            self.add(
                "A tensor of the batch gets a gradient, which a replay would leave with its copy of"
                " the batch."
            )

    @contextlib.contextmanager
    def _looking(self, forward: bool) -> Iterator[None]:
        attributes, drawn = attributes_of(self._module), _python_random_states()
        versions = [(name, p, _version(p)) for name, p in self._module.named_parameters()]
        waits: list[str] = []
        tracking = (
            contextlib.nullcontext() if self._random is None else self._random.track_calls(forward)
        )
        printed = _Printed(sys.stdout)
        with contextlib.redirect_stdout(printed), self._graphs.report_waits(waits), tracking:
            yield
        for wait in waits:
            self.add(
                f"{wait} needs a value, or a size that depends on values, on the host: nobody has"
                " computed it when the graph is captured. Keep it on the device (`torch.where` for"
                " `if` and for masks; log the tensor)."
            )
        if printed.text:
            self.add(f"It prints {printed.text.strip()[:60]!r}, {_ONCE}. {REMEDY}")
        if drawn != _python_random_states():
            self.add(
                "It draws a random number of Python or numpy, and a graph would keep the number of"
                " its capture. Draw it with torch, on the device of the batch."
            )
        after = attributes_of(self._module)
        for name in dict.fromkeys([*attributes, *after]):
            if attributes.get(name) != after.get(name):
                self.add(
                    f"It changes `self.{name}`, {_ONCE}. {REMEDY} Keep tensors in buffers, and"
                    " write into these: `self.name.copy_(...)`."
                )
        for name, parameter, version in versions:
            if forward and _version(parameter) != version:
                self.add(f"It writes to parameter {name}. {REMEDY}")
        if any(tensor._version != version for tensor, version in self._inputs):
            self.add("It writes into its inputs; a replay would write into copies of them.")
        if self._random is not None and not self._random.is_home:
            self.add(
                "The backward pass draws from, or leaves, a random state that a graph cannot go"
                " back to, as dropout does in a checkpoint inside of a re-entrant one. Make the"
                " outer one with `use_reentrant=False`."
            )


class KeptRun(EagerRun):
    """An eager micro-batch whose results are kept, to be compared with a replay's.

    Args:
        graphs: see :class:`EagerRun`.
        root: the module that is trained.
        engine: the engine of `zero3`, if there is one.

    Attributes:
        before_forward: buffers and random states.
        before_backward: likewise.
        gradients: those before the backward.
        loss_grad: the gradient of the loss.
        results: everything that was computed, by name.
    """

    def __init__(
        self,
        graphs: CudaGraphs | SoftwareGraphs,
        root: LightningModule,
        engine: Zero3Engine | None,
    ) -> None:
        super().__init__(graphs, root, root)
        self._engine = engine
        self.loss_grad: Tensor | None = None
        self.results: dict[str, Any] = {}

    def _states(self) -> States:
        return States(self._root, self._root.device)

    @override
    def forward(self, program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.before_forward = self._states()
        output = super().forward(program, *args, **kwargs)
        self._after_forward, loss = self._states(), loss_of(output)
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(self._keep_loss_grad)
        return output

    def _keep_loss_grad(self, grad: Tensor) -> None:
        self.loss_grad = grad.detach().clone()

    @override
    def backward(self, program: Callable[[], None]) -> None:
        self.before_backward, self.gradients = self._states(), Gradients(self._root, self._engine)
        super().backward(program)
        after = self._states(), Gradients(self._root, self._engine).values
        self.results = all_results(self.values, self._after_forward, *after)


def all_results(
    values: dict[str, Any],
    after_forward: States,
    after_backward: States,
    gradients: Mapping[str, Tensor | None],
) -> dict[str, Any]:
    """Return all results of a micro-batch in one dict, in the order in which they come about."""
    last = {f"{name}, after the backward,": v for name, v in after_backward.values.items()}
    return values | after_forward.values | last | dict(gradients)


def values_in(output: Any) -> dict[str, Any]:
    """Return copies of what the program returned, by name."""
    return {
        name: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
        for name, leaf in leaves(output, "the output")
    }


def loss_of(output: Any) -> Any:
    """Return the loss in ``output``, which ``training_step`` returned."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version


def _python_random_states() -> tuple[Any, str]:
    return random.getstate(), repr(np.random.get_state())
