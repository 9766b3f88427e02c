"""Ways past Python: functions of torch that take a tensor's memory without a look at its class.

They are wrapped once for a process, when a model is sharded over several ranks (those of storages
on one rank, too): what they are given is then treated as by any other function of torch. A read of
a resting parameter gathers it or raises, a write raises, and one in use is stored.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from functools import cache, update_wrapper, wraps
from types import MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import increment_version
from torch.jit._builtins import _register_builtin
from torch.nested._internal.nested_tensor import NestedTensor

from .flat_gradient import FlatGradient, FlatParameter, FlatValues
from .functions import in_words, instances, name_of, replaced
from .given_out import OF_MEMORY, SLOTS, Alias, GuardedStorage, is_gathered, note, storage_of, watch
from .home import ResidencyError, describe, is_sharded
from .legacy import replace_types
from .numbers import Number
from .resting import Absent, RestingParameter, ShardedCopy, changes_kept, watch_gradient

# Methods of a process group, under their names before and since torch 2.13; all but one write to
# their first argument. The engine's own exchanges use what these were before.
_EXCHANGES = (
    "allreduce allreduce_coalesced broadcast reduce allgather all_gather_single _allgather_base"
    " allgather_coalesced all_gather_single_coalesced allgather_into_tensor_coalesced gather"
    " scatter reduce_scatter reduce_scatter_single _reduce_scatter_base"
    " reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced all_to_all_single"
    " alltoall_base alltoall recv recv_anysource send"
)
_SPARSE = (
    "sparse_coo_tensor sparse_compressed_tensor sparse_csr_tensor sparse_csc_tensor"
    " sparse_bsr_tensor sparse_bsc_tensor"
)
_NOTHING = slice(0)  # is written to
# Who asks for addresses and storages to know tensors from others, or for kernels that they have
# compiled.
_READERS = frozenset({__name__.partition(".")[0], "torch", "triton", "lightning"})
_SHARED: set[int] = set()  # storages that several tensors of the user's have
_IMPORTED: dict[
    int, tuple[Any, Any]
] = {}  # id of a function of a module of torch -> it, what is in its place


def guard(memory: Tensor, in_arrays: list[Alias]) -> None:
    """Watch these ways for a unit whose slot is ``memory`` [bytes].

    ``in_arrays`` gets what became an array, or whose address was asked for: nobody tells whether
    that is written to.
    """
    SLOTS[storage_of(memory)] = in_arrays
    weakref.finalize(memory, SLOTS.pop, storage_of(memory))
    guard_storage(memory)
    _wrap_all()


def guard_storage(memory: Tensor) -> None:
    """Several tensors of the user's are in ``memory``: its storage is none of theirs."""
    if storage_of(memory) not in _SHARED:
        _SHARED.add(storage_of(memory))
        weakref.finalize(memory, _SHARED.discard, storage_of(memory))
    _wrap_storages()


@cache
def _wrap_storages() -> None:
    for name in ("storage", "untyped_storage"):
        _wrap(Tensor, name, _stored)
    _wrap(Tensor, "detach_", _detached)


@cache
def _wrap_all() -> None:
    for name in _EXCHANGES.split():
        if hasattr(dist.ProcessGroup, name):
            _wrap(dist.ProcessGroup, name, _exchanged, _NOTHING if name == "send" else slice(1, 2))
    _wrap(torch._C.ScriptFunction, "__call__", _asked)
    _wrap(torch._C.ScriptMethod, "__call__", _method)
    _wrap(eager_transforms, "_wrap_for_grad", _lifted)  # for grad, vjp, jacrev, hessian, jvp
    _wrap(vmap, "_flat_vmap", _watched)
    _wrap(eager_transforms, "_propagate_functional_input_mutation", _watched)
    _wrap(nn.RNNBase, "flatten_parameters", _flattened)
    _wrap(torch, "fused_moving_avg_obs_fake_quant", _observed)
    for name in ("tensor", "as_tensor", "asarray", "batch_norm", "native_batch_norm"):
        _wrap(torch, name, _normalized if "norm" in name else _constructed)
        # for scripts, which go by identity, too
        _register_builtin(getattr(torch, name), f"aten::{name}")
    _wrap(torch, "full_like", _filled)
    for name in ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
        _wrap(torch, name, _fused, slice(1))
    for name in _SPARSE.split():
        _wrap(torch, name, _asked)
    _wrap(torch.nested, "nested_tensor", _asked)
    _wrap(torch, "to_dlpack", _as_capsule)
    _wrap(torch.utils.dlpack, "to_dlpack", _as_capsule)
    _wrap_methods()
    _IMPORTED.update(replace_types(_require_own_memory))
    _replace_imported()
    # It calls what it was given to call, whatever else is among the arguments.
    NestedTensor.__torch_function__ = classmethod(
        _Wrapped(NestedTensor.__torch_function__.__func__, _asked)
    )
    # torch.compile would take its memory: what computes with one runs as it is written.
    torch._dynamo.config.nontraceable_tensor_subclasses.add(ShardedCopy)


def _wrap_methods() -> None:
    for name, instead in {
        "new": _taken,
        "set_": _set,
        "new_full": _filled,
        "new_tensor": _constructed,
        "as_subclass": _reclassed,
        "data_ptr": _addressed,
        "numpy": _as_array,
        "__dlpack__": _as_array,
        "register_hook": _hooked,
    }.items():
        _wrap(Tensor, name, instead)
    for name in ("apply_", "map_", "map2_"):
        _wrap(Tensor, name, _asked, slice(1))
    _wrap(BackwardCFunction, "register_hook", _hooked)  # for hooks of modules' backwards, too
    Tensor.data = _Data(Tensor.data)
    # the constructor, whose `__new__` torch.compile must find as it was
    Tensor.__init__ = _initialized


class _Wrapped:
    """``function``, which writes to the arguments at ``writes``, but calls of it are answered by
    ``instead``.

    Equal to ``function``: who has a table of functions (a ``__torch_function__``, a compiler) finds
    both by either.
    """

    def __init__(
        self, function: Callable[..., Any], instead: Callable[..., Any], writes: slice = _NOTHING
    ) -> None:
        update_wrapper(self, function)
        self.writes, self._instead = writes, instead  # see functions.written
        # dynamo cannot ask for it
        self._hash = hash(function) if isinstance(function, Hashable) else id(function)
        # then it does not become a method of a class that it is an attribute of, as torch's do not
        self.of_module = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(self, self.__wrapped__, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None or self.of_module else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return self is other or self.__wrapped__ == other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> str:
        return self.__qualname__  # by name, in the module where it is


def _wrap(owner: Any, name: str, instead: Callable[..., Any], writes: slice = _NOTHING) -> None:
    wrapped = _Wrapped(getattr(owner, name), instead, writes)
    wrapped.of_module = isinstance(owner, ModuleType)
    wrapped.__module__ = owner.__name__ if wrapped.of_module else owner.__module__
    wrapped.__qualname__ = name if wrapped.of_module else f"{owner.__qualname__}.{name}"
    if wrapped.of_module:
        _IMPORTED[id(wrapped.__wrapped__)] = wrapped.__wrapped__, wrapped
    setattr(owner, name, wrapped)


def _replace_imported() -> None:
    """Modules of others have some of these functions by their names
    (``from torch import tensor``).
    """
    for place, module in tuple(sys.modules.items()):
        if isinstance(module, ModuleType) and place.partition(".")[0] != "torch":
            for name, value in tuple(vars(module).items()):
                if id(value) in _IMPORTED:
                    vars(module)[name] = _IMPORTED[id(value)][1]


def _exchanged(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Ranks would put elements of different parameters together."""
    if args[0].size() > 1:
        given = (*args, *kwargs.values())
        for flat in instances(given, FlatGradient):
            raise flat.refusal(name_of(call), flat.whose)
        for flat in instances(given, FlatParameter):
            raise FlatValues.refusal(name_of(call), flat.whose)
    return _asked(call, function, args, kwargs)


def _asked(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """``function`` asks classes of tensors what to do."""
    if not SLOTS:
        return function(*args, **kwargs)  # nothing is sharded any more
    given = (*args, *kwargs.values())
    if torch._C._is_torch_function_enabled():
        for tensor in instances(given, Absent) or instances(given, ShardedCopy):
            return tensor.__torch_function__(call, (), args, kwargs)
    for tensor in instances(given[call.writes], Tensor):
        note(tensor)
        if is_gathered(tensor):
            increment_version(tensor)  # which shows when its use ends
    return function(*args, **kwargs)


def _constructed(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """``function`` makes a tensor of anything, lists of many numbers among them: a parameter's
    class is asked.
    """
    for value in (*args[:2], *kwargs.values()):
        if isinstance(value, Absent) and torch._C._is_torch_function_enabled():
            return value.__torch_function__(call, (), args, kwargs)
    return function(*args, **kwargs)


def _filled(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """``function`` takes a number, and tensors for one."""
    # a compiled function would be guarded by what is in it
    if torch.compiler.is_compiling() or not SLOTS:
        return function(*args, **kwargs)
    rest, kwargs = replaced((args[1:], kwargs), Number, torch.clone)
    return function(*args[:1], *rest, **kwargs)


def _taken(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """``tensor.new(parameter)`` and the like: two would have one memory."""
    _require_own_memory(call, (*args[1:], *kwargs.values()), args[0])
    return function(*args, **kwargs)


def _set(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """``tensor.set_(...)``, whose class torch does not ask."""
    _require_own_memory(call, (*args[1:], *kwargs.values()), args[0])
    if torch._C._is_torch_function_enabled() and isinstance(args[0], Absent | ShardedCopy):
        return args[0].__torch_function__(call, (), args, kwargs)
    return function(*args, **kwargs)


def _initialized(self: Tensor, *args: Any, **kwargs: Any) -> None:
    """``torch.Tensor(parameter)``: two would have one memory."""
    if type(self).__new__ is Tensor.__new__:
        _require_own_memory(Tensor, (*args, *kwargs.values()))
    following = super(Tensor, self).__init__
    # of a class beside `Tensor`, and not what `object` has
    if not isinstance(following, MethodWrapperType):
        following(*args, **kwargs)


class _Data(property):
    """``tensor.data``, which cannot be set to a parameter that rests, and hides what is written to
    it.
    """

    __name__ = "data"

    def __init__(self, data: Any) -> None:
        setter = _Wrapped(data.__set__, _taken, slice(1))
        setter.__self__ = data  # see functions.name_of

        # under a default device it would call this, and what it made of this would call it again
        @torch._dynamo.disable
        def getter(tensor: Tensor) -> Tensor:
            note(tensor)
            return data.__get__(tensor)

        super().__init__(getter, setter)
        # as others see them; Python itself asks the class
        self.__dict__.update(__get__=data.__get__, __set__=setter)


def _require_own_memory(function: Any, given: tuple, taker: Any = None) -> None:
    for each in given:
        if each is taker:
            continue  # `module.to(...)` that changes nothing
        if isinstance(each, Absent) or (
            isinstance(each, ShardedCopy) and not isinstance(taker, ShardedCopy)
        ):
            if torch._C._is_torch_function_enabled():
                raise each.refusal(name_of(function))
        elif isinstance(each, Tensor):
            note(each)  # what is written to the second has its own count
            watch(each)


def _as_array(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """What was written to an array of a weight in use is stored when the use ends."""
    array, tensor = function(*args, **kwargs), args[0]
    note(tensor)
    if not isinstance(tensor, Absent | ShardedCopy):
        watch(tensor, array)
    return array


def _addressed(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Whoever asks may write there (by `ctypes`, numba or a library of C): as with arrays."""
    if not SLOTS or not _asked_by_others():
        return function(*args, **kwargs)
    watch_gradient(args[0], addressed=True)
    return _as_array(call, function, args, kwargs)


def _reclassed(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """A gradient as an ordinary tensor, by whose class nobody is told what is written to it."""
    if not watch_gradient(args[0]) and type(args[0]) is ShardedCopy:
        raise args[0].refusal(name_of(call))
    return _constructed(call, function, args, kwargs)


def _detached(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Torch refuses it of views, which gradients are here (`p.grad.detach_(); p.grad.zero_()`)."""
    gradient = storage_of(args[0]) in _SHARED and not args[0].requires_grad
    return args[0] if gradient else function(*args, **kwargs)


def _stored(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """The storage of a weight in use is that of its unit; on one rank that of all weights or
    gradients of a group.
    """
    if storage_of(args[0]) in _SHARED and not isinstance(args[0], Absent) and _asked_by_others():
        whose = [f"parameter {describe(p)}" for p in (args[0], args[0]._base) if is_sharded(p)] or [
            "a gradient, or a view,"
        ]
        refused = ResidencyError(
            f"{in_words(name_of(call))} of {whose[0]} would give the memory of others, too: those"
            " that are gathered together share one. Take a copy (`.clone()`), or change the tensor"
            " itself, under `torch.no_grad()` (`tensor.copy_(...)`)."
        )
        return GuardedStorage(function(*args, **kwargs), OF_MEMORY, lambda: refused)
    return function(*args, **kwargs)


def _asked_by_others() -> bool:
    # of what calls a function that is wrapped
    module = sys._getframe(3).f_globals.get("__name__", "torch")
    return module.partition(".")[0] not in _READERS


def _as_capsule(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """The same by DLPack's function of old, which does not ask classes."""
    return _asked(
        call, lambda *args, **kwargs: _as_array(call, function, args, kwargs), args, kwargs
    )


def _hooked(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """A hook may return a weight, or a view of one, as a gradient, which nodes in C++ read when
    others have the memory.
    """
    hooked, hook = (*args, *kwargs.values())

    @wraps(hook)
    def own(*grads: Any) -> Any:
        result = hook(*grads)
        return (
            replaced(result, Tensor, lambda grad: grad.clone() if is_gathered(grad) else grad)
            if SLOTS
            else result
        )

    return function(hooked, own)


def _normalized(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Batch norm updates running statistics without a word: their versions count it."""
    if SLOTS and len(args) > 5 and args[5]:  # training, as `nn.functional` calls it
        note(*args[3:5])
        for statistic in args[3:5]:
            if isinstance(statistic, Tensor) and is_gathered(statistic):
                increment_version(statistic)
    return function(*args, **kwargs)


def _observed(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Fake quantization updates its ranges and scales without a word."""
    note(*args, *kwargs.values())
    return function(*args, **kwargs)


def _fused(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """An optimizer's kernel, whose writes to weights in use torch does not count. The engine's
    shards pass here, too.
    """
    given = () if torch.compiler.is_compiling() else args[0] if args else kwargs["self"]
    for tensor in given:
        if storage_of(tensor) in SLOTS:  # and no more than this
            increment_version(tensor)
    return function(*args, **kwargs)


def _method(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """A scripted method reads the parameters of its module."""
    for parameter in _parameters(args[0].owner):
        if isinstance(parameter, RestingParameter):
            raise ResidencyError(
                f"The scripted method `{args[0].name}` would read the memory of parameter"
                f" {describe(parameter)} while it is sharded over the ranks. Call it in the forward"
                " of the Python module that it is a part of, or in `with"
                " strategy.gathered(module):` (on all ranks)."
            )
    return _asked(call, function, args, kwargs)


def _parameters(module: torch._C.ScriptModule) -> Iterator[Tensor]:
    for _, parameter in torch._C.ParameterDict(module).items():
        yield parameter
    for _, child in torch._C.ModuleDict(module).items():
        yield from _parameters(child)


def _lifted(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """What torch.func differentiates by: values in the place of resting parameters."""
    if isinstance(args[0], Absent):
        # the copy is made before, not by, what is transformed
        with temporarily_clear_interpreter_stack():
            args = (args[0].clone(), *args[1:])
    return function(*args, **kwargs)


def _watched(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """What torch.func maps over, or makes functional: values in the place of resting parameters,
    which are not written to.
    """
    if not SLOTS:
        return function(*args, **kwargs)
    with temporarily_clear_interpreter_stack():
        args = replaced(args, Absent, lambda each: each[...])
    with changes_kept(args, name_of(call)):
        return function(*args, **kwargs)


def _flattened(
    call: Callable[..., Any], function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Recurrent layers move weights to memory that they make: that would take them out of their
    slots.
    """
    if not any(map(is_sharded, args[0]._flat_weights)):
        function(*args, **kwargs)
