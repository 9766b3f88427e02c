"""What an optimizer's param groups hold: this rank's elements, so that what is computed over all of them is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .resting import ResidencyError

_NORMS = frozenset(
    "norm dist renorm linalg_norm linalg_vector_norm _foreach_norm _foreach_powsum sum nansum mean nanmean dot vdot inner "
    "max min amax amin aminmax _foreach_max std var std_mean var_mean median quantile argmax argmin prod logsumexp softmax "
    "all any count_nonzero nonzero matmul __matmul__ mm mv normalize cosine_similarity".split()
)
_JOINS = ("cat", "concat", "concatenate", "hstack", "stack")


class FlatGradient(Tensor):
    """The gradient of a flat tensor, as the optimizer sees it. A norm of it would be of this rank's elements alone.

    So would one of what is computed from it element by element, or of several, which therefore has the same class.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Compute, or raise."""
        name = getattr(func, "__name__", "")
        if name in _NORMS:
            raise ResidencyError(
                f"`{name}` would be of the elements that this rank holds: an optimizer's param groups hold flat shards. Use "
                "the module's parameters (`clip_grad_norm_(module.parameters(), ...)`, or their values in "
                "`with strategy.gathered(module):`), or `self.clip_gradients`."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
            kept = name in _JOINS or (args and getattr(result, "shape", ()) == getattr(args[0], "shape", None))
            return result.as_subclass(FlatGradient) if kept and type(result) is Tensor else result


class FlatParameter(nn.Parameter):
    """A flat tensor in a param group, except while its optimizer steps. What holds for its gradient holds for its values."""

    __torch_function__ = FlatGradient.__torch_function__
