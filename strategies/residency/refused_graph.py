"""What `backward(create_graph=True)` leaves in `p.grad`: in torch it has a graph, here an error
says that it has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _RefusedGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, marker: Tensor, name: str) -> Tensor:
        ctx.name = name
        ctx.mark_dirty(grad)
        return grad

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"The gradient of parameter {ctx.name!r} that `backward(create_graph=True)` left has no"
            " graph: it is stored where gradients are summed. For a penalty on gradients take"
            " `torch.autograd.grad(loss, parameters, create_graph=True)`."
        )


def refusing_graph(grad: Tensor, name: str) -> Tensor:
    """``grad``, in the same memory, with a graph through which nobody can differentiate."""
    with torch.enable_grad():
        return _RefusedGraph.apply(grad.detach(), torch.zeros((), requires_grad=True), name)
