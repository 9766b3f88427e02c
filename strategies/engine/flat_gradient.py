"""What an optimizer sees: this rank's elements of values and gradients. What is computed over all
of them is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .sharded import ResidencyError
from .torch_functions import COLLECTIVES, instances, written

_OF_THE_WHOLE = frozenset(
    "norm dist renorm linalg_norm linalg_vector_norm _foreach_norm _foreach_powsum sum nansum mean"
    " nanmean dot vdot inner max min amax amin aminmax _foreach_max std var std_mean var_mean"
    " median quantile argmax argmin prod logsumexp softmax all any count_nonzero nonzero matmul"
    " __matmul__ mm mv normalize cosine_similarity einsum tensordot linalg_vecdot mse_loss l1_loss"
    " smooth_l1_loss huber_loss pairwise_distance cdist topk kthvalue sort cumsum histc log_softmax"
    " softmin layer_norm group_norm rms_norm instance_norm batch_norm cumprod logcumsumexp argsort"
    # of one dimension `if p.grad.dim() > 1:` would never be so
    " msort flip roll cummax cummin item tolist numpy __array__ equal allclose"
    " dim ndimension ndim".split()
)
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of a GradScaler


class FlatGradient(Tensor):
    """The gradient of a flat tensor, as the optimizer sees it, and what is computed from it, or of
    several, by element.
    """

    what = "gradients"
    whose = ""  # of which parameters
    instead = (
        "the module's parameters (`clip_grad_norm_(module.parameters(), ...)`), or"
        " `self.clip_gradients`"
    )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compute, or raise."""
        name = "ndim" if func == Tensor.ndim.__get__ else getattr(func, "__name__", "")
        given = instances((args, kwargs), FlatGradient) + instances((args, kwargs), FlatParameter)
        whose = next((each.whose for each in given if each.whose), "")
        if name in _OF_THE_WHOLE or getattr(func, "__module__", None) == COLLECTIVES:
            raise cls.refusal(name, whose)
        if name == _UNSCALE and dist.is_initialized() and dist.get_world_size() > 1:
            # others ask all ranks
            if sys._getframe(1).f_globals["__name__"] == "torch.amp.grad_scaler":
                raise ResidencyError(
                    "A GradScaler would look for infinities in the gradients that this rank holds a"
                    " shard of, and ranks would skip steps that others take. Use"
                    " Trainer(precision='16-mixed'), with manual optimization, too, or torch's"
                    " ShardedGradScaler."
                )
        if func == Tensor.data.__get__:
            func = Tensor.detach  # which counts what is written to it
        if func == Tensor.data.__set__:
            given[0].set_()
        # which get no graph: `p.grad.add_(p)`
        changes = bool(instances(written(func, args, kwargs or {}), FlatGradient))
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.set_grad_enabled(torch.is_grad_enabled() and not changes),
        ):
            result = func(*args, **kwargs or {})
            if name == _UNSCALE:
                increment_version(given)  # torch does not count it
            # those over several elements are refused above
            if name.startswith("_foreach") and result is not None:
                return [cls.of(each, whose) for each in result]
            made = [
                each
                for each in (result if isinstance(result, tuple) else (result,))
                if type(each) is Tensor
            ]
            less = any(
                each.layout != torch.strided or each.numel() < given[0].numel() for each in made
            )
            if less and not name.startswith("new"):
                raise cls.refusal(name, whose)  # some of the elements, or computed over several
            # torch.compile asks for that until it is no view
            if type(result) is not Tensor or func == Tensor._base.__get__:
                return result
            return cls.of(result, whose)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Of these methods torch does not tell."""
        raise ResidencyError(
            f"The memory of flat {self.what}{self.whose} cannot be exchanged in an optimizer's"
            " param groups: others have it. Change it in place (`p.grad.copy_(...)`)."
        )

    resize_ = resize_as_ = set_

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatGradient:
        """This rank's elements, in memory of their own: a state dict that was copied can be loaded
        again.
        """
        with torch._C.DisableTorchFunctionSubclass():
            copied = self.detach().clone()
        memo[id(self)] = found = self.of(copied, self.whose)
        return found

    def __copy__(self) -> FlatGradient:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return Tensor.as_subclass(self, Tensor).__reduce_ex__(protocol)

    @classmethod
    def refusal(cls, name: str, whose: str) -> ResidencyError:
        """What to raise when the function ``name`` would tell of one rank's elements alone."""
        return ResidencyError(
            f"`{name}` would be of the {cls.what}{whose} that this rank holds a shard of: an"
            f" optimizer's param groups hold flat shards. Use {cls.instead}."
        )

    @classmethod
    def of(cls, tensor: Tensor, whose: str) -> FlatGradient:
        """``tensor``, and of which parameters it is."""
        flat = Tensor.as_subclass(tensor, cls)
        flat.whose = whose
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

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compute, or raise."""
        if func in (Tensor.grad.__set__, Tensor.grad.__delete__):
            return args[0]._set_grad(*args[1:])
        if func == Tensor.data.__set__:
            raise ResidencyError(
                "An optimizer's param groups hold flat shards, whose `.data` cannot be set: others"
                " have their memory. Write `p.copy_(...)` under `torch.no_grad()`, and keep a copy"
                " of what is to come back."
            )
        return FlatValues.__torch_function__(func, types, args, kwargs)

    def _set_grad(self, grad: Tensor | None = None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if grad is None:
                self.grad = None
            elif not isinstance(grad, Tensor):
                self.grad = grad  # torch says so
            elif self.grad is None or not _is_same(grad, self.grad):
                # not `p.grad *= 2`
                raise ResidencyError(
                    f"Another tensor was assigned to the gradient{self.whose} in"
                    " `optimizer.param_groups`, which hold flat shards. Change it in place"
                    " (`p.grad.copy_(...)`), or assign to the gradients of the module's parameters"
                    " (`for p in module.parameters(): p.grad = ...`)."
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ResidencyError(
            f"An optimizer that holds flat shards{self.whose} was pickled. Save its `state_dict()`,"
            " which is of this rank's elements, or `trainer.save_checkpoint(path)`, which loads on"
            " any number of ranks."
        )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.layout == torch.strided and one.is_set_to(other) and one.is_conj() == other.is_conj()


class CutParameter(FlatParameter):
    """A flat tensor that others have taken the place of: parameters in it had no gradient, and are
    apart since.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Raise."""
        given = instances((args, kwargs), CutParameter)
        if func == Tensor.__repr__:
            return f"<a flat tensor{given[0].whose} that was cut>"
        raise ResidencyError(
            f"A flat tensor{given[0].whose} was kept, and is not in `optimizer.param_groups` any"
            " more: it was cut where parameters had no gradient. Read the param groups each time."
        )


def unguarded(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` of a flat tensor with ordinary tensors in the same memory, which can be saved for
    others to load.
    """
    return {
        key: value.as_subclass(Tensor) if isinstance(value, FlatState) else value
        for key, value in state.items()
    }
