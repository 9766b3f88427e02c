"""The engine's own operations, in the middle of a user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
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
