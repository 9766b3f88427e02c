"""What a parameter is while its unit is sharded: a tensor without memory, used collectively.

While its unit is in use a parameter is an ordinary ``nn.Parameter`` that views the unsharded
buffer. Otherwise its data is one NaN, expanded to its shape, and its class is
:class:`ShardedParameter`: questions about it (shape, dtype, hooks) are answered, a read unshards
its value, a change in place is stored in the shards, and what would need its memory raises. All
ranks have to do the same. Whatever does not ask for the class of a tensor reads NaN.
``parameter.grad``, ``.data`` and ``.detach()`` are tensors of the same kind. Torch's own lazy
parameters switch the class of a tensor, too.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from .isolation import apart, connected
from .torch_functions import (
    ABOUT_LAYOUT,
    ALIASES,
    KINDS,
    LIKE,
    METADATA,
    OF_MEMORY,
    OVERWRITING,
    VIEWS,
    in_words,
    instances,
    name_of,
    written,
)

# Torch's own, past the classes below.
_OF_DATA: Any = Tensor.data
_OF_GRAD: Any = Tensor.grad
_data, set_data = _OF_DATA.__get__, _OF_DATA.__set__  # the parameter gets other memory
get_grad, set_grad = _OF_GRAD.__get__, _OF_GRAD.__set__  # what autograd adds to

# Identity of the backward pass that runs in this thread.
graph_task = torch._C._current_graph_task_id
NO_GRAPH_TASK = -1


class ResidencyError(RuntimeError):
    """A sharded parameter was read or written where its value is not there."""


class Owner(Protocol):
    """The owner of sharded parameters, as seen from here; see :class:`~.access.Access`."""

    def read(self, values: list[Value]) -> list[Tensor]:
        """Return whole values in memory of their own; collective, each unit is unsharded once."""

    def write(self, value: Value, tensor: Tensor) -> None:
        """Store a whole value that all ranks have; local."""

    def watch(self, value: Value, copy: Tensor) -> None:
        """Raise later if the user has written to ``copy``, which was read: nobody would store
        it."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the :class:`ShardedTensor` of the reduced gradient, if the optimizers see one."""

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Store a whole gradient that all ranks have, or clear it; local."""


@dataclass(eq=False)
class Value:
    """A sharded value: of a parameter, or of its gradient.

    Attributes:
        label: the parameter's name and its unit's, for errors.
        cls: the user's class of the parameter.
        meta: a tensor of the user's dtype, shape and strides, on the meta device.
        owner: who stores it, held weakly: it holds the parameters, and would never be freed.
        parent: of a gradient, the value of its parameter.
        aliases: what `.data` was in the use that runs; torch counts apart what is written to each.
        since: of a gradient, how many of the parameter's were cleared or replaced before.
    """

    label: str
    cls: type[nn.Parameter]
    meta: Tensor
    owner: Callable[[], Owner | None] = lambda: None
    parent: Value | None = None
    since: int | None = None
    aliases: MutableSequence[Tensor] = field(default_factory=list)

    def was_written(self) -> bool:
        """Whether an alias was."""
        return any(alias._version for alias in self.aliases)

    @property
    def what(self) -> str:
        """In words."""
        return f"{'parameter' if self.since is None else 'the gradient of parameter'} {self.label}"


_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Value
is_sharded = _SHARDED.__contains__  # whether an engine owns a parameter
about = _SHARDED.__getitem__  # what is known of one that is


def adopt(parameter: nn.Parameter, value: Value) -> None:
    """Make the owner in ``value`` answer for ``parameter`` while it is sharded."""
    _SHARDED[parameter] = value


def forget(parameter: nn.Parameter) -> None:
    """Make ``parameter`` nobody's; it is an ordinary parameter from now on."""
    _SHARDED.pop(parameter, None)


def owner_or_none(parameter: Tensor) -> Owner | None:
    """Who owns ``parameter``, if anyone does."""
    return _SHARDED[parameter].owner() if parameter in _SHARDED else None


def owner_of(value: Value) -> Owner:
    """Who stores ``value``; a ResidencyError if that engine is gone."""
    owner = value.owner()
    if owner is None:
        raise ResidencyError(
            f"{value.what} outlived the model that it was sharded with, and its value with it. Hold"
            " the module, or keep its `state_dict()`."
        )
    return owner


def describe(parameter: Tensor) -> str:
    """Name of ``parameter`` and its unit."""
    return about(parameter).label


def refusal(name: str, value: Value) -> ResidencyError:
    """What to raise when the function ``name`` would touch the memory of ``value``."""
    return ResidencyError(
        f"{in_words(name)} would touch the memory of {value.what}, which is sharded over the"
        " ranks. Read a copy (`parameter.detach().clone()`), change it in place under"
        " `torch.no_grad()`, or do both in `with trainer.strategy.gathered(module, modify=True):`;"
        " each on all ranks."
    )


# --------------------------------------------------------------------------- tensors without memory


class _Sharded(Tensor):
    """Asks the owner for what is done with the value."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer, read, store or raise."""
        kwargs = kwargs or {}
        name, target = name_of(func), cast(Any, args[0] if args else None)
        if isinstance(target, _Sharded):
            value = value_of(target)
            if name in ABOUT_LAYOUT:
                return func(meta_of(target), *args[1:], **kwargs)
            if name in OF_MEMORY:
                raise refusal(name, value)
            if name in ALIASES or (name in VIEWS and _is_plain(target, args[1:])):
                return _view(target, None if name in ALIASES else (func, args[1:], kwargs))
            if name in ("view_as", "expand_as") and len(args) > 1 and args[1] is target:
                # no read: this is how the node is found that accumulates the gradient
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
            if name in _OWN:
                return _OWN[name](target, *args[1:])
            if name in LIKE:
                return func(_kind(target), *args[1:], **kwargs)
        if name == "is_set_to":
            return target is args[1]
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if name == "register_post_accumulate_grad_hook":
                    keep_engine_last(target)
            return result
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, *args, **kwargs)
        if name in KINDS:
            is_first = name != "result_type" and isinstance(target, _Sharded)
            args, kwargs = (*args[:is_first], *_kinds(args[is_first:])), _kinds(kwargs)
            if not is_first or (name == "type" and len(args) + len(kwargs) == 1):
                return func(*_kinds(args), **kwargs)
            if name == "to" and func(like := _kind(target), *args[1:], **kwargs) is like:
                return target  # as it is already, as `metric.to(device)` finds the network in it
        return _compute(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary tensor with the whole value; collective."""
        memo[id(self)] = copied = _ordinary(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        value = value_of(self)
        return f"<{value.what}, sharded: shape {tuple(self.shape)}, {value.meta.dtype}>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else object.__format__(self, spec)


class ShardedParameter(_Sharded, nn.Parameter):
    """A parameter whose unit is sharded. See the module's docstring."""


class ShardedTensor(_Sharded):
    """The value of a sharded parameter, or its gradient, whenever it is read; or a view of it.

    Attributes:
        value: of the parameter.
        views: the functions that lead from it to this view, each with its further arguments.
    """

    value: Value
    views: tuple[tuple[Any, tuple, dict[str, Any]], ...] = ()


def sharded_tensor(value: Value, absent: Tensor) -> ShardedTensor:
    """A tensor of ``value``, whose memory is ``absent``, one NaN of its shape and dtype."""
    tensor = Tensor.as_subclass(absent, ShardedTensor)
    tensor.value = value
    return tensor


def meta_of(tensor: Tensor) -> Tensor:
    """What has its dtype, shape and strides."""
    return _in_place_of(tensor, value_of(tensor).meta)


def _in_place_of(tensor: Tensor, whole: Tensor) -> Tensor:
    """What ``tensor`` is of ``whole``, the value: itself, or a view."""
    for function, args, kwargs in getattr(tensor, "views", ()):
        whole = function(whole, *args, **kwargs)
    return whole


def _is_plain(target: Tensor, args: Any) -> bool:
    """Whether a view can follow its parameter: autograd has no part in it."""
    recorded = torch.is_grad_enabled() and target.requires_grad
    return not (recorded or instances(args, _Sharded))


def _view(source: Tensor, step: tuple[Any, tuple, dict[str, Any]] | None) -> ShardedTensor:
    value = value_of(source)
    view = sharded_tensor(
        value, _in_place_of(source, absent_like(value.meta, value.meta.dtype, source.device))
    )
    view.views = getattr(source, "views", ())
    if step is not None:
        function, args, kwargs = step
        with torch._C.DisableTorchFunctionSubclass():
            absent = function(view, *args, **kwargs)
        view, views = sharded_tensor(value, absent), view.views
        view.views = (*views, step)
    return view


def absent_like(meta: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element, expanded to the shape of ``meta``: NaN, or the least number of an integer
    type.
    """
    if dtype.is_floating_point or dtype.is_complex:
        nothing: float | int = float("nan")
    else:
        nothing = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    with torch.inference_mode(False):
        one = torch.full((), nothing, dtype=dtype, device=device)
    # What writes there is an error: gloo, for one, looks at the number of elements alone, and would
    # write past the end.
    torch._C._set_throw_on_mutable_data_ptr(one)
    return one.expand(meta.shape)


def value_of(tensor: Tensor) -> Value:
    """Of a sharded tensor."""
    return tensor.value if isinstance(tensor, ShardedTensor) else about(tensor)


def _ordinary(tensor: Tensor) -> Tensor:
    value = value_of(tensor)
    with torch.no_grad():
        (full,) = read([tensor])
    if not isinstance(tensor, nn.Parameter):
        return full
    parameter = nn.Parameter(full, tensor.requires_grad)
    parameter.__class__ = value.cls
    return parameter


def _set_data(tensor: Tensor, data: Tensor) -> None:
    if data is tensor:
        return  # `module.to(...)` that changes nothing
    value = value_of(tensor)
    with torch.no_grad():
        require_same_kind(value, data)
        _compute(Tensor.copy_, "copy_", (tensor, data), {})


def require_same_kind(value: Value, data: Tensor) -> None:
    """Raise if ``data`` cannot be the data of ``value``."""
    if (data.shape, data.dtype) != (value.meta.shape, value.meta.dtype):
        raise ResidencyError(
            f"`.data` of {value.what} was set to a tensor of shape {tuple(data.shape)} and"
            f" {data.dtype}. While the parameter is sharded its shape and dtype stay as they are:"
            " change them before, in `__init__` or `configure_model`."
        )


# What a sharded tensor answers by itself.
_OWN: dict[str, Any] = {
    "grad.__get__": lambda p: gradient_of(p) if isinstance(p, nn.Parameter) else None,
    "grad.__set__": lambda p, grad: set_gradient_of(p, grad),
    "grad.__delete__": lambda p: set_gradient_of(p, None),
    "data.__set__": _set_data,
    "storage_offset": lambda p: 0,
    "detach_": lambda p: p,
}


def _kind(tensor: Tensor) -> Tensor:
    """A tensor of the same dtype, device and shape, in next to no memory."""
    dtype = meta_of(tensor).dtype
    return torch.empty((), dtype=dtype, device=tensor.device).expand(tensor.shape)


def _kinds(value: Any) -> Any:
    return tree_map_only(_Sharded, _kind, value)


def _compute(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of whole values. What it writes to them is stored."""
    targets = instances(written(func, args, kwargs), _Sharded)
    for target in targets:
        is_initialised = getattr(func, "__module__", "") == "torch.nn.init"  # without gradients
        if target.requires_grad and torch.is_grad_enabled() and not is_initialised:
            raise RuntimeError(
                f"a leaf Variable that requires grad is being used in an in-place operation: {name}"
                f" of {value_of(target).what}. Do it under `torch.no_grad()`."
            )
        if graph_task() != NO_GRAPH_TASK and value_of(target).since is None:
            raise refusal(name, value_of(target))
    given = {id(each): each for each in instances((args, kwargs), _Sharded)}
    # the whole value, and what is given of it
    whole: dict[int, Tensor] = {}
    for target in targets if name in OVERWRITING else ():
        if not getattr(target, "views", ()):
            whole[id(target)] = torch.empty_like(value_of(target).meta, device=target.device)
    others = [each for key, each in given.items() if key not in whole]
    whole |= dict(zip(map(id, others), _read_whole(others), strict=True))
    parts = {key: _in_place_of(each, whole[key]) for key, each in given.items()}
    full_args, full_kwargs = tree_map_only(_Sharded, lambda each: parts[id(each)], (args, kwargs))
    versions = {key: part._version for key, part in parts.items() if not part.is_inference()}
    result = func(*full_args, **full_kwargs)
    del full_args, full_kwargs
    if targets and hasattr(result, "wait"):
        result.wait()  # a collective that goes on in the background
    stored = {value_of(target) for target in targets}
    for key, each in given.items():
        part, value = parts[key], value_of(each)
        if key in map(id, targets):
            owner_of(value).write(value, whole[key])
            result = tree_map_only(Tensor, partial(_if_same, part, each), result)
        elif key in versions and value not in stored:  # else it is a view of a target
            if part._version != versions[key]:
                raise ResidencyError(f"{in_words(name)} would change a copy of {value.what}.")
            owner_of(value).watch(value, part)
    if isinstance(result, np.ndarray):
        result.flags.writeable = False  # nobody would store what is written to it
    return result


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values of sharded tensors, those of parameters connected to autograd; collective."""
    whole = _read_whole(tensors)
    return [_in_place_of(each, full) for each, full in zip(tensors, whole, strict=True)]


def _read_whole(tensors: Sequence[Tensor]) -> list[Tensor]:
    by_owner: dict[Owner, list[Value]] = {}
    for value in map(value_of, tensors):
        by_owner.setdefault(owner_of(value), []).append(value)
    found: dict[Value, Tensor] = {}
    for owner, its in by_owner.items():
        found |= zip(its, owner.read(its), strict=True)
    differentiable = torch.is_grad_enabled()
    with apart():
        return [
            connected(found[value_of(each)], each)
            if differentiable and each.requires_grad
            else found[value_of(each)]
            for each in tensors
        ]


def _if_same(part: Tensor, each: Tensor, result: Tensor) -> Tensor:
    return each if result is part else result


def _differentiate(func: Any, outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` or ``backward``: with respect to the parameters themselves."""
    with torch._C.DisableTorchFunctionSubclass():
        edges = inputs and tuple(
            get_gradient_edge(p) if isinstance(p, _Sharded) else p for p in inputs
        )
    outputs, kwargs = tree_map_only(_Sharded, lambda p: read([p])[0], (outputs, kwargs))
    if func is torch.autograd.backward:
        return func(outputs, inputs=edges, **kwargs)
    if zeros := kwargs.pop("materialize_grads", False):
        kwargs["allow_unused"] = True
    grads = [
        # in the dtype of the buffer; an ordinary parameter's has its own
        grad if grad is None or not is_sharded(p) else grad.to(about(p).meta.dtype)
        for p, grad in zip(inputs, func(outputs, edges, **kwargs), strict=True)
    ]
    return tuple(
        torch.zeros_like(p) if grad is None and zeros else grad
        for p, grad in zip(inputs, grads, strict=True)
    )


# ---------------------------------------------------------------------------------------- gradients


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What ``parameter.grad`` is: in a backward this rank's own, when autograd has just made it,
    else the whole one.
    """
    with torch._C.DisableTorchFunctionSubclass():
        local = get_grad(parameter)
    # torch.compile looks at what it compiles for
    if local is not None or TracingContext.try_get() is not None:
        return local
    return owner_of(about(parameter)).gradient(cast(nn.Parameter, parameter))


def set_gradient_of(parameter: Tensor, grad: Tensor | None) -> None:
    """``parameter.grad = grad``: in a backward this rank's own, which is reduced after the hook
    that sets it.
    """
    in_backward = graph_task() != NO_GRAPH_TASK
    with torch._C.DisableTorchFunctionSubclass():
        set_grad(parameter, grad if in_backward else None)  # after a run it may have one
    if not in_backward:
        owner_of(about(parameter)).set_gradient(cast(nn.Parameter, parameter), grad)


def keep_engine_last(parameter: Tensor) -> None:
    """Let the engine's post-accumulate hook, which takes the gradient away, run after the
    user's.
    """
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and len(hooks) > 1:
        for key in [key for key, hook in hooks.items() if hasattr(hook, "takes_gradient")]:
            # autograd reads the dict in the order of insertion, whatever `move_to_end` did
            hooks[key] = hooks.pop(key)


# ------------------------------------------------------------------------- parameters that are here


class _InUse(nn.Parameter):
    """An ordinary parameter, but ``grad`` is the whole gradient, and writes to ``data`` are
    counted.

    Torch's own ``data`` hides them (``parameter.data.clamp_()``): the shards would not follow.
    """

    _cls: type[nn.Parameter]  # the user's
    grad = property(gradient_of, set_gradient_of, lambda self: set_gradient_of(self, None))

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        handle = Tensor.register_post_accumulate_grad_hook(self, hook)
        keep_engine_last(self)
        return handle

    @property
    def data(self) -> Tensor:
        about(self).aliases.append(alias := _data(self))
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.data_ptr() != self.data_ptr() or value.stride() != self.stride():
            if value.shape != self.shape or value.dtype != self.dtype:
                require_same_kind(about(self), value)
            with torch.no_grad():
                self.copy_(value.clone())  # it may be a view of the same memory

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(
            Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad
        )
        copied.__class__ = self._cls
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)


@cache
def class_in_use(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass of ``cls`` that a parameter has while it is in use."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_cls": cls}
    return type(cls.__name__, (_InUse, cls), names)


# Dynamo would trace what answers for them, and take their memory: compiled code that is given one
# runs as it is written. Code of units' own forwards is given ordinary parameters.
torch._dynamo.config.nontraceable_tensor_subclasses |= {ShardedParameter, ShardedTensor}
