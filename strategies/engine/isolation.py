"""The engine's own operations, in the middle of a user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ..support.torch_internals import DisableFuncTorch, DisableTorchFunctionSubclass


@contextmanager
def isolated() -> Iterator[None]:
    """Inside nothing is recorded: not by autograd, transforms of torch.func or selective
    checkpoints, which count operations.

    Nor does it happen in the place of what is told: modes of torch's own fake tensors would leave a
    buffer as it is. What is unsharded under ``inference_mode`` may be used outside of it.
    """
    with (
        _disable_current_modes()
        if any(map(_takes_over, _get_current_dispatch_mode_stack()))
        else nullcontext(),
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(),
        DisableFuncTorch(),
        torch.no_grad(),
    ):
        yield


def _takes_over(mode: TorchDispatchMode) -> bool:
    """A selective checkpoint, or fake tensors, their tracing and functionalization, which have a
    key of torch's.
    """
    return (
        type(mode).__module__ == "torch.utils.checkpoint"
        or getattr(mode, "_mode_key", None) is not None
    )


def connected(value: Tensor, original: Tensor) -> Tensor:
    """``value`` as autograd's result of ``original``, which has other memory; to be called
    :func:`isolated`.
    """
    # A transform that runs has not wrapped the original. A node of torch's own, not of a Python
    # function: it outlives the copy, as whoever looks for `p.expand_as(p).grad_fn.next_functions`
    # needs it.
    with (
        torch.enable_grad(),
        temporarily_clear_interpreter_stack(),
        DisableTorchFunctionSubclass(),
    ):
        # The backward of `to` takes no sparse gradients.
        copy = original.clone() if original.dtype == value.dtype else original.to(value.dtype)
        Tensor.data.__set__(copy, value)  # type: ignore[attr-defined]  # a descriptor
    return copy
