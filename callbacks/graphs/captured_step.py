"""`CapturedStep`: the forward and the backward of one micro-batch as two graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ...strategies.engine import ReplayedStep, Zero3Engine
from .compare import Gradients, States, first_difference
from .device import Graph
from .eager_run import KeptRun, all_results, loss_of, values_in
from .log_tape import LogTape
from .static_inputs import StaticInputs


class StaticGradients:
    """Gradients at fixed addresses, which captured backwards add to.

    Its methods are called at the same points of a step as those of `ReplayedStep`, which does the
    same for the engine of `zero3`.
    """

    def __init__(self) -> None:
        self._grads: dict[Tensor, Tensor] = {}  # parameter: its gradient at a fixed address
        self._cleared: list[Tensor] = []  # parameters that had no gradient before this backward
        self._new: list[Tensor] = []  # parameters that this backward is the first to need

    def begin_backward(self, parameters: list[Tensor]) -> None:
        """Make each ``parameter.grad`` the static one, with the value that it had, or zero.

        Between two backwards, users, Lightning's loop and its validation set gradients to None or
        to other tensors.
        """
        self._cleared = [p for p in parameters if p.grad is None]
        self._new = [p for p in parameters if p not in self._grads]
        for parameter in parameters:
            static = self._grads.get(parameter)
            if static is None:
                static = torch.zeros_like(parameter, requires_grad=False)
                self._grads[parameter] = static
            if parameter.grad is not None and parameter.grad is not static:
                static.copy_(parameter.grad)
            parameter.grad = static
        if self._cleared:
            torch._foreach_zero_([self._grads[p] for p in self._cleared])

    @contextmanager
    def capture_backward(self, parameters: list[Tensor]) -> Iterator[None]:
        """Wrap the captured backward; then reduce ``parameters`` to those that get a gradient."""
        before = [(p, self._grads[p], self._grads[p]._version) for p in parameters]
        yield
        parameters[:] = [p for p, grad, version in before if grad._version != version]
        for parameter in set(self._cleared).difference(parameters):
            parameter.grad = None
        # Older gradients stay: graphs of other signatures may add to them.
        for parameter in set(self._new).difference(parameters):
            self._grads.pop(parameter)

    def capture_forward(self) -> AbstractContextManager[None]:
        """Wrap the captured forward; does nothing."""
        return nullcontext()

    def begin_forward(self) -> None:
        """Do nothing before a forward is captured or replayed."""

    open_backward = end_forward = end_backward = begin_forward

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(grad.nbytes for grad in self._grads.values())


class CapturedStep:
    """A training step in two graphs, with the work of Lightning between forward and backward.

    The forward graph ends with the output of ``training_step``. Lightning gets a copy of this
    output, whose loss is the first node of a new small autograd graph. So Lightning divides the
    loss by the accumulation, scales it for 16-bit floats and calls hooks with it as ever. The
    gradient that arrives at the copy is the input of the backward graph.

    Args:
        graphs: the graphs of the forward and of the backward, both empty.
        bookkeeping: prepares gradients before each graph; for `zero3`, the engine's whole state.
        module: the module that is trained.
        device: the device of the training.
    """

    def __init__(
        self,
        graphs: tuple[Graph, Graph],
        bookkeeping: StaticGradients | ReplayedStep,
        module: LightningModule,
        device: torch.device,
    ) -> None:
        self._forward, self._backward = graphs
        self._bookkeeping, self._module, self._device = bookkeeping, module, device
        self._tape = LogTape()
        self._loss_copy: Tensor | None = None  # the loss that Lightning got
        self._is_noisy = False  # two replays of the same give other bits

    def capture_forward(self, batch: Any, rest: tuple, step: Callable[..., Any]) -> None:
        """Capture ``step(batch, *rest)``, where ``step`` is the strategy's ``training_step``."""
        self._inputs = StaticInputs(batch)
        self._bookkeeping.begin_forward()
        with (
            naming_failure("the forward of the training step"),
            self._forward.capture(),
            self._bookkeeping.capture_forward(),
            self._tape.record(self._module),
        ):
            self._output = step(self._inputs.batch, *rest)
        loss = loss_of(self._output)
        assert loss is not None
        self._loss: Tensor | None = loss  # until its backward is captured
        self._loss_grad = torch.zeros_like(loss, requires_grad=False)
        # The autograd graph does not show leaves inside of re-entrant checkpoints, so all trained
        # parameters are candidates. Capturing the backward removes those without a gradient.
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._leaves = list(dict.fromkeys([*leaves_of(loss), *parameters]))
        self._output = apply_to_collection(self._output, Tensor, Tensor.detach)

    def copy_batch(self, batch: Any) -> None:
        """Copy the next batch, of the same signature, into the static inputs."""
        self._inputs.copy_from(batch)

    def replay_forward(self) -> Any:
        """Replay the forward and its logging; return the output, in memory of its own."""
        self._repeat_forward()
        self._tape.play(self._module)
        output = apply_to_collection(self._output, Tensor, Tensor.clone)
        self._loss_copy = loss_of(output).requires_grad_()
        return output

    def replay_backward(self, run: Callable[[], None]) -> None:
        """Replay the backward; the first call captures it.

        Args:
            run: runs the eager backward, from what Lightning made of the loss to the loss's copy.
        """
        loss_copy, self._loss_copy = self._loss_copy, None
        self._bookkeeping.open_backward()
        run()
        if loss_copy is None or loss_copy.grad is None:
            return  # the user's `backward` computed no gradient of the loss
        self._repeat_backward(loss_copy.grad)

    def _repeat_forward(self) -> None:
        self._bookkeeping.begin_forward()
        self._forward.replay()
        self._bookkeeping.end_forward()

    def _repeat_backward(self, loss_grad: Tensor) -> None:
        self._loss_grad.copy_(loss_grad)
        self._bookkeeping.begin_backward(self._leaves)
        if self._loss is not None:
            loss, self._loss = self._loss, None
            with (
                naming_failure("the backward of the training step"),
                self._backward.capture(),
                self._bookkeeping.capture_backward(self._leaves),
            ):
                torch.autograd.backward(loss, self._loss_grad)
        self._backward.replay()
        self._bookkeeping.end_backward()

    def compare(
        self,
        eager: KeptRun,
        is_first: bool,
        engine: Zero3Engine | None,
    ) -> str | None:
        """Replay an eager micro-batch that is over; return in words the first difference, or None.

        What the eager run left stays.

        Args:
            eager: the run, whose batch is in the static inputs.
            is_first: whether to look, by a second replay, if the kernels give the same bits again.
            engine: the engine of `zero3`, if there is one.
        """
        end = States(self._module, self._device), Gradients(self._module, engine)

        def replay() -> dict[str, Any]:
            eager.before_forward.restore()
            self._repeat_forward()
            found = self._tape.values() | values_in(self._output)
            after_forward = States(self._module, self._device)
            eager.before_backward.restore()
            eager.gradients.restore(as_zeros=True)
            with nullcontext() if engine is None else engine.backward():
                self._bookkeeping.open_backward()
                loss_grad = eager.loss_grad
                self._repeat_backward(self._loss_grad if loss_grad is None else loss_grad)
            gradients = Gradients(self._module, engine).values
            after = States(self._module, self._device), gradients
            return all_results(found, after_forward, *after)

        found = replay()
        if is_first:
            self._is_noisy = first_difference(found, replay()) is not None
        for each in end:
            each.restore()
        return first_difference(found, eager.results, noisy=self._is_noisy)

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs."""
        return self._inputs.nbytes

    def reset(self) -> None:
        """Free the graphs."""
        self._forward.reset()
        self._backward.reset()
        self._loss = self._loss_copy = None


@contextmanager
def naming_failure(what: str) -> Iterator[None]:
    """Wrap the capture of ``what``: an error names it.

    Raises:
        RuntimeError: replaces a `RuntimeError` of the body, after which CUDA cannot go on.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"CUDAGraphStep: capturing {what} failed: it does something that no graph can hold and"
            " that eager steps did not show (see the error above). Run without `CUDAGraphStep`, or"
            " choose the modules that are captured, `CUDAGraphStep(modules=...)`."
        ) from error


def leaves_of(*outputs: Tensor) -> list[Tensor]:
    """Return the tensors whose ``grad`` a backward of ``outputs`` can add to."""
    found, seen, waiting = [], set(), [t.grad_fn for t in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # torch's `AccumulateGrad`
            found.append(node.variable)
        waiting += [next_node for next_node, _ in node.next_functions]
    return found
