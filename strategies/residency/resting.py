"""What a parameter is, outside its unit's use and in it: right or loud.

While its unit is in use a sharded parameter is an ordinary ``nn.Parameter`` that views the gathered
slot. Otherwise its class is :class:`RestingParameter`, and every operation on it comes here first:
questions about it (shape, dtype, hooks, ...) are answered, a read of its value gathers it and a
change is stored (inside a step, where all ranks run the same code), or they raise; none sees memory
that now belongs to another unit. Torch's own lazy parameters switch the class of a tensor, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._guards import TracingContext
from torch.autograd.graph import get_gradient_edge

from .functions import (
    ABOUT_ITSELF,
    KINDS,
    LIKE,
    METADATA,
    RAW,
    REPLACING,
    in_words,
    instances,
    name_of,
    replaced,
    written,
)
from .given_out import OF_MEMORY, GuardedStorage
from .home import IN_COMPILED_CODE, ResidencyError, about, describe, home_of, is_sharded, owner_of

# Torch's own, past the classes below.
set_data = Tensor.data.__set__  # the parameter gets other memory
as_subclass = Tensor.as_subclass
get_grad, set_grad = Tensor.grad.__get__, Tensor.grad.__set__  # what autograd adds to

# Identity of the backward pass that runs in this thread.
graph_task = torch._C._current_graph_task_id
NO_GRAPH_TASK = -1


def gradient_of(parameter: Tensor) -> Tensor | None:
    """What ``parameter.grad`` is: in a backward this rank's own, when autograd has just made it,
    else the whole one.
    """
    with torch._C.DisableTorchFunctionSubclass():
        held = get_grad(parameter)
    # torch.compile looks at what it compiles for
    if held is not None or TracingContext.try_get() is not None:
        return held
    return owner_of(parameter).gradient(parameter)


def set_gradient_of(parameter: Tensor, grad: Tensor | None) -> None:
    """``parameter.grad = grad``: in a backward this rank's own, which is reduced after the hook
    that sets it.
    """
    if graph_task() == NO_GRAPH_TASK:
        owner_of(parameter).set_gradient(parameter, grad)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            set_grad(parameter, grad)


def told_of_gradient(parameter: nn.Parameter) -> str:
    """What views of its gradient are, see :attr:`ShardedCopy.told`."""
    return (
        f"a view of a copy of the gradient of parameter {describe(parameter)}. Change the whole"
        " gradient, in place or by assigning: `parameter.grad = ...`."
    )


def _asking(attribute: Any) -> property:
    """``attribute`` of tensors, whose setter in torch writes without a look at the class."""
    return property(
        attribute.__get__,
        lambda each, value: each.__torch_function__(attribute.__set__, (), (each, value)),
    )


class Absent:
    """Of tensors whose values are not in their memory: functions that do not ask for classes have
    to ask these.
    """

    real, imag = _asking(Tensor.real), _asking(Tensor.imag)

    def refusal(self, name: str) -> ResidencyError:
        """What to raise when the function ``name`` would touch their memory."""
        raise NotImplementedError


class ShardedCopy(Tensor):
    """A copy of something sharded: a whole gradient, whose changes are stored in the shards, or
    what can only be read.
    """

    parameter: nn.Parameter | None = None  # whose whole gradient it is, if it is one
    # if it is that, or a view of one: its memory, see `engine.held_gradients.Held`
    held: Any = None
    told: str = ""  # for errors: what it is, and what to do instead of what it cannot bear
    # if it is of a value: whose, and its age then
    read: tuple[nn.Parameter, tuple[int, int]] | None = None

    @classmethod
    def of(
        cls,
        value: Tensor,
        told: str,
        parameter: nn.Parameter | None = None,
        held: Any = None,
        read: tuple | None = None,
    ) -> ShardedCopy:
        """``value``, with what is known of it."""
        copy = as_subclass(value, cls)
        copy.told, copy.parameter, copy.held, copy.read = told, parameter, held, read
        return copy

    def refusal(self, name: str) -> ResidencyError:
        """What to raise when the function ``name`` would give its memory to what does not ask its
        class.
        """
        return ResidencyError(
            f"{in_words(name)} would share the memory of {self.told} To read it elsewhere take a"
            " `.clone()`."
        )

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)  # an alias, as torch's is

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Read, write and store, or raise."""
        return _with_copies(func, args, kwargs or {})


# They give the memory of a copy to what does not ask its class; `cuda` asks for the device before.
_SHARING = frozenset("storage __dlpack__ _to_dlpack __cuda_array_interface__.__get__".split())


@torch._disable_dynamo  # compiled functions are given copies, too
def _with_copies(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments among which are copies of what is sharded."""
    given = (*args, *kwargs.values())
    for absent in instances(given, Absent):
        return absent.__torch_function__(func, (), args, kwargs)  # their memory is not theirs now
    if func in (torch.autograd.grad, torch.autograd.backward):
        return _differentiate(func, *args, **kwargs)
    if func is Tensor.backward:
        # hooks and recomputations run in it, so nothing is switched off
        return func(_plain(args[0]), *args[1:], **kwargs)
    name = name_of(func)
    if name not in METADATA:
        _require_current(instances(given, ShardedCopy))
    targets = () if name in ABOUT_ITSELF else written(func, args, kwargs)
    for copy in instances(targets, ShardedCopy):
        if (
            copy.held is None
            or name in REPLACING
            or (copy.parameter is None and name == "data.__set__")
        ):
            raise ResidencyError(f"{in_words(name)} would change {copy.told}")
    if name in _SHARING and (args[0].is_cuda or "cuda" not in name):
        raise args[0].refusal(name)
    with (
        torch._C.DisableTorchFunctionSubclass(),
        changes_kept(given if name not in METADATA | ABOUT_ITSELF else (), name, targets),
    ):
        if name in ("__deepcopy__", "__reduce_ex__"):
            return _ordinary(func, *args)
        if name == "detach_" and not args[0].requires_grad:
            return args[0]  # as it is: torch refuses it of views
        result = func(*args, **kwargs)
        if name == "untyped_storage":
            return GuardedStorage(
                result, OF_MEMORY | {"clone", "tolist"}, lambda: args[0].refusal(name)
            )
        if hasattr(result, "wait") and instances(targets, ShardedCopy):
            result.wait()  # a collective that goes on in the background
        if name in ("data.__get__", "detach") and args[0].parameter is not None:
            return ShardedCopy.of(result, args[0].told, args[0].parameter, args[0].held)
        if name == "_base.__get__":
            return result  # torch.compile asks for it until it is no view
        return shield(
            result, [(each, each.told, each.read) for each in instances(given, ShardedCopy)]
        )


@contextmanager
def changes_kept(given: Iterable[Any], name: str, targets: Any = ()) -> Iterator[None]:
    """Store gradients among ``given`` that are changed in place within, and those in ``targets``;
    others raise.

    Operators of the user's, scripts and the like do not tell by their names what they write to:
    torch counts it.
    """
    copies = instances(tuple(given), ShardedCopy)
    counts = [writes_to(copy) for copy in copies]
    yield
    known = {id(copy) for copy in instances(targets, ShardedCopy)}
    for copy, count in zip(copies, counts, strict=True):
        if id(copy) not in known and writes_to(copy) == count:
            continue
        if copy.held is None:
            raise ResidencyError(f"{in_words(name)} has changed {copy.told}")
        if (keeper := _keeper_of(copy.held)) is not None:
            with torch._C._DisableFuncTorch():  # no transform is to see it
                keeper.stored(copy)


def _keeper_of(held: Any) -> Any:
    """See :meth:`.Home.keeper_of`; None, too, if the gradient has outlived its engine."""
    home = home_of(held.entry.parameter)
    return None if home is None else home.keeper_of(held)


def writes_to(tensor: Tensor) -> int:
    """How many there were, as far as torch counts them."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def _require_current(copies: list[ShardedCopy]) -> None:
    """Values that were read before their parameters changed are not what torch's aliases would be
    by now; gradients follow.
    """
    for copy in copies:
        parameter, age = copy.read or (None, None)
        if (
            parameter is None
            and copy.held is not None
            and (keeper := _keeper_of(copy.held)) is not None
        ):
            keeper.follow(copy.held)
        elif (
            parameter is not None
            and (home := home_of(parameter)) is not None
            and home.age(parameter) != age
        ):
            raise ResidencyError(
                f"A value of parameter {describe(parameter)} was read (`detach()`, a view) and"
                " kept, and the parameter has changed since: in torch the value would have"
                " followed. Read it again, or keep a copy (`.clone()`)."
            )


def _ordinary(func: Any, copy: Tensor, argument: Any) -> Any:
    """``copy.deepcopy`` or pickling: what comes out is an ordinary tensor."""
    plain = copy.detach().requires_grad_(copy.requires_grad) if copy.is_leaf else _plain(copy)
    result = func(plain, argument)
    if isinstance(argument, dict):
        # deepcopy's memory, where another tensor may soon have this id
        argument.pop(id(plain), None)
    return result


def _plain(value: Any) -> Any:
    """Copies as ordinary tensors in the same memory."""
    return replaced(value, ShardedCopy, lambda copy: as_subclass(copy, Tensor))


def shield(result: Any, sources: list[tuple[Tensor, str, tuple | None]]) -> Any:
    """``result``; what lies in the memory of one of ``sources`` follows it, or can only be read;
    see :meth:`ShardedCopy.of`.
    """
    if type(result) in (tuple, list):
        return type(result)(shield(each, sources) for each in result)
    if isinstance(result, np.ndarray):
        result.flags.writeable = False  # nobody would tell the shards
        for held in [source for source, *_ in sources if getattr(source, "held", None) is not None]:
            watch_gradient(held)  # it follows
    if not isinstance(result, Tensor) or isinstance(result, ShardedCopy | Absent):
        return result
    address = _address(result)
    for source, told, read in sources:
        if address and address == _address(source):
            return ShardedCopy.of(result, told, held=getattr(source, "held", None), read=read)
    return result


def watch_gradient(tensor: Any, addressed: bool = False) -> bool:
    """Whether it is in the memory of a gradient, which from here on is compared with what it
    was.
    """
    if not isinstance(tensor, ShardedCopy) or tensor.held is None:
        return False
    if (keeper := _keeper_of(tensor.held)) is not None:
        keeper.watch(tensor.held, addressed)
    return True


def _address(tensor: Tensor) -> int:
    """Where the memory that ``tensor`` views begins; 0 if it has none of the usual kind."""
    if tensor.layout != torch.strided or is_functorch_wrapped_tensor(tensor) or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


# What a parameter says of itself, whose slot may have another dtype, and has a place among others.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "dtype.__get__": lambda p: about(p).dtype,
    "itemsize.__get__": lambda p: about(p).dtype.itemsize,
    "element_size": lambda p: about(p).dtype.itemsize,
    "nbytes.__get__": lambda p: p.numel() * about(p).dtype.itemsize,
    "storage_offset": lambda p: 0,
    "is_set_to": lambda tensor, other: tensor is other,
    "grad_dtype.__get__": lambda p: about(p).dtype,
    "grad.__get__": gradient_of,
    "grad.__set__": set_gradient_of,
    "grad.__delete__": lambda p: set_gradient_of(p, None),
    "__repr__": lambda p: f"RestingParameter({describe(p)}, shape={tuple(p.shape)})",
    "__format__": object.__format__,
}


class RestingParameter(Absent, nn.Parameter):
    """A parameter whose unit is not in use. See the module's docstring."""

    def refusal(self, name: str) -> ResidencyError:
        """See :meth:`Absent.refusal`."""
        return refusal(name, self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer, gather or raise."""
        kwargs = kwargs or {}
        name, target = name_of(func), args[0] if args else None
        resting = isinstance(target, RestingParameter)
        if name in _ANSWERS:
            return _ANSWERS[name](*args)
        if name == "data.__set__" and args[1] is target:
            return None
        if (
            func is torch.equal
            and len(args) == 2
            and (target is args[1] or target.shape != args[1].shape)
        ):
            return target is args[1]
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, *args, **kwargs)
        if name in METADATA or (resting and name in LIKE):
            if name in LIKE:
                kwargs.setdefault("dtype", about(target).dtype)
                args, kwargs = (target, *_full(args[1:], [])), _full(kwargs, [])
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if name == "register_post_accumulate_grad_hook":
                    keep_engine_last(target)
            return result
        if name in KINDS:
            # the first
            valued = name in ("type_as", "to") or (name == "type" and len((*args, *kwargs)) > 1)
            args, kwargs = (*args[:valued], *_kinds(args[valued:])), _kinds(kwargs)
            if not (valued and resting):
                return func(*args, **kwargs)
            if name == "to" and func(like := _kinds(target), *args[1:], **kwargs) is like:
                return target  # as it is already, as `metric.to(device)` finds the network in it
        if name in ("view_as", "expand_as") and len(args) == 2 and target is args[1]:
            # no view: this is how the node is found that accumulates the gradient
            return owner_of(target).read(target)
        if name in ("view_as", "expand_as", "reshape_as") and not resting:
            return getattr(target, name.removesuffix("_as"))(args[1].shape)
        if name == "copy_" and resting and len(args) > 1:
            if torch.is_grad_enabled() and target.requires_grad:
                raise refusal(name, target)  # torch raises, too
            owner_of(target).write(target, _full(args[1], []))
            return target
        return _compute(func, name, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ResidencyError(
            f"Parameter {describe(self)} is sharded over the ranks and cannot be copied or pickled"
            " with its module. Copy the module before training starts, or inside `with"
            " strategy.gathered(module):`."
        )

    __reduce_ex__ = __deepcopy__


def _kinds(value: Any) -> Any:
    """``value`` with what has their dtypes, devices and shapes, in next to no memory, in the place
    of resting parameters.
    """
    return replaced(
        value,
        RestingParameter,
        lambda p: torch.empty((), dtype=about(p).dtype, device=p.device).expand(p.shape),
    )


def _compute(func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of full values. What it writes to them is stored, or an error."""
    raw = name in RAW
    touched = instances(args[:1] if raw else written(func, args, kwargs), RestingParameter)
    never = raw or name in ABOUT_ITSELF or hasattr(func, "writes")
    if touched and (never or not all(map(_may_change, touched))):
        raise refusal(name, touched[0])
    read: list[tuple[Tensor, nn.Parameter]] = []
    result = func(*_full(args, read), **_full(kwargs, read))
    changed = {id(p): (copy, p) for copy, p in read if not copy.is_inference() and copy._version}
    if touched and len(changed) < len(touched):
        raise refusal(name, touched[0])  # it writes past the counters of torch, or to one twice
    for copy, parameter in changed.values():
        if not _may_change(parameter) or copy.requires_grad or copy.shape != parameter.shape:
            raise ResidencyError(f"{in_words(name)} would change {told_of_value(parameter)}")
        owner_of(parameter).write(parameter, copy)
        result = parameter if result is copy else result
    return shield(
        result,
        [
            (copy, told_of_value(parameter), (parameter, owner_of(parameter).age(parameter)))
            for copy, parameter in read
        ],
    )


def _may_change(parameter: nn.Parameter) -> bool:
    """Whether a change in place can be stored: where all ranks run the same code, and torch allows
    it and counts it.
    """
    differentiated = graph_task() != NO_GRAPH_TASK or (
        torch.is_grad_enabled() and parameter.requires_grad
    )
    return (
        owner_of(parameter).in_step and not differentiated and not torch.is_inference_mode_enabled()
    )


_CHANGE = (
    "change the parameter itself, under `torch.no_grad()` (`parameter.copy_(...)`); between steps"
    " (`on_train_batch_end`) read and change it in `with strategy.gathered(module, modify=True):`."
    " Both are for all ranks."
)


def refusal(name: str, parameter: nn.Parameter) -> ResidencyError:
    """What to raise when the function ``name`` would touch the memory of ``parameter``."""
    rest = (
        IN_COMPILED_CODE
        if TracingContext.try_get()
        else f"Inside a step read `parameter.detach()` and {_CHANGE}"
    )
    return ResidencyError(
        f"{in_words(name)} would touch the memory of parameter {describe(parameter)}, which is"
        f" sharded over the ranks. {rest}"
    )


def told_of_value(parameter: nn.Parameter) -> str:
    """What copies of its value are, see :attr:`ShardedCopy.told`."""
    return (
        f"a copy of the value of parameter {describe(parameter)}, not the parameter. Inside a step"
        f" {_CHANGE}"
    )


def _differentiate(func: Any, outputs: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` or ``backward``: with respect to the parameters, not to copies of
    their values.
    """
    wanted = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    with torch._C.DisableTorchFunctionSubclass():
        edges = tuple(
            get_gradient_edge(p) if isinstance(p, RestingParameter | ShardedCopy) else p
            for p in wanted
        )
    outputs = _plain(_full(outputs, []))
    if func is torch.autograd.backward:
        return func(outputs, *args, inputs=None if inputs is None else edges, **kwargs)
    if zeros := kwargs.pop("materialize_grads", False):
        kwargs["allow_unused"] = True
    found = list(zip(wanted, func(outputs, edges, *args, **kwargs), strict=True))
    # In the dtype of the slot; an ordinary parameter's has its own.
    grads = [
        (p, grad if grad is None or not is_sharded(p) else grad.to(about(p).dtype))
        for p, grad in found
    ]
    return tuple(torch.zeros_like(p) if grad is None and zeros else grad for p, grad in grads)


def keep_engine_last(parameter: Tensor) -> None:
    """Let the engine's post-accumulate hook, which takes the gradient away, run after the
    user's.
    """
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and len(hooks) > 1:
        for key in [key for key, hook in hooks.items() if hasattr(hook, "takes_gradient")]:
            # autograd reads the dict in the order of insertion, whatever `move_to_end` did
            hooks[key] = hooks.pop(key)


def _full(value: Any, read: list[tuple[Tensor, nn.Parameter]]) -> Any:
    """``value`` with full values in the place of resting parameters; ``read`` notes these, and of
    which they are.
    """

    def value_of(parameter: RestingParameter) -> Tensor:
        read.append((owner_of(parameter).read(parameter), parameter))
        return read[-1][0]

    return replaced(value, RestingParameter, value_of)
