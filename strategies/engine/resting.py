"""What a parameter is, outside its unit's use and in it: right or loud.

A sharded parameter keeps its identity, name, shape, dtype and device for ever. While its unit is in use it is an ordinary
``nn.Parameter`` that views the gathered slot. Otherwise its class is :class:`RestingParameter`, and every operation on it
comes here first: questions about it (shape, dtype, hooks, ...) are answered, a read of its value gathers it (inside a
step, where all ranks run the same code) or raises; no operation sees memory that now belongs to another unit.

The class of a tensor can be switched like that because both classes have the same layout; torch's own lazy parameters do
the same. A parameter in use pays nothing but torch's look at its class.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary


class Home(Protocol):
    """The owner of parameters, as seen from here; see :class:`~.access.Access`."""

    def retire(self) -> None:
        """Another engine has taken the parameters over: stop watching them."""

    def read(self, parameter: nn.Parameter) -> Tensor:
        """The whole value in memory of its own, connected to autograd; collective."""

    def full_values(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The whole values, detached, of parameters that share this home; collective, each unit is gathered once."""

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Store a full value that all ranks have; local."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole reduced gradient, if the optimizers see one; collective then."""

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Store a full gradient that all ranks have, or clear it; local."""


@dataclass(frozen=True)
class Sharded:
    """What is known of a sharded parameter.

    Attributes:
        label: its name and its unit's, for errors.
        cls: the user's class of it.
        dtype: the user's; the slot may hold a lower one.
        home: its owner, who holds the parameter: neither would ever be freed with a strong reference.
    """

    label: str
    cls: type[nn.Parameter]
    dtype: torch.dtype
    home: weakref.ref[Home]


_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Sharded

set_data = Tensor.data.__set__  # torch's own, past the classes below: the parameter gets other memory


class ResidencyError(RuntimeError):
    """A sharded parameter was read or written where its value is not there."""


def settle(parameter: nn.Parameter, label: str, cls: type[nn.Parameter], dtype: torch.dtype, home: Home) -> None:
    """Make ``home`` answer for ``parameter`` while it rests; see :class:`Sharded`."""
    _SHARDED[parameter] = Sharded(label, cls, dtype, weakref.ref(home))


def unsettle(parameter: nn.Parameter) -> None:
    """Forget the home of ``parameter``; it is an ordinary parameter from now on."""
    _SHARDED.pop(parameter, None)


def home_of(parameter: Tensor) -> Home | None:
    """Who owns ``parameter``, if anyone does."""
    return _SHARDED[parameter].home() if parameter in _SHARDED else None


def _home(parameter: Tensor) -> Home:
    home = home_of(parameter)
    if home is None:
        raise ResidencyError(f"A parameter of shape {tuple(parameter.shape)} outlived the model that it was sharded with.")
    return home


def describe(parameter: Tensor) -> str:
    """Name of ``parameter`` and its unit."""
    return _SHARDED[parameter].label


def class_of(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class of ``parameter`` as the user made it."""
    return _SHARDED[parameter].cls if parameter in _SHARDED else type(parameter)


def is_sharded(parameter: Tensor) -> bool:
    """Whether an engine owns ``parameter`` (resting or in use)."""
    return parameter in _SHARDED


def take_gradient(parameter: Tensor) -> Tensor | None:
    """What autograd just accumulated in ``parameter.grad``, which is cleared."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = parameter.grad
        parameter.grad = None
    return grad


class FullGradient(Tensor):
    """The whole gradient of a sharded parameter, in memory of its own: a change in place is stored in the shards."""

    parameter: nn.Parameter

    @classmethod
    def of(cls, parameter: nn.Parameter, value: Tensor) -> FullGradient:
        """``value`` as the gradient of ``parameter``."""
        gradient = value.as_subclass(cls)
        gradient.parameter = parameter
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Read, or write and store."""
        return _with_copies(func, args, kwargs or {})


class ReadOnlyCopy(Tensor):
    """A view of a copy of something sharded, which a change would not reach: it would be lost, and is an error."""

    told: str  # what it is, and what to do instead

    @classmethod
    def of(cls, value: Tensor, told: str) -> ReadOnlyCopy:
        """``value``, to be read."""
        copy = value.as_subclass(cls)
        copy.told = told
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Read, or raise."""
        return _with_copies(func, args, kwargs or {})


def _with_copies(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of arguments among which are copies of what is sharded."""
    name = _name(func)
    written = _written(name, args, kwargs)
    for copy in _all(written, ReadOnlyCopy):
        raise ResidencyError(f"`{name}` would change {copy.told}")
    source = args[0] if args and isinstance(args[0], FullGradient | ReadOnlyCopy) else None
    with torch._C.DisableTorchFunctionSubclass():
        if source is not None and name in ("__deepcopy__", "__reduce_ex__"):
            return func(source.as_subclass(Tensor), *args[1:], **kwargs)
        result = func(*args, **kwargs)
        for gradient in _all(written, FullGradient):
            _home(gradient.parameter).set_gradient(gradient.parameter, gradient)
        if source is None or result is source:
            return result
        if name in ("numpy", "__array__"):
            result.flags.writeable = False  # nobody would tell the shards
        if isinstance(source, ReadOnlyCopy):
            return _shield(result, source, source.told)
        if name == "data.__get__":
            return FullGradient.of(source.parameter, result)
        whole = "Change the whole gradient, in place or by assigning: `parameter.grad = ...`."
        return _shield(result, source, f"a view of a copy of a sharded gradient. {whole}")


def _shield(result: Any, source: Tensor, told: str) -> Any:
    """``result``, of which what lies in the memory of ``source`` can only be read."""
    if type(result) in (tuple, list):
        return type(result)(_shield(each, source, told) for each in result)
    if not isinstance(result, Tensor) or is_functorch_wrapped_tensor(result):
        return result
    shared = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return ReadOnlyCopy.of(result, told) if shared and result.numel() else result.as_subclass(Tensor)


class _InUse:
    """Makes ``parameter.data`` an alias that counts versions, as ``detach()`` does.

    Torch's own hides writes: ``parameter.data.clamp_()`` leaves the version as it was, so nobody could tell that the shards
    have to follow. Costs nothing but torch's look at the class of each operand.
    """

    _cls: type[nn.Parameter]  # the user's

    @property
    def data(self) -> Tensor:
        return Tensor.detach(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ResidencyError(
                f"`.data` of parameter {describe(self)} was set to a tensor of shape {tuple(value.shape)} and {value.dtype}. "
                "While the parameter is sharded its shape and dtype stay as they are."
            )
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad)
            copied.__class__ = self._cls
            memo[id(self)] = copied
        return memo[id(self)]


@cache
def class_while_used(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass of ``cls`` that a parameter has while it is in use."""
    return type(cls.__name__, (_InUse, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_cls": cls})


class RestingParameter(nn.Parameter):
    """A parameter whose unit is not in use. See the module's docstring."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer, gather or raise."""
        kwargs = kwargs or {}
        name = _name(func)
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "dtype.__get__":
            return _SHARDED[args[0]].dtype
        if name == "grad.__get__":
            return _home(args[0]).gradient(args[0])
        if name == "grad.__set__":
            return _home(args[0]).set_gradient(args[0], args[1])
        if name == "__repr__":
            return f"RestingParameter({describe(args[0])}, shape={tuple(args[0].shape)})"
        if func is torch.equal and (args[0] is args[1] or args[0].shape != args[1].shape):
            return args[0] is args[1]
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(func, *args, **kwargs)
        if name in _LIKE and isinstance(args[0], RestingParameter):
            kwargs.setdefault("dtype", _SHARDED[args[0]].dtype)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in ("view_as", "expand_as") and len(args) == 2 and args[0] is args[1]:
            return _materialize(args[0])  # and no view of it: this is how the node is found that accumulates the gradient
        if name == "register_post_accumulate_grad_hook":
            return _before_the_engine(*args)
        if name == "copy_" and isinstance(args[0], RestingParameter):
            _home(args[0]).write(args[0], _materialize(args[1]))
            return args[0]
        return _compute(func, name, args, kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        raise ResidencyError(
            f"Parameter {describe(self)} is sharded over the ranks and cannot be copied or pickled with its "
            "module. Copy the module before training starts, or inside `with strategy.gathered(module):`."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})


def _compute(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """``func`` of full values, or an error if it writes to what rests."""
    target = args[0] if args else None
    written = _all(target if name in _RAW else _written(name, args, kwargs), RestingParameter)
    if written:
        raise ResidencyError(
            f"`{name}` would touch the memory of parameter {describe(written[0])} while it is sharded "
            "over the ranks. Use `with strategy.gathered(module, modify=True):` (on all ranks) to read and write "
            "its full value."
        )
    values = _materialize(args)
    result = func(*values, **_materialize(kwargs))
    if not isinstance(target, RestingParameter):
        return result
    told = (
        f"a copy of the value of parameter {describe(target)}, not the parameter. Write `parameter.copy_(...)`, on all "
        "ranks, or change it in `with strategy.gathered(module, modify=True):`."
    )
    if name in ("numpy", "__array__"):
        result.flags.writeable = False
    return _shield(result, values[0], told)


# Questions that do not look at the value.
_METADATA = frozenset(
    f"{name}.__get__"
    for name in "shape ndim device layout requires_grad is_leaf grad_fn names is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_mkldnn is_mps is_xpu is_nested is_sparse_csr output_nr itemsize nbytes _version "
    "_post_accumulate_grad_hooks _backward_hooks retains_grad is_ipu is_vulkan is_maia is_mtia is_xla "
    "volatile".split()
) | frozenset(
    "size dim numel nelement stride is_contiguous is_floating_point is_complex is_signed element_size register_hook "
    "requires_grad_ requires_grad.__set__ storage_offset get_device "
    "ndimension is_inference is_shared __len__ __hash__ has_names is_same_size _is_view is_conj is_neg "
    "retain_grad _backward_hooks.__set__ _post_accumulate_grad_hooks.__set__ is_nonzero.__get__".split()
)
# New tensors that take after a parameter, but not its value.
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "new_tensor new_empty_strided".split()
)
# Ways around this class to the memory itself.
_RAW = frozenset(
    "data.__get__ data.__set__ data_ptr untyped_storage storage _typed_storage share_memory_ set_ swap_tensors "
    "__dlpack__ __cuda_array_interface__.__get__ apply_ map_ resize_ const_data_ptr".split()
)


def _differentiate(func: Any, outputs: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` or ``backward``: with respect to the parameters, not to copies of their values."""
    wanted = () if inputs is None else tuple(inputs)
    edges = tuple(_edge(p) if isinstance(p, RestingParameter) else p for p in wanted)
    if func is torch.autograd.backward:
        return func(_materialize(outputs), *args, inputs=None if inputs is None else edges, **kwargs)
    zeros = kwargs.pop("materialize_grads", False)
    if zeros:
        kwargs["allow_unused"] = True
    grads = func(_materialize(outputs), edges, *args, **kwargs)
    return tuple(torch.zeros_like(p) if g is None and zeros else g for p, g in zip(wanted, grads, strict=True))


def _edge(parameter: RestingParameter) -> GradientEdge:
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(parameter)


def _before_the_engine(parameter: RestingParameter, hook: Any) -> Any:
    """Register a post-accumulate hook of the user's: the engine's own must come last."""
    with torch._C.DisableTorchFunctionSubclass():
        handle = parameter.register_post_accumulate_grad_hook(hook)
        keep_engine_last(parameter)
    return handle


def keep_engine_last(parameter: Tensor) -> None:
    """Let the engine's post-accumulate hook, which takes the gradient away, run after the user's."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None and len(hooks) > 1:
        for key in [key for key, hook in hooks.items() if hasattr(hook, "takes_gradient")]:
            hooks[key] = hooks.pop(key)  # autograd reads the dict in the order of insertion, whatever `move_to_end` did


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__", "__delete__") else name


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and not name.endswith("__")


def _written(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Arguments that the function of this name writes to."""
    return args[0] if args and (_writes(name) or kwargs.get("inplace") is True) else None, kwargs.get("out")


def _all(value: Any, cls: type[Tensor]) -> list[Any]:
    """The instances of ``cls`` in a tensor or (nested) list of tensors."""
    if isinstance(value, cls):
        return [value]
    return [found for item in value for found in _all(item, cls)] if isinstance(value, tuple | list) else []


def _materialize(value: Any) -> Any:
    if isinstance(value, RestingParameter):
        return _home(value).read(value)
    if isinstance(value, tuple | list):
        return type(value)(map(_materialize, value)) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _materialize(item) for key, item in value.items()}
    return value
