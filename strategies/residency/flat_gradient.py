"""What an optimizer sees: this rank's elements of values and gradients. What is computed over all of them is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .functions import instances
from .home import ResidencyError

_NORMS = frozenset(
    "norm dist renorm linalg_norm linalg_vector_norm _foreach_norm _foreach_powsum sum nansum mean nanmean dot vdot inner "
    "max min amax amin aminmax _foreach_max std var std_mean var_mean median quantile argmax argmin prod logsumexp softmax "
    "all any count_nonzero nonzero matmul __matmul__ mm mv normalize cosine_similarity einsum tensordot linalg_vecdot "
    "mse_loss l1_loss smooth_l1_loss huber_loss pairwise_distance cdist topk kthvalue sort cumsum histc "
    "log_softmax softmin layer_norm group_norm rms_norm instance_norm batch_norm cumprod "
    "item tolist numpy __array__ equal allclose".split()
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of a GradScaler


class FlatGradient(Tensor):
    """The gradient of a flat tensor, as the optimizer sees it, and what is computed from it, or of several, by element."""

    what = "gradients"
    whose = ""  # of which parameters
    written: Callable[[], None] | None = None  # to be called when it was changed in place
    instead = "the module's parameters (`clip_grad_norm_(module.parameters(), ...)`), or `self.clip_gradients`"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Compute, or raise."""
        name = getattr(func, "__name__", "")
        given = instances((args, kwargs), FlatGradient) + instances((args, kwargs), FlatParameter)
        whose = next((each.whose for each in given if each.whose), "")
        if name in _NORMS:
            raise cls.refusal(name, whose)
        if name == _UNSCALE and dist.is_initialized() and dist.get_world_size() > 1:
            if sys._getframe(1).f_globals["__name__"] == "torch.amp.grad_scaler":  # others ask all ranks
                raise ResidencyError(
                    "A GradScaler would look for infinities in the gradients that this rank holds a shard of, and ranks would "
                    "skip steps that others take. Use Trainer(precision='16-mixed'), with manual optimization, too, or torch's "
                    "ShardedGradScaler."
                )
        if func == Tensor.data.__get__:
            func = Tensor.detach  # which counts what is written to it
        if func == Tensor.data.__set__:
            raise ResidencyError(
                f"`.data` of the flat {cls.what}{whose} cannot be set in an optimizer's param groups: others have their "
                "memory. Write to them in place (`p.grad.copy_(...)`), or assign another tensor (`p.grad = ...`)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            followed = [(each, each._version) for each in given if each.written is not None]
            result = func(*args, **kwargs or {})
            if name == _UNSCALE:
                increment_version(given)  # torch does not count it
            for each, version in followed:
                if each._version != version:
                    each.written()
            made = [each for each in (result if isinstance(result, tuple) else (result,)) if type(each) is Tensor]
            if any(each.numel() < given[0].numel() for each in made) and not name.startswith("new"):
                raise cls.refusal(name, whose)  # some of the elements, or computed over several
            if name.startswith("_foreach") and result is not None:
                return [cls.of(each, whose) for each in result]
            # torch.compile asks for `_base` until it is no view.
            shared = func is Tensor.detach and given[0].written or None
            return cls.of(result, whose, shared) if type(result) is Tensor and func != Tensor._base.__get__ else result

    @classmethod
    def refusal(cls, name: str, whose: str) -> ResidencyError:
        """What to raise when the function ``name`` would tell of one rank's elements alone."""
        return ResidencyError(
            f"`{name}` would be of the {cls.what}{whose} that this rank holds a shard of: an optimizer's param groups hold "
            f"flat shards. Use {cls.instead}."
        )

    @classmethod
    def of(cls, tensor: Tensor, whose: str, written: Callable[[], None] | None = None) -> FlatGradient:
        """``tensor``, of which parameters it is, and what to call when it was changed."""
        flat = Tensor.as_subclass(tensor, cls)
        flat.whose, flat.written = whose, written
        return flat


class FlatValues(FlatGradient):
    """The same of values."""

    what = "values"
    instead = "the module's parameters, between steps in `with strategy.gathered(module):`"


class FlatState(FlatGradient):
    """The same of the state that an optimizer keeps of each element."""

    what = "optimizer state"
    instead = (
        "`.as_subclass(torch.Tensor)` for what this rank has, and add it up over the ranks "
        "(`trainer.strategy.reduce(..., reduce_op='sum')`)"
    )


class FlatParameter(nn.Parameter):
    """A flat tensor in an optimizer's group while nobody steps."""

    whose = ""  # of which parameters
    asked: Callable[[nn.Parameter], None] | None = None  # to be called, with this tensor, before somebody looks at its gradient
    place = 0  # address of the gradient that was shown
    taken = False  # it was cleared since, and not put back
    had = False  # there was one when one was assigned last
    cleared: Callable[[nn.Parameter], None] | None = None  # ... when that was taken away, with this tensor
    assigned: Callable[[nn.Parameter], None] | None = None  # ... when another was put in its place
    written: Callable[[], None] | None = None  # ... when it was changed in place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Compute, or raise."""
        if func == Tensor.grad.__get__ and args[0].asked is not None and torch._C._current_graph_task_id() == -1:
            with torch._C.DisableTorchFunctionSubclass():
                args[0].asked(args[0])
        if func in (Tensor.grad.__set__, Tensor.grad.__delete__):
            clears = len(args) == 1 or args[1] is None
            with torch._C.DisableTorchFunctionSubclass():
                args[0].had = args[0].grad is not None
                args[0].taken = clears or (args[0].taken and args[1].data_ptr() != args[0].place)
            told = args[0].cleared if clears else args[0].assigned
            if told is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    func(*args)
                    return told(args[0])
        if func == Tensor.data.__set__:
            raise ResidencyError(
                "An optimizer's param groups hold flat shards, whose `.data` cannot be set: others have their memory. Write "
                "`p.copy_(...)` under `torch.no_grad()`, and keep a copy of what is to come back."
            )
        return FlatValues.__torch_function__(func, types, args, kwargs)


class CutParameter(FlatParameter):
    """A flat tensor that others have taken the place of: parameters in it had no gradient, and are apart since."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Raise."""
        given = instances((args, kwargs), CutParameter)
        if func == Tensor.__repr__:
            return f"<a flat tensor{given[0].whose} that was cut>"
        raise ResidencyError(
            f"A flat tensor{given[0].whose} was kept, and is not in `optimizer.param_groups` any more: it was cut where "
            "parameters had no gradient. Read the param groups each time."
        )


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """``method`` as long as its object lives: torch keeps what tensors have where the garbage collector cannot look."""
    find = WeakMethod(method)

    def call(*args: object) -> None:
        if (found := find()) is not None:
            found(*args)

    return call


def unguarded(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` of a flat tensor with ordinary tensors in the same memory, which can be saved for others to load."""
    return {key: value.as_subclass(Tensor) if isinstance(value, FlatState) else value for key, value in state.items()}
