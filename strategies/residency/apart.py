"""The engine's own operations, in the middle of a user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


@contextmanager
def apart() -> Iterator[None]:
    """Inside nothing is recorded: not by autograd, transforms of torch.func or selective checkpoints, which count operations.

    What is gathered under ``inference_mode`` may be used outside of it.
    """
    counted = any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())
    with (
        _disable_current_modes() if counted else nullcontext(),
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(),
        torch._C._DisableFuncTorch(),
        torch.no_grad(),
    ):
        yield


def connected(value: Tensor, original: Tensor) -> Tensor:
    """``value`` as autograd's result of ``original``, which has other memory; to be called :func:`apart`."""
    # A transform that runs has not wrapped the original. A node of torch's own, not of a Python function: it outlives the copy,
    # as whoever looks for `p.expand_as(p).grad_fn.next_functions` needs it.
    with torch.enable_grad(), temporarily_clear_interpreter_stack(), torch._C.DisableTorchFunctionSubclass():
        # The backward of `to` takes no sparse gradients.
        copy = original.clone() if original.dtype == value.dtype else original.to(value.dtype)
    copy.data.copy_(value)
    return copy


class _RefusedGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, marker: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.mark_dirty(grad)
        return grad

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"The gradient of parameter {ctx.name!r} that `backward(create_graph=True)` left is summed over the ranks, and "
            "has no graph. For a penalty on gradients take `torch.autograd.grad(loss, parameters, create_graph=True)`."
        )


def refusing_graph(grad: Tensor, name: str) -> Tensor:
    """``grad``, in the same memory, with a graph as in torch, through which nobody can differentiate."""
    with torch.enable_grad():
        return _RefusedGraph.apply(grad.detach(), torch.zeros((), requires_grad=True), name)
