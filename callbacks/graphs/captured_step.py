"""One captured micro-batch: its forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ...strategies.engine import ReplayedStep
from .device import Graph
from .log_tape import LogTape
from .source_lines import naming_failure
from .static_inputs import StaticInputs


class StaticGradients:
    """Gradients at fixed addresses, which captured backwards add to."""

    def __init__(self) -> None:
        self._held: dict[Tensor, Tensor] = {}
        self._cleared: list[Tensor] = []
        self._made: list[
            Tensor
        ] = []  # parameters whose gradients the last backward was the first to ask for

    def begin_backward(self, parameters: list[Tensor]) -> None:
        """Make ``parameter.grad`` the static one; it keeps the value, or is zero where there was no
        gradient.

        Lightning, users and Lightning's validation set gradients to None, or to other tensors, as
        they like.
        """
        self._cleared = [p for p in parameters if p.grad is None]
        self._made = [p for p in parameters if p not in self._held]
        for parameter in parameters:
            mine = self._held.get(parameter)
            if mine is None:
                mine = self._held[parameter] = torch.zeros_like(parameter, requires_grad=False)
            if parameter.grad is not None and parameter.grad is not mine:
                mine.copy_(parameter.grad)
            parameter.grad = mine
        if self._cleared:
            torch._foreach_zero_([p.grad for p in self._cleared])

    @contextmanager
    def capture_backward(self, parameters: list[Tensor]) -> Iterator[None]:
        """Around the program that is captured; afterwards ``parameters`` are those that get a
        gradient from it.
        """
        before = [(p, p.grad, p.grad._version) for p in parameters]
        yield
        parameters[:] = [p for p, grad, version in before if grad._version != version]
        for parameter in set(self._cleared).difference(parameters):
            parameter.grad = None
        # graphs of other shapes may add to older ones
        for parameter in set(self._made).difference(parameters):
            self._held.pop(parameter)

    def capture_forward(self) -> AbstractContextManager[None]:
        """Around the program that is captured."""
        return nullcontext()

    def begin_forward(self) -> None:
        """Before the forward is captured or replayed."""

    open_backward = end_forward = end_backward = begin_forward

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(t.nbytes for t in self._held.values())


class CapturedStep:
    """A training step in two graphs, so that everything that Lightning does between forward and
    backward finds its place.

    The forward graph ends with the output of ``training_step``. Lightning gets a copy of it, whose
    loss is the beginning of a new small autograd graph: dividing by the accumulation, scaling it
    for 16-bit floats and hooks that see it run as ever. The gradient that arrives at that copy is
    where the backward graph starts.

    Args:
        graphs: of its forward and its backward.
        books: gradients that backward writes to, or what the engine of `zero3` notes.
    """

    def __init__(self, graphs: tuple[Graph, Graph], books: StaticGradients | ReplayedStep) -> None:
        self._forward, self._backward = graphs
        self._books = books
        self._tape = LogTape()
        self._proxy: Tensor | None = None  # the loss that Lightning got

    def capture_forward(
        self, batch: Any, rest: tuple, step: Callable[..., Any], module: LightningModule
    ) -> None:
        """Record ``step(batch, *rest)``, which is the strategy's ``training_step``."""
        self._inputs = StaticInputs(batch)
        self._books.begin_forward()
        naming = naming_failure("the forward of the training step")
        with (
            naming,
            self._forward.capture(),
            self._books.capture_forward(),
            self._tape.record(module),
        ):
            self._output = step(self._inputs.batch, *rest)
        loss = loss_of(self._output)
        assert loss is not None
        self._loss: Tensor | None = loss  # until its backward is captured
        self._seed = torch.zeros_like(loss, requires_grad=False)
        # Some leaves are out of sight, inside of re-entrant checkpoints; some parameters are not
        # used.
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._trained = list(dict.fromkeys([*leaves_of(loss), *parameters]))
        self._output = apply_to_collection(self._output, Tensor, Tensor.detach)

    def fill(self, batch: Any) -> None:
        """The next batch, of the same signature."""
        self._inputs.fill(batch)

    def replay_forward(self, module: LightningModule) -> Any:
        """Forward and the logging; returns the output, in memory of its own."""
        self._books.begin_forward()
        self._forward.replay()
        self._books.end_forward()
        self._tape.play(module)
        output = apply_to_collection(self._output, Tensor, Tensor.clone)
        self._proxy = loss_of(output).requires_grad_()
        return output

    def replay_backward(self, run: Callable[[], None]) -> None:
        """Backward; recorded, when it is the first.

        Args:
            run: the eager backward, of what Lightning made of the loss.
        """
        proxy, self._proxy = self._proxy, None
        self._books.open_backward()
        run()
        if proxy is None or proxy.grad is None:
            return  # the user's `backward` made none
        self._seed.copy_(proxy.grad)
        self._books.begin_backward(self._trained)
        if self._loss is not None:
            loss, self._loss = self._loss, None
            naming = naming_failure("the backward of the training step")
            with naming, self._backward.capture(), self._books.capture_backward(self._trained):
                torch.autograd.backward(loss, self._seed)
        self._backward.replay()
        self._books.end_backward()

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs."""
        return self._inputs.nbytes

    def reset(self) -> None:
        """Free the graphs."""
        self._forward.reset()
        self._backward.reset()
        self._loss = self._proxy = None


def loss_of(output: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned."""
    return output.get("loss") if isinstance(output, Mapping) else output


def leaves_of(*outputs: Tensor) -> list[Tensor]:
    """Tensors whose ``grad`` a backward of ``outputs`` can add to."""
    found, seen, waiting = [], set(), [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found
