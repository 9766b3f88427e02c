"""What functions of torch do to the tensors that they are given, as far as their names tell; see
:mod:`~.sharded`.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

# Questions that do not look at the value.
METADATA = frozenset(
    f"{name}.__get__"
    for name in (
        "shape ndim device layout requires_grad is_leaf grad_fn names output_nr _version"
        " retains_grad grad is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_mkldnn"
        " is_mps is_xpu is_nested is_ipu is_vulkan is_maia is_mtia is_xla _backward_hooks"
        " _post_accumulate_grad_hooks _base"
    ).split()
) | frozenset(
    "size dim ndimension numel nelement __len__ __hash__ get_device is_floating_point is_complex"
    " is_signed is_inference is_shared is_same_size is_conj is_neg _is_view has_names"
    " requires_grad_ requires_grad.__set__ grad.__set__ retain_grad register_hook"
    " register_post_accumulate_grad_hook _backward_hooks.__set__"
    " _post_accumulate_grad_hooks.__set__ is_pinned __dir__ dense_dim sparse_dim is_distributed"
    " __dlpack_device__ _cdata.__get__ _has_compatible_shallow_copy_type".split()
)
# Questions about dtype and strides, which the memory of one NaN does not tell.
ABOUT_LAYOUT = frozenset(
    "dtype.__get__ itemsize.__get__ nbytes.__get__ grad_dtype.__get__ element_size stride"
    " is_contiguous dim_order".split()
)
# Questions about dtypes and devices, of an argument that need not be the first. What is of the kind
# already stays as it is: `module.double()` in a second run.
KINDS = frozenset("result_type type type_as to double float half bfloat16".split())
# New tensors that take after a tensor, but not its value.
LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty"
    " new_zeros new_ones new_full new_tensor new_empty_strided".split()
)
# The same value, whenever it is read.
ALIASES = frozenset({"data.__get__", "detach"})
# Parts of the same memory, in another shape.
VIEWS = frozenset(
    "__getitem__ view reshape flatten unflatten t transpose swapaxes movedim permute squeeze"
    " unsqueeze narrow select diagonal T.__get__ mT.__get__".split()
)
# Ways to the memory itself.
OF_MEMORY = frozenset(
    "data_ptr const_data_ptr untyped_storage storage _typed_storage share_memory_ set_ resize_"
    " resize_as_ swap_tensors as_subclass real.__set__ imag.__set__".split()
)
# In place, and they do not look at what they overwrite.
OVERWRITING = frozenset({"zero_", "_foreach_zero_", "fill_", "copy_"})
COLLECTIVES = "torch.distributed.distributed_c10d"
# the other collectives write to their first argument
_SENDING = frozenset({"send", "isend", "gather"})


def name_of(func: Any) -> str:
    """``mul_``, ``data.__get__`` and the like."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{func.__self__.__name__}.{name}"
    return name.partition(".")[0]  # `torch.ops.aten.mul_.Tensor`


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Arguments that ``func`` writes to."""
    name, given = name_of(func), (*args, *kwargs.values())
    first = given[0] if given else None  # `torch.nn.init` hands all of them on by name
    if getattr(func, "__module__", None) == COLLECTIVES:
        return () if name in _SENDING else (first,)
    return first if _writes(name) else None, kwargs.get("out")


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name.endswith("_") and not name.endswith("__")


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
