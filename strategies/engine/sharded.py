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

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from ..support.torch_internals import (
    NO_GRAPH_TASK,
    DisableTorchFunctionSubclass,
    graph_task,
    refuse_writes,
)
from .isolation import connected, isolated
from .torch_functions import (
    ABOUT_LAYOUT,
    ALIASES,
    KINDS,
    LIKE,
    METADATA,
    OF_MEMORY,
    OVERWRITING,
    VIEWS,
    instances,
    name_of,
    written,
)

# Torch's own, past the classes below.
_OF_DATA: Any = Tensor.data
_OF_GRAD: Any = Tensor.grad
_data, set_data = _OF_DATA.__get__, _OF_DATA.__set__  # the parameter gets other memory
get_grad, set_grad = _OF_GRAD.__get__, _OF_GRAD.__set__  # what autograd adds to


class ResidencyError(RuntimeError):
    """A sharded parameter was read or written where its value is not there."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether an engine owns it: a parameter, or a tensor of one's value or gradient.

    What is known of it is the attribute ``zero3_entry``, a :class:`~.chunk.Entry`.
    """
    return hasattr(tensor, "zero3_entry")


def owner_or_none(parameter: Any) -> Any:
    """The :class:`~.engine.Zero3Engine` that owns ``parameter``, if one does."""
    return parameter.zero3_entry.owner if is_sharded(parameter) else None


def describe(tensor: Any) -> str:
    """A parameter, or its gradient, in words, with the name of its unit."""
    of = "" if tensor.since is None else "the gradient of "
    entry = tensor.zero3_entry
    return f"{of}parameter {entry.name!r} (unit {entry.unit.name})"


def refusal(name: str, tensor: Tensor) -> ResidencyError:
    """What to raise when the function ``name`` would touch the memory of ``tensor``."""
    return ResidencyError(
        f"`{name}` would touch the memory of {describe(tensor)}, which is sharded over the ranks."
        " Read a copy (`parameter.detach().clone()`), change it in place under `torch.no_grad()`,"
        " or do both in `with trainer.strategy.gathered(module, modify=True):`; each on all ranks."
    )


# --------------------------------------------------------------------------- tensors without memory


class _Copied:
    """Copies and pickles are ordinary tensors with the whole value."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = _ordinary(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)


class _Sharded(_Copied, Tensor):
    """Asks the owner for what is done with the value.

    Attributes:
        since: None for a value; of a gradient, how many of the parameter's were cleared or replaced
            before.
        views: the functions that lead to this view, each with its further arguments.
    """

    zero3_entry: Any  # the parameter's
    since: int | None = None
    views: tuple[tuple[Any, tuple, dict[str, Any]], ...] = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer, read, store or raise."""
        kwargs = kwargs or {}
        name = name_of(func)
        target: Any = args[0] if args else None
        if isinstance(target, _Sharded):
            if name in ABOUT_LAYOUT:
                return func(meta_of(target), *args[1:], **kwargs)
            if name in OF_MEMORY:
                raise refusal(name, target)
            if name in ALIASES:
                return _view(target, None)
            # a view follows its parameter where autograd has no part in it
            if name in VIEWS and not (torch.is_grad_enabled() and target.requires_grad):
                return _view(target, (func, args[1:], kwargs))
            if name in ("view_as", "expand_as") and len(args) > 1 and args[1] is target:
                # no read: this is how torch, too, finds the node that accumulates the gradient
                with DisableTorchFunctionSubclass():
                    return func(*args)
            if name == "data.__set__":
                return _assign(target, *args[1:])
            if name in LIKE:
                return func(meta_of(target), *args[1:], **{"device": target.device, **kwargs})
        if name in METADATA:
            with DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if name == "register_post_accumulate_grad_hook":
                    keep_engine_last(target)
            return result
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, *args, **kwargs)
        if name in KINDS:
            # of the same dtype, device and shape
            kinds, options = tree_map_only(_Sharded, _absent, (args, kwargs))
            result = func(*kinds, **options)
            if not isinstance(target, _Sharded) or not isinstance(result, Tensor):
                return result
            if result is kinds[0]:
                return target  # as it is already, as `metric.to(device)` finds the network in it
        return _compute(func, name, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{describe(self)}, sharded: shape {tuple(self.shape)}, {self.dtype}>"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else object.__format__(self, spec)


def gradient_of(parameter: Any) -> Tensor | None:
    """What ``parameter.grad`` is: in a backward this rank's own, when autograd has just made it,
    else the whole one.
    """
    with DisableTorchFunctionSubclass():
        local = get_grad(parameter)
    # torch.compile looks at what it compiles for
    if local is not None or TracingContext.try_get() is not None:
        return local
    return parameter.zero3_entry.owner.gradient(parameter)


def set_gradient_of(parameter: Any, grad: Tensor | None = None) -> None:
    """``parameter.grad = grad``: in a backward this rank's own, which is reduced after the hook
    that sets it.
    """
    in_backward = graph_task() != NO_GRAPH_TASK
    with DisableTorchFunctionSubclass():
        set_grad(parameter, grad if in_backward else None)  # after a run it may have one
    if not in_backward:
        parameter.zero3_entry.owner.set_gradient(parameter, grad)


_GRAD = property(gradient_of, set_gradient_of, set_gradient_of)


class ShardedParameter(_Sharded, nn.Parameter):
    """A parameter whose unit is sharded. See the module's docstring."""

    grad = _GRAD


class ShardedTensor(_Sharded):
    """The value of a sharded parameter, or its gradient, whenever it is read; or a view of it."""


def sharded_tensor(entry: Any, absent: Tensor, since: int | None) -> ShardedTensor:
    """A tensor of the parameter of ``entry``, whose memory is ``absent``, one NaN."""
    tensor = Tensor.as_subclass(absent, ShardedTensor)
    tensor.zero3_entry, tensor.since = entry, since
    return tensor


def meta_of(tensor: Any) -> Tensor:
    """What has its dtype, shape and strides."""
    return _in_place_of(tensor, tensor.zero3_entry.meta)


def _absent(tensor: Any) -> Tensor:
    """What has its dtype, device and shape, without memory."""
    return _in_place_of(tensor, tensor.zero3_entry.absent_value)


def _in_place_of(tensor: Any, whole: Tensor) -> Tensor:
    """What ``tensor`` is of ``whole``, the value: itself, or a view."""
    for function, args, kwargs in tensor.views:
        whole = function(whole, *args, **kwargs)
    return whole


def _view(source: Any, step: tuple[Any, tuple, dict[str, Any]] | None) -> ShardedTensor:
    entry, views, absent = source.zero3_entry, source.views, _absent(source)
    if step is not None:
        function, args, kwargs = step
        absent, views = function(absent, *args, **kwargs), (*views, step)
    view = sharded_tensor(entry, absent, source.since)
    view.views = views
    return view


def absent_like(meta: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element, expanded to the shape of ``meta``: NaN, or the least number of an integer
    type.
    """
    with torch.inference_mode(False):
        one = torch.full((), nothing(dtype), dtype=dtype, device=device)
    # What writes there is an error: gloo, for one, looks at the number of elements alone, and would
    # write past the end.
    refuse_writes(one)
    return one.expand(meta.shape)


def nothing(dtype: torch.dtype) -> float | int:
    """NaN, or the least number of an integer type, False of bool."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _ordinary(tensor: Any) -> Tensor:
    """A copy of the user's class; collective, unless the parameter is in use."""
    with torch.no_grad():
        if isinstance(tensor, _InUse):
            full = Tensor.detach(tensor).clone(memory_format=torch.preserve_format)
        else:
            (full,) = read([tensor])
    if not isinstance(tensor, nn.Parameter):
        return full
    copied = nn.Parameter(full, tensor.requires_grad)
    copied.__class__ = tensor.zero3_entry.cls  # type: ignore[attr-defined]
    return copied


def _assign(tensor: Any, data: Tensor) -> None:
    """``tensor.data = data``."""
    if data is tensor:
        return  # `module.to(...)` that changes nothing
    if (data.shape, data.dtype) != (tensor.shape, tensor.dtype):
        raise ResidencyError(
            f"`.data` of {describe(tensor)} was set to a tensor of shape {tuple(data.shape)} and"
            f" {data.dtype}. While the parameter is sharded its shape and dtype stay as they are:"
            " change them before, in `__init__` or `configure_model`."
        )
    with torch.no_grad():
        tensor.copy_(data.clone())  # it may be a view of the same memory


def _compute(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of whole values. What it writes to them is stored."""
    targets = instances(written(func, args, kwargs), _Sharded)
    for target in targets:
        is_initialised = getattr(func, "__module__", "") == "torch.nn.init"  # without gradients
        if target.requires_grad and torch.is_grad_enabled() and not is_initialised:
            raise RuntimeError(
                f"a leaf Variable that requires grad is being used in an in-place operation: {name}"
                f" of {describe(target)}. Do it under `torch.no_grad()`."
            )
        if graph_task() != NO_GRAPH_TASK and target.since is None:
            raise refusal(name, target)
    given = {id(each): each for each in instances((args, kwargs), _Sharded)}
    # the whole value, and what is given of it
    whole: dict[int, Tensor] = {}
    for target in targets if name in OVERWRITING else ():
        if not target.views:
            whole[id(target)] = torch.empty_like(target.zero3_entry.meta, device=target.device)
    whole |= _read_whole([each for key, each in given.items() if key not in whole])
    parts = {key: _in_place_of(each, whole[key]) for key, each in given.items()}
    full_args, full_kwargs = tree_map_only(_Sharded, lambda each: parts[id(each)], (args, kwargs))
    changed = {(target.zero3_entry, target.since) for target in targets}
    for key, each in given.items():
        if (each.zero3_entry, each.since) not in changed:
            each.zero3_entry.owner.watch(each, parts[key])
    result = func(*full_args, **full_kwargs)
    del full_args, full_kwargs
    if targets and hasattr(result, "wait"):
        result.wait()  # a collective that goes on in the background
    for target in targets:
        target.zero3_entry.owner.write(target, whole[id(target)])
        if result is parts[id(target)]:
            result = target
    return result


def read(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values of sharded tensors, those of parameters connected to autograd; collective."""
    whole = _read_whole(tensors)
    return [_in_place_of(each, whole[id(each)]) for each in tensors]


def _read_whole(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """By `id`, also of a view the whole it is of."""
    found: dict[int, Tensor] = {}
    for owner, its in owners_of(tensors).items():
        found |= owner.read(its)
    if torch.is_grad_enabled():
        with isolated():
            for each in tensors:
                if each.requires_grad:
                    found[id(each)] = connected(found[id(each)], each)
    return found


def owners_of(tensors: Iterable[Any]) -> dict[Any, list[Any]]:
    """Which engines own those of ``tensors`` that are sharded."""
    found: dict[Any, list[Any]] = {}
    for tensor in filter(is_sharded, tensors):
        found.setdefault(tensor.zero3_entry.owner, []).append(tensor)
    return found


def _differentiate(func: Any, outputs: Any, inputs: Any = None, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` or ``backward``: with respect to the parameters themselves."""
    with DisableTorchFunctionSubclass():
        edges = inputs and tuple(
            get_gradient_edge(p) if isinstance(p, _Sharded) else p for p in inputs
        )
    outputs, kwargs = tree_map_only(_Sharded, lambda p: read([p])[0], (outputs, kwargs))
    if func is torch.autograd.backward:
        return func(outputs, inputs=edges, **kwargs)
    return tuple(
        # in the dtype of the buffer; an ordinary parameter's has its own
        grad if grad is None or not is_sharded(p) else grad.to(p.zero3_entry.meta.dtype)
        for p, grad in zip(inputs, func(outputs, edges, **kwargs), strict=True)
    )


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


class _InUse(_Copied, nn.Parameter):
    """An ordinary parameter, but ``grad`` is the whole gradient, and writes to ``data`` are
    counted.

    Torch's own ``data`` hides them (``parameter.data.clamp_()``): the shards would not follow.
    """

    zero3_entry: Any
    since, views = None, ()  # see `_Sharded`
    grad = _GRAD

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        handle = Tensor.register_post_accumulate_grad_hook(self, hook)
        keep_engine_last(self)
        return handle

    @torch.compiler.disable  # dynamo would take torch's own `data` for this one
    def _alias(self) -> Tensor:
        self.zero3_entry.aliases.append(alias := _data(self))
        return alias

    data = property(_alias, _assign)


@cache
def class_in_use(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass of ``cls`` that a parameter has while it is in use."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (_InUse, cls), names)


# Dynamo would trace what answers for them, and take their memory: compiled code that is given one
# runs as it is written. Code of units' own forwards is given ordinary parameters.
torch._dynamo.config.nontraceable_tensor_subclasses |= {ShardedParameter, ShardedTensor}
