"""What functions of torch do to the tensors that they are given, as far as their names tell; see
:mod:`~.resting`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

# Questions that do not look at the value.
METADATA = frozenset(
    f"{name}.__get__"
    for name in (
        "shape ndim device layout requires_grad is_leaf grad_fn names output_nr _version"
        " retains_grad volatile is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized"
        " is_mkldnn is_mps is_xpu is_nested is_ipu is_vulkan is_maia is_mtia is_xla"
        " _backward_hooks _post_accumulate_grad_hooks"
    ).split()
) | frozenset(
    "size dim ndimension numel nelement stride __len__ __hash__ get_device is_contiguous"
    " is_floating_point is_complex is_signed is_inference is_shared is_same_size is_conj is_neg"
    " _is_view has_names requires_grad_ requires_grad.__set__ retain_grad register_hook"
    " register_post_accumulate_grad_hook _backward_hooks.__set__"
    " _post_accumulate_grad_hooks.__set__ dtype.__get__ itemsize.__get__ nbytes.__get__"
    " element_size storage_offset is_pinned grad.__get__ grad.__set__ grad.__delete__ __dir__"
    " dim_order dense_dim sparse_dim is_distributed __dlpack_device__ _cdata.__get__"
    " _has_compatible_shallow_copy_type".split()
)
# Questions about dtypes and devices, of an argument that need not be the first.
KINDS = frozenset({"result_type", "type", "type_as", "to"})
# New tensors that take after a parameter, but not its value.
LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty"
    " new_zeros new_ones new_full new_tensor new_empty_strided".split()
)
# Ways to the memory itself.
RAW = frozenset(
    "data.__get__ data.__set__ data_ptr untyped_storage storage _typed_storage share_memory_ set_"
    " swap_tensors __dlpack__ _to_dlpack __cuda_array_interface__.__get__ apply_ map_ resize_"
    " const_data_ptr".split()
)
# They give a tensor other memory, or write to it at a time of their own.
REPLACING = frozenset({"set_", "recv", "irecv", "recv_anysource"})
# They end like functions that write, but of other tensors in the same memory none sees it.
ABOUT_ITSELF = frozenset(
    "requires_grad_ detach_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_"
    " as_strided_".split()
)
# How users write them.
_ATTRIBUTES = {
    "__get__": "parameter.{}",
    "__set__": "parameter.{} = ...",
    "__delete__": "del parameter.{}",
}
_SIGNS = {
    "__iadd__": "+=",
    "__isub__": "-=",
    "__imul__": "*=",
    "__itruediv__": "/=",
    "__ipow__": "**=",
}
_SPOKEN = {name: f"`parameter {sign} ...`" for name, sign in _SIGNS.items()}
_SPOKEN |= {
    "__setitem__": "`parameter[...] = ...`",
    "__call__": "A scripted function",
    "Tensor": "`torch.Tensor`",
}
_SPOKEN |= {"_to_dlpack": "`to_dlpack`"}
_SPOKEN |= {
    "_flat_vmap": "`torch.func.vmap`",
    "_propagate_functional_input_mutation": "`torch.func.functionalize`",
}
_COLLECTIVES = "torch.distributed.distributed_c10d"
# the other collectives write to their first argument
_SENDING = frozenset({"send", "isend", "gather"})


def name_of(func: Any) -> str:
    """``mul_``, ``data.__get__`` and the like."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{func.__self__.__name__}.{name}"
    return name.partition(".")[0]  # `torch.ops.aten.mul_.Tensor`


def in_words(name: str) -> str:
    """What :func:`name_of` returns, as users write it."""
    attribute, _, kind = name.rpartition(".")
    if kind in _ATTRIBUTES:
        return f"`{_ATTRIBUTES[kind].format(attribute)}`"
    return _SPOKEN.get(name, f"`{name}`")


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Arguments that ``func`` writes to."""
    name, given = name_of(func), (*args, *kwargs.values())
    if hasattr(func, "writes"):  # see past_python.py
        return given[func.writes]
    first = given[0] if given else None  # `torch.nn.init` hands all of them on by name
    if getattr(func, "__module__", None) == _COLLECTIVES:
        return () if name in _SENDING else (first,)
    if name in ("batch_norm", "native_batch_norm"):  # running statistics
        return (
            args[3:5] if len(args) > 5 and args[5] else args[1:3] if kwargs.get("training") else ()
        )
    if name in ("embedding", "embedding_bag") and kwargs.get("max_norm") is not None:
        return (args[1],)
    return first if _writes(name) or kwargs.get("inplace") is True else None, kwargs.get("out")


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name in ("data.__set__", "real.__set__", "imag.__set__") or (
        name.endswith("_") and not name.endswith("__")
    )


def instances(value: Any, cls: type[T]) -> list[T]:
    """The instances of ``cls`` in nested containers and dataclasses."""
    if isinstance(value, cls):
        return [value]
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, tuple | list):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, f.name, None) for f in fields(value)]
    return [found for item in inside for found in instances(item, cls)]


def replaced(value: Any, cls: type[T], by: Callable[[T], Any]) -> Any:
    """``value`` with what ``by`` returns in the place of instances of ``cls``, in lists, tuples and
    dicts.
    """
    if isinstance(value, cls):
        return by(value)
    if isinstance(value, tuple | list):
        items = [replaced(item, cls, by) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replaced(item, cls, by) for key, item in value.items()}
    return value
