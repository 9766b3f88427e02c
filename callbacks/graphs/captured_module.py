"""`CapturedCall`: forward and backward of a single module as graphs, with autograd around them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version, saved_tensors_hooks

from .captured_step import leaves_of
from .device import CudaGraphs, SoftwareGraphs
from .frozen_values import address
from .static_inputs import StaticInputs, tensors_in
from .watch import Watch


class _Token:
    """Lives as long as the autograd graph of one replay."""


class SavedParameters:
    """Finds the parameters whose values autograd saves for a backward.

    Args:
        parameters: the parameters of a module.

    Attributes:
        found: those parameters that autograd saved, themselves or as views.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
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
        graphs: makes the graphs.
        watch: what was noted in an eager run.
        wait_for_weights: waits for weights that are on their way to this rank.

    Attributes:
        needs_gradient: for each output that requires a gradient, whether the backward gets one.
        replays: number of replayed forwards.
        saved_parameters: parameters whose values the backward graph reads.
        foreign_leaves: tensors that get gradients in the backward and are neither inputs nor
            parameters of the module: a replay would lose their gradients.
    """

    def __init__(
        self,
        name: str,
        graphs: CudaGraphs | SoftwareGraphs,
        watch: Watch,
        wait_for_weights: Callable[[], None],
    ) -> None:
        # hazard: between this forward and its backward other graphs are replayed, which would
        # overwrite a shared pool.
        graphs = graphs.with_own_pool()
        self._forward, self._backward = graphs.make_pair(watch.generators, watch.random.offsets)
        self.name, self._watch, self._wait_for_weights = name, watch, wait_for_weights
        self.needs_gradient = list(watch.given)
        self._pending_token: weakref.ref[_Token] | None = None
        self.replays = 0

    def capture(self, forward: Callable[..., Any], inputs: Any, module: nn.Module) -> None:
        """Capture ``forward`` of ``inputs``, (args, kwargs), and its backward.

        Raises:
            CaptureError: the backward, which is watched, does what a graph cannot repeat.
        """
        self._inputs = StaticInputs(inputs)
        args, kwargs = self._inputs.batch
        parameters = list(module.parameters())
        saved = SavedParameters(parameters)
        versions = [(buffer, buffer._version) for buffer in module.buffers()]
        # hazard: the graph would always read casts of an earlier run, made of this step's weights.
        torch.clear_autocast_cache()
        with (
            self._forward.capture(),
            self._watch.random.track_calls(forward=True),
            saved.track_saves(),
        ):
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
        known = set(map(id, leaves))
        found = [*leaves_of(*roots), *(t for t in roots if t.is_leaf)]
        self.foreign_leaves = [leaf for leaf in found if id(leaf) not in known]
        self._leaf_grads: tuple[Tensor | None, ...] = ()
        if roots:
            with (
                self._backward.capture(),
                self._watch.watching(None, forward=False, capturing=True),
            ):
                self._leaf_grads = torch.autograd.grad(
                    roots, leaves, self._root_grads, allow_unused=True
                )
        self._output_structure = apply_to_collection(output, Tensor, Tensor.detach)
        self._outputs = [t.detach() for t in self._outputs]
        self.saved_parameters = saved.found
        # Where the backward graph reads them. Torch's own `data`, not that of a subclass: values
        # that a replay writes there are no change of the parameter.
        self._weights_in_graph = [Tensor.data.__get__(p) for p in saved.found]

    @property
    def is_busy(self) -> bool:
        """Whether a replayed forward still needs the graph's memory for its backward."""
        return self._pending_token is not None and self._pending_token() is not None

    def __call__(self, inputs: Any, parameters: list[Tensor]) -> Any:
        """Return what the module returns for ``inputs``, with a history for autograd."""
        leaves = [t for t in [*tensors_in(inputs), *parameters] if t.requires_grad]
        results = iter(_Replay.apply(self, inputs, *leaves))
        return apply_to_collection(self._output_structure, Tensor, lambda _: next(results))

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

    def replay_backward(
        self, gradients: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs and parameters that require one.

        Args:
            gradients: the gradients of the outputs.
            weights: values of ``saved_parameters``. They may have been gathered into other memory
                than the graph reads.

        Raises:
            RuntimeError: other outputs get gradients than in the eager runs.
        """
        incoming = [g for g, needed in zip(gradients, self._requires_grad, strict=True) if needed]
        if [g is not None for g in incoming] != self.needs_gradient:
            raise RuntimeError(
                f"Module {self.name!r}: other outputs get gradients now than in its eager runs."
                " Leave the module out of `CUDAGraphStep(modules=...)`."
            )
        present = [g for g in incoming if g is not None]
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
        """Free the graphs."""
        self._forward.reset()
        self._backward.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CapturedCall, inputs: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs, requires_grad, ctx.token = call.replay_forward(inputs)
        ctx.call, ctx.replay = call, call.replays
        ctx.mark_non_differentiable(
            *[t for t, needed in zip(outputs, requires_grad, strict=True) if not needed]
        )
        ctx.set_materialize_grads(False)
        # Autograd compares the versions of saved tensors; the engine of `zero3` gathers them again.
        ctx.save_for_backward(*call.saved_parameters)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        weights = ctx.saved_tensors  # raises if one of them was written since the forward
        if ctx.replay != ctx.call.replays:
            raise RuntimeError(
                f"Module {ctx.call.name!r}, which is captured, ran again before a second backward"
                " of its earlier run. Run backward first."
            )
        return None, None, *ctx.call.replay_backward(gradients, weights)
