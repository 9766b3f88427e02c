"""`CapturedCall`: forward and backward of a single module as graphs, with autograd around them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version, saved_tensors_hooks

from .captured_step import leaves_of
from .compare import States, first_difference, generators_of
from .device import CudaGraphs, SoftwareGraphs
from .eager_run import EagerRun, all_results, values_in
from .fingerprint import address
from .static_inputs import StaticInputs, tensors_in


class _Token:
    """Lives as long as the autograd graph of one replay."""


class SavedParameters:
    """Finds the parameters whose values autograd saves for a backward.

    Args:
        parameters: the parameters of a module.

    Attributes:
        found: those parameters that autograd saved, themselves or as views.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters, self.found = parameters, list[Tensor]()

    @contextmanager
    def track_saves(self) -> Iterator[None]:
        """Wrap the forward; hooks for saved tensors that others have set are still called."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (
            lambda t: t,
            lambda t: t,
        )

        def note_and_pack(tensor: Tensor) -> Any:
            place = address(tensor)
            for p in self._parameters:
                if address(p) <= place < address(p) + p.nbytes and all(
                    p is not known for known in self.found
                ):
                    self.found.append(p)
            return pack(tensor)

        with saved_tensors_hooks(note_and_pack, unpack):
            yield


class CapturedCall:
    """Forward and backward of one module for inputs of one signature, in memory of their own.

    Neither graph exchanges anything with other ranks. A backward gets the values of sharded weights
    from autograd, as an eager backward does. So ranks need not agree on which calls they capture
    and when: around each call all of them gather and reduce the same.

    Args:
        name: the module's name.
        module: the module.
        graphs: makes the graphs.
        device: the device of the training.
        offsets: see :class:`~.random_states.RandomStates`.
        needs_gradient: for each output that requires a gradient, whether the backward gets one.
        wait_for_weights: waits for weights that are on their way to this rank.

    Attributes:
        replays: number of replayed forwards.
        saved_parameters: parameters whose values the backward graph reads.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        graphs: CudaGraphs | SoftwareGraphs,
        device: torch.device,
        offsets: list[int],
        needs_gradient: list[bool],
        wait_for_weights: Callable[[], None],
    ) -> None:
        # hazard: between this forward and its backward other graphs are replayed, which would
        # overwrite a shared pool.
        graphs, generators = graphs.with_own_pool(), generators_of(module, device)
        self._forward, self._backward = graphs.make_pair(generators, offsets)
        self.name, self._module, self._wait_for_weights = name, module, wait_for_weights
        self.needs_gradient = needs_gradient
        self._pending_token: weakref.ref[_Token] | None = None
        self.replays = 0

    def capture(self, forward: Callable[..., Any], inputs: Any) -> None:
        """Capture ``forward`` of ``inputs``, (args, kwargs), and its backward."""
        self._inputs = StaticInputs(inputs)
        args, kwargs = self._inputs.batch
        parameters = list(self._module.parameters())
        self._places = list(map(address, parameters))
        saved = SavedParameters(parameters)
        versions = [(buffer, buffer._version) for buffer in self._module.buffers()]
        # hazard: the graph would always read casts of an earlier run, made of this step's weights.
        torch.clear_autocast_cache()
        with self._forward.capture(), saved.track_saves():
            output = forward(*args, **kwargs)
        # hazard: a later run would find its casts in the graph's memory.
        torch.clear_autocast_cache()
        self._written_buffers = [b for b, version in versions if b._version != version]
        self._outputs = tensors_in(output)
        self._requires_grad = [t.requires_grad for t in self._outputs]
        differentiable = [t for t in self._outputs if t.requires_grad]
        roots = [t for t, has in zip(differentiable, self.needs_gradient, strict=True) if has]
        self._root_grads = [torch.zeros_like(t, requires_grad=False) for t in roots]
        leaves = [t for t in [*tensors_in(self._inputs.batch), *parameters] if t.requires_grad]
        self._leaf_grads: tuple[Tensor | None, ...] = ()
        if roots:
            with self._backward.capture():
                self._leaf_grads = torch.autograd.grad(
                    roots, leaves, self._root_grads, allow_unused=True
                )
        self.output = apply_to_collection(output, Tensor, Tensor.detach)
        self._outputs = [t.detach() for t in self._outputs]
        self.saved_parameters = saved.found
        # Where the backward graph reads them. Torch's own `data`, not that of a subclass: values
        # that a replay writes there are no change of the parameter.
        self._weights_in_graph = [_data_of(p) for p in saved.found]

    @property
    def is_busy(self) -> bool:
        """Whether a replayed forward still needs the graph's memory for its backward."""
        return self._pending_token is not None and self._pending_token() is not None

    @property
    def finds_weights(self) -> bool:
        """Whether the parameters lie where the graph reads them."""
        return self._places == list(map(address, self._module.parameters()))

    def replay_forward(self, inputs: Any) -> tuple[list[Tensor], list[bool], _Token]:
        """Return the outputs in memory of their own, which require gradients, and a token.

        The call is busy as long as the token lives, or until the backward is replayed.
        """
        self._inputs.copy_from(inputs)
        self._forward.replay()
        token = _Token()
        self._pending_token = weakref.ref(token)
        self.replays += 1
        # The engine's code that keeps buffers equal on all ranks sees writes by versions.
        increment_version(self._written_buffers)
        return [t.clone() for t in self._outputs], self._requires_grad, token

    def takes(self, gradients: tuple[Tensor | None, ...]) -> bool:
        """Return whether the outputs get the gradients that they got in the eager runs."""
        incoming = [g for g, needed in zip(gradients, self._requires_grad, strict=True) if needed]
        return [g is not None for g in incoming] == self.needs_gradient

    def replay_backward(
        self, gradients: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs and parameters that require one.

        Args:
            gradients: the gradients of the outputs.
            weights: values of ``saved_parameters``. They may have been gathered into other memory
                than the graph reads.
        """
        pairs = zip(gradients, self._requires_grad, strict=True)
        present = [g for g, needed in pairs if needed and g is not None]
        for static, gradient in zip(self._root_grads, present, strict=True):
            static.copy_(gradient)
        moved = [
            (place, weight)
            for place, weight in zip(self._weights_in_graph, weights, strict=True)
            if address(place) != address(weight)
        ]
        if moved:
            # hazard: another unit may be in the memory that the graph reads; its weights may still
            # arrive, or other ranks may read them.
            self._wait_for_weights()
        overwritten = [place.clone() for place, _ in moved]
        for place, weight in moved:
            place.copy_(weight)
        self._backward.replay()
        for (place, _), values in zip(moved, overwritten, strict=True):
            place.copy_(values)
        self._pending_token = None
        return [None if g is None else g.clone() for g in self._leaf_grads]

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of both graphs."""
        return self._inputs.nbytes + sum(t.nbytes for t in self._root_grads)

    def reset(self) -> None:
        """Free the graphs, unless a backward still needs them; autograd's node frees those."""
        if not self.is_busy:
            self._forward.reset()
            self._backward.reset()


class ModuleRun:
    """One run of a module as a node of autograd's graph: eager, replayed, or both.

    Args:
        module: the module.
        device: the device of the training.
        graphs: the graphs that are replayed.
        eager: takes notes of an eager run of ``program``.
        program: the module's own ``forward``.
        tell: gets the first difference between the two, when the backward is over.

    Attributes:
        given: for each output that needs a gradient, whether it got one.
        foreign_leaves: other tensors than inputs and parameters that get gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        graphs: CapturedCall | None,
        eager: EagerRun | None,
        program: Callable[..., Any],
        tell: Callable[[str], None],
    ) -> None:
        self._module, self._device, self._graphs = module, device, graphs
        self._eager, self._program, self._tell = eager, program, tell
        self.saved_parameters = [] if graphs is None else graphs.saved_parameters
        self.given: list[bool] = []
        self.foreign_leaves: list[Tensor] = []

    def __call__(self, inputs: Any) -> Any:
        """Return what the module returns for ``inputs``, with a history for autograd."""
        before = None if self._graphs is None or self._eager is None else self._states()
        if self._graphs is not None:
            self._results, self._requires_grad, self._token = self._graphs.replay_forward(inputs)
            self._number, self._output = self._graphs.replays, self._graphs.output
        if before is not None:
            self._replayed = values_in(self._output), self._states()
            before.restore()
        if self._eager is not None:
            self._run_eagerly(self._eager, inputs)
        candidates = [*tensors_in(inputs), *self._module.parameters()]
        leaves = [t for t in candidates if t.requires_grad] + self.foreign_leaves
        results = iter(_Node.apply(self, *leaves))
        return apply_to_collection(self._output, Tensor, lambda _: next(results))

    def _states(self) -> States:
        return States(self._module, self._device)

    def _run_eagerly(self, eager: EagerRun, inputs: Any) -> None:
        args, kwargs = apply_to_collection(
            inputs, Tensor, lambda t: t.detach().requires_grad_(t.requires_grad)
        )
        self._output = eager.forward(self._program, *args, **kwargs)
        self._after_eager, self._outputs = self._states(), tensors_in(self._output)
        candidates = [*tensors_in((args, kwargs)), *self._module.parameters()]
        self._sources = [t for t in candidates if t.requires_grad]
        known = set(map(id, self._sources))
        self.foreign_leaves = [t for t in leaves_of(*self._outputs) if id(t) not in known]
        self._requires_grad = [t.requires_grad for t in self._outputs]
        self._results = [t.detach().clone() for t in self._outputs]
        self.given[:] = [False] * sum(self._requires_grad)

    def take_results(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of the output, and which of them require gradients."""
        results, self._results = self._results, []
        return results, self._requires_grad

    def backward(
        self, gradients: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        """Return the gradients of inputs and parameters that require one.

        Raises:
            RuntimeError: other outputs get gradients than in the eager runs, or the module ran
                again meanwhile.
        """
        if self._graphs is not None and self._number != self._graphs.replays:
            raise RuntimeError(
                f"Module {self._graphs.name!r}, which is captured, ran again before a second"
                " backward of its earlier run. Run backward first."
            )
        takes = self._graphs is not None and self._graphs.takes(gradients)
        if self._eager is None:
            assert self._graphs is not None
            if takes:
                return self._graphs.replay_backward(gradients, weights)
            raise RuntimeError(
                f"Module {self._graphs.name!r}: other outputs get gradients now than in its eager"
                " runs. Leave the module out of `CUDAGraphStep(modules=...)`."
            )
        if self._graphs is None:
            return self._backward_eagerly(gradients)
        if not takes:
            self._tell("other outputs get gradients than in its earlier runs")
            return self._backward_eagerly(gradients)
        before = self._states()
        replayed, after = self._graphs.replay_backward(gradients, weights), self._states()
        before.restore()
        found = self._backward_eagerly(gradients)
        # Autograd converts what a node returns to the dtype of the parameter.
        converted = [
            r if r is None or f is None else r.to(f.dtype)
            for r, f in zip(replayed, found, strict=False)
        ]
        mine = all_results(*self._replayed, after, _by_name(converted))
        eager = (
            self._eager.values,
            self._after_eager,
            self._states(),
            _by_name(found[: len(converted)]),
        )
        difference = first_difference(mine, all_results(*eager))
        if self._eager.problems or difference is not None:
            self._tell(self._eager.problems[0] if self._eager.problems else str(difference))
        return found

    def _backward_eagerly(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        assert self._eager is not None
        pairs = [(t, g) for t, g in zip(self._outputs, gradients, strict=True) if t.requires_grad]
        self.given[:] = [gradient is not None for _, gradient in pairs]
        roots = [(t, g) for t, g in pairs if g is not None]
        sources = [*self._sources, *self.foreign_leaves]
        found: list[Tensor | None] = [None] * len(sources)

        def differentiate() -> None:
            outputs, given = zip(*roots, strict=True)
            # Retained, as the user's backward may be.
            found[:] = torch.autograd.grad(
                outputs, sources, given, retain_graph=True, allow_unused=True
            )

        if roots:
            self._eager.backward(differentiate)
        return found


def _by_name(gradients: list[Tensor | None]) -> dict[str, Tensor | None]:
    return {f"the gradient of input or parameter {k}": g for k, g in enumerate(gradients)}


def _data_of(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: ModuleRun, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs, requires_grad = run.take_results()
        ctx.run = run
        ctx.mark_non_differentiable(
            *[t for t, needed in zip(outputs, requires_grad, strict=True) if not needed]
        )
        ctx.set_materialize_grads(False)
        # Autograd compares the versions of saved tensors; the engine of `zero3` gathers them again.
        ctx.save_for_backward(*run.saved_parameters)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        weights = ctx.saved_tensors  # raises if one of them was written since the forward
        return None, *ctx.run.backward(gradients, weights)
