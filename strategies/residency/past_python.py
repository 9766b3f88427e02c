"""Ways past Python: functions of torch that take a tensor's memory without a look at its class.

They are wrapped once for a process, when a model is sharded over several ranks: what they are given is then treated as by any
other function of torch. A read of a resting parameter gathers it or raises, a write raises, and one in use is stored.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import increment_version
from torch.jit._builtins import _register_builtin
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._device import _device_constructors

from .functions import instances
from .resting import ResidencyError, RestingParameter, ShardedCopy, describe, is_sharded, materialize

# Methods of a process group, under their names before and since torch 2.13; all but one write to their first argument. The
# engine's own exchanges use what these were before.
_EXCHANGES = (
    "allreduce allreduce_coalesced broadcast reduce allgather all_gather_single _allgather_base allgather_coalesced "
    "all_gather_single_coalesced allgather_into_tensor_coalesced gather scatter reduce_scatter reduce_scatter_single "
    "_reduce_scatter_base reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced all_to_all_single alltoall_base "
    "alltoall recv recv_anysource send"
)
_SPARSE = "sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor"
_ARENAS: set[int] = set()  # addresses of the memory that slots lie in


def guard(memory: Tensor) -> None:
    """Watch these ways for an engine whose slots lie in ``memory`` [bytes]."""
    _ARENAS.add(memory.data_ptr())
    weakref.finalize(memory, _ARENAS.discard, memory.data_ptr())
    _wrap_all()


@cache
def _wrap_all() -> None:
    for name in _EXCHANGES.split():
        if hasattr(dist.ProcessGroup, name):
            method = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, _seen(method, slice(0) if name == "send" else slice(1, 2)))
    torch._C.ScriptFunction.__call__ = _seen(torch._C.ScriptFunction.__call__, slice(0))
    torch._C.ScriptMethod.__call__ = _unless_resting(_seen(torch._C.ScriptMethod.__call__, slice(0)))
    eager_transforms._wrap_for_grad = _of_values(eager_transforms._wrap_for_grad)  # for grad, vjp, jacrev, hessian, jvp
    vmap._add_batch_dim = _of_values(vmap._add_batch_dim)
    nn.RNNBase.flatten_parameters = _unless_sharded(nn.RNNBase.flatten_parameters)
    _device_constructors()  # remembers by identity what `torch.device` contexts act on
    for name, wrap in (("tensor", _asking), ("as_tensor", _asking), ("asarray", _asking), ("batch_norm", _counting)):
        setattr(torch, name, wrap(getattr(torch, name)))
        _register_builtin(getattr(torch, name), f"aten::{name}")  # for scripts, which go by identity, too
    for name in _SPARSE.split():
        setattr(torch, name, _of_full(getattr(torch, name)))
    # It calls what it was given to call, whatever else is among the arguments.
    nested = NestedTensor.__torch_function__.__func__
    NestedTensor.__torch_function__ = classmethod(_of_full(nested))


def _of_full(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of full values in the place of resting parameters among its arguments."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if instances((args, kwargs), RestingParameter):
            args, kwargs = materialize(args), materialize(kwargs)
        return function(*args, **kwargs)

    return call


def _seen(function: Callable[..., Any], writes: slice) -> Callable[..., Any]:
    """``function``, which writes to the arguments at ``writes``, as one that asks classes of tensors what to do."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _ARENAS:
            return function(*args, **kwargs)  # nothing is sharded any more
        given = (*args, *kwargs.values())
        if torch._C._is_torch_function_enabled():
            for tensor in instances(given, RestingParameter) or instances(given, ShardedCopy):
                return tensor.__torch_function__(call, (), args, kwargs)
        for tensor in instances(given[writes], Tensor):
            if is_gathered(tensor):
                increment_version(tensor)  # which shows when its use ends
        return function(*args, **kwargs)

    call.writes = writes  # see functions.written
    return call


def is_gathered(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter that is in use, or a view of one in its slot."""
    if is_sharded(tensor) or (tensor._base is not None and is_sharded(tensor._base)):
        return True
    try:
        return tensor.untyped_storage().data_ptr() in _ARENAS
    except (RuntimeError, NotImplementedError):  # has no storage, so it is in none of these
        return False


def _asking(constructor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``constructor``, which makes a tensor of anything, as one that asks the class of a parameter."""

    @wraps(constructor)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        for value in (*args[:1], *kwargs.values()):
            if isinstance(value, RestingParameter) and torch._C._is_torch_function_enabled():
                return value.__torch_function__(make, (), args, kwargs)
        return constructor(*args, **kwargs)

    return make


def _counting(batch_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``batch_norm``, which updates running statistics without a word, as one that counts their versions."""

    @wraps(batch_norm)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if _ARENAS and len(args) > 5 and args[5]:  # training, as `nn.functional` calls it
            for statistic in args[3:5]:
                if isinstance(statistic, Tensor) and is_gathered(statistic):
                    increment_version(statistic)
        return batch_norm(*args, **kwargs)

    return call


def _unless_resting(call: Callable[..., Any]) -> Callable[..., Any]:
    """The ``call`` of scripted methods, which read the parameters of their module."""

    @wraps(call)
    def check_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in _parameters(self.owner):
            if type(parameter) is RestingParameter:
                raise ResidencyError(
                    f"The scripted method `{self.name}` would read the memory of parameter {describe(parameter)} while it is "
                    "sharded over the ranks. Call it in the forward of the Python module that it is a part of, or in `with "
                    "strategy.gathered(module):` (on all ranks)."
                )
        return call(self, *args, **kwargs)

    return check_and_call


def _parameters(module: torch._C.ScriptModule) -> Iterator[Tensor]:
    for _, parameter in torch._C.ParameterDict(module).items():
        yield parameter
    for _, child in torch._C.ModuleDict(module).items():
        yield from _parameters(child)


def _of_values(wrap: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``wrap`` of what torch.func differentiates by, or maps over, with values in the place of resting parameters."""

    def wrap_value(tensor: Tensor, *places: int) -> Tensor:
        if isinstance(tensor, RestingParameter):
            with temporarily_clear_interpreter_stack():  # the copy is made before, not by, what is transformed
                tensor = tensor.clone()
        return wrap(tensor, *places)

    return wrap_value


def _unless_sharded(flatten: Callable[[nn.RNNBase], None]) -> Callable[[nn.RNNBase], None]:
    """``flatten`` of recurrent layers moves weights to memory that it makes, and would take them out of their slots."""

    @wraps(flatten)
    def flatten_parameters(self: nn.RNNBase) -> None:
        if not any(isinstance(weight, Tensor) and is_sharded(weight) for weight in self._flat_weights):
            flatten(self)

    return flatten_parameters
