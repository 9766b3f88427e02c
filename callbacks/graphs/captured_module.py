"""Forward and backward of a single module as graphs, with autograd around them."""

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
    """Parameters whose values autograd saves for a backward.

    Args:
        parameters: of a module.

    Attributes:
        found: those of them that it saved, or views of them.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters, self.found = parameters, list[Tensor]()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around the forward; hooks that others have set go on to be called."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (
            lambda t: t,
            lambda t: t,
        )

        def note(tensor: Tensor) -> Any:
            place = address(tensor)
            for p in self._parameters:
                if address(p) <= place < address(p) + p.nbytes and all(
                    p is not known for known in self.found
                ):
                    self.found.append(p)
            return pack(tensor)

        with saved_tensors_hooks(note, unpack):
            yield


class CapturedCall:
    """Forward and backward of one module for inputs of one signature, in memory of their own.

    Neither exchanges anything with other ranks; what a backward reads of sharded weights is looked
    up as autograd does in an eager one. So ranks need not agree on what they capture and when:
    around it all of them gather and reduce the same.

    Args:
        name: of the module.
        graphs: makes graphs.
        watch: of an eager run.
        settle: waits for weights that are on their way to this rank.

    Attributes:
        others: tensors whose gradients a replay would lose: neither inputs nor the module's own
            parameters.
    """

    def __init__(
        self,
        name: str,
        graphs: CudaGraphs | SoftwareGraphs,
        watch: Watch,
        settle: Callable[[], None],
    ) -> None:
        graphs = graphs.apart()  # between its forward and its backward other graphs are replayed
        self._forward, self._backward = graphs.make_pair(watch.generators, watch.random.offsets)
        self.name, self._watch, self.given, self._settle = name, watch, list(watch.given), settle
        self._replay: weakref.ref[_Token] | None = None
        self.count = 0  # of replays

    def capture(self, forward: Callable[..., Any], inputs: Any, module: nn.Module) -> None:
        """Record ``forward`` of ``inputs``, (args, kwargs), and its backward, which is watched,
        too.
        """
        self._inputs = StaticInputs(inputs)
        args, kwargs = self._inputs.batch
        parameters = list(module.parameters())
        saved, versions = SavedParameters(parameters), [(b, b._version) for b in module.buffers()]
        # hazard: casts that another run made would stay those of this step's weights
        torch.clear_autocast_cache()
        with self._forward.capture(), self._watch.random.following(forward=True), saved.watch():
            output = forward(*args, **kwargs)
        # hazard: another run would find its casts in the graph's memory
        torch.clear_autocast_cache()
        self._written = [b for b, version in versions if b._version != version]
        self._outputs = tensors_in(output)
        self._needs_grad = [t.requires_grad for t in self._outputs]
        ends = [
            t
            for t, given in zip(
                [t for t in self._outputs if t.requires_grad], self.given, strict=True
            )
            if given
        ]
        self._seeds = [torch.zeros_like(t, requires_grad=False) for t in ends]
        self._starts = [
            t for t in [*tensors_in(self._inputs.batch), *parameters] if t.requires_grad
        ]
        known = set(map(id, self._starts))
        leaves = [*leaves_of(*ends), *(t for t in ends if t.is_leaf)]
        self.others = [leaf for leaf in leaves if id(leaf) not in known]
        self._gradients: tuple[Tensor | None, ...] = ()
        if ends:
            with (
                self._backward.capture(),
                self._watch.watching(None, forward=False, capturing=True),
            ):
                self._gradients = torch.autograd.grad(
                    ends, self._starts, self._seeds, allow_unused=True
                )
        self._structure = apply_to_collection(output, Tensor, Tensor.detach)
        self._outputs = [t.detach() for t in self._outputs]
        self.read = saved.found
        # Torch's own `data`: what is put there for a replay is no change of the parameter.
        self._places = [Tensor.data.__get__(p) for p in saved.found]  # where the graphs read them

    @property
    def is_busy(self) -> bool:
        """A replay waits for its backward, which needs what lies in the graph's memory."""
        return self._replay is not None and self._replay() is not None

    def __call__(self, inputs: Any, parameters: list[Tensor]) -> Any:
        """What the module returns for ``inputs``, with a history for autograd."""
        given = [t for t in [*tensors_in(inputs), *parameters] if t.requires_grad]
        results = iter(_Replay.apply(self, inputs, *given))
        return apply_to_collection(self._structure, Tensor, lambda _: next(results))

    def replay_forward(self, inputs: Any) -> tuple[list[Tensor], list[bool], _Token]:
        """Outputs in memory of their own; which need gradients; and what shows that they are
        needed.
        """
        self._inputs.fill(inputs)
        self._forward.replay()
        token = _Token()
        self._replay = weakref.ref(token)
        self.count += 1
        increment_version(self._written)  # seen by those who keep buffers equal on all ranks
        return [t.clone() for t in self._outputs], self._needs_grad, token

    def replay_backward(
        self, gradients: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        """Gradients of the inputs and parameters that need one.

        Args:
            gradients: of the outputs.
            weights: values of the parameters in ``read``, which may have been gathered elsewhere
                than where the graph reads.
        """
        wanted = [g for g, needed in zip(gradients, self._needs_grad, strict=True) if needed]
        if [g is not None for g in wanted] != self.given:
            raise RuntimeError(
                f"Not the outputs of module {self.name!r} that got gradients in its eager runs get"
                " them now. Leave the module out of `CUDAGraphStep(modules=...)`."
            )
        for seed, gradient in zip(self._seeds, [g for g in wanted if g is not None], strict=True):
            seed.copy_(gradient)
        moved = [
            (place, weight)
            for place, weight in zip(self._places, weights, strict=True)
            if address(place) != address(weight)
        ]
        if moved:
            # hazard: another unit may be there now, whose weights still arrive, or are read by
            # other ranks
            self._settle()
        others = [place.clone() for place, _ in moved]
        for place, weight in moved:
            place.copy_(weight)
        self._backward.replay()
        for (place, _), other in zip(moved, others, strict=True):
            place.copy_(other)
        self._replay = None
        return [None if g is None else g.clone() for g in self._gradients]

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs of both graphs."""
        return self._inputs.nbytes + sum(t.nbytes for t in self._seeds)

    def reset(self) -> None:
        """Free the graphs."""
        self._forward.reset()
        self._backward.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CapturedCall, inputs: Any, *given: Tensor) -> tuple[Tensor, ...]:
        outputs, needs_grad, ctx.token = call.replay_forward(inputs)
        ctx.call, ctx.count = call, call.count
        ctx.mark_non_differentiable(
            *[t for t, needed in zip(outputs, needs_grad, strict=True) if not needed]
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.read)  # autograd compares their versions, and finds them
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        weights = ctx.saved_tensors  # raises if they were written since
        if ctx.count != ctx.call.count:
            raise RuntimeError(
                f"Module {ctx.call.name!r}, which is captured, ran again before a second backward"
                " of its earlier run. Run backward first."
            )
        return None, None, *ctx.call.replay_backward(gradients, weights)
