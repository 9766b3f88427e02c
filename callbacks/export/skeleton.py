"""Trace a model without its weights."""

from __future__ import annotations

import copy
import io
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from ...strategies.checkpoints import Skeleton
from .onnx_graph import GRAPH, graph_of

_PACKAGE = __name__.partition(".")[0]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # by place, by name


def trace(
    module: nn.Module, name: str, inputs: Inputs, dynamic_shapes: Any = None, is_onnx: bool = False
) -> Skeleton:
    """Export a part of a module by ``torch.export``, in evaluation mode; local.

    Args:
        module: may be sharded, or on any device.
        name: of the part; "" for the module itself.
        inputs: of the part, on the CPU.
        dynamic_shapes: as ``torch.export.export`` takes them; a dimension may be a string, too.
        is_onnx: add the graph in ONNX.
    """
    named = cache(lambda dim: Dim.AUTO if dim == "auto" else Dim(dim))
    shapes = tree_map_only(str, named, dynamic_shapes)
    bare, tensors, copy_alone = _without_weights(module, name, FakeTensorMode())
    with copy_alone:
        program = torch.export.export(bare, *inputs, dynamic_shapes=shapes)
    stream = io.BytesIO()
    torch.export.save(program, stream)
    skeleton = Skeleton.of_program(stream, tensors, _prefix(name))
    if is_onnx:
        skeleton.records[GRAPH] = graph_of(program)
    return skeleton


def script(module: nn.Module, name: str, folder: Path) -> Skeleton:
    """Compile a part of a module to TorchScript, in evaluation mode; local.

    Args:
        module: see :func:`trace`.
        name: see :func:`trace`.
        folder: has, for a moment, a file as large as the weights.
    """
    bare, tensors, _ = _without_weights(module, name, nullcontext())
    is_whole = isinstance(bare, LightningModule)
    scripted = bare.to_torchscript() if is_whole else torch.jit.script(bare)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        scripted.save(file.name)
        return Skeleton.of_script(file.name, tensors, _prefix(name), bare.state_dict())


def inputs_of(module: nn.Module, parts: list[str], inputs: Inputs) -> dict[str, Inputs]:
    """Return what parts of a module get when it first calls them, as zeros; local.

    The module itself has the name "", and gets ``inputs``.
    """
    if parts == [""]:
        return {"": inputs}
    found: dict[str, Inputs] = {}

    def note(name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.setdefault(name, (args, kwargs))

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    bare, _, copy_alone = _without_weights(module, "", mode)
    for name in parts:
        hook = partial(note, name)
        bare.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with mode, copy_alone:
            bare(*inputs[0], **inputs[1])
    except Exception:  # what comes after the parts need not be traced
        if len(found) < len(set(parts)):
            raise
    for name in parts:
        if name not in found:
            raise ValueError(f"`forward` does not call {name!r}")
    return tree_map_only(Tensor, lambda t: torch.zeros(t.size(), dtype=t.dtype), found)


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


class _CopyAlone(TorchFunctionMode):
    """While a copy is traced, raise where its code reaches something else of the model.

    A lambda, a hook or a wrapped method may hold the model itself. Its weights would be constants
    in the program, and a sharded layer would wait for the other ranks.

    Args:
        named: the modules, parameters and buffers that are out of reach, with their names.
    """

    def __init__(self, named: list[tuple[Any, str]]) -> None:
        super().__init__()
        self._named = named  # alive, so nothing else gets their ids
        self._names = {id(value): name for value, name in named}

    @override
    def __enter__(self) -> _CopyAlone:
        hook = register_module_forward_pre_hook(lambda module, _: self._require(module))
        self._hook = hook  # comes before those of the engine
        return super().__enter__()

    @override
    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            self._require(value)
        return func(*args, **kwargs or {})

    def _require(self, value: Any) -> None:
        if id(value) in self._names:
            raise ValueError(f"{self._names[id(value)]!r} is reached past the module to export")


def _without_weights(
    module: nn.Module, name: str, mode: AbstractContextManager
) -> tuple[Any, dict[str, Tensor], _CopyAlone]:
    """Copy a part to the CPU, without hooks of this package and without Lightning's compilation.

    Args:
        module: see :func:`trace`.
        name: see :func:`trace`.
        mode: in which tensors are made in the place of parameters and of buffers that a state dict
            has. Nobody writes to them, so without a mode they take no memory either.

    Returns:
        the copy, its parameters and buffers by name, and a context in which to run it.
    """
    part = module.get_submodule(name)
    parts = set(part.modules())
    memo: dict[int, Any] = {}
    for child in module.modules():
        own = *child.named_parameters(recurse=False), *child.named_buffers(recurse=False)
        for key, tensor in own:
            with mode:
                new = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            elif child in parts and key in child._non_persistent_buffers_set:
                # as its bytes will be written
                new = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            memo.setdefault(id(tensor), new)
    bare: Any = copy.deepcopy(part, memo).eval()
    if getattr(bare, "_compiler_ctx", None) is not None:  # of `trainer.fit(torch.compile(model))`
        to_uncompiled(bare)
    for child in bare.modules():
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for number, hook in list(hooks.items()):
                if getattr(hook, "func", hook).__module__.startswith(_PACKAGE):
                    del hooks[number]
    _update_properties(bare, device=torch.device("cpu"))  # `device`, which its code may ask for
    tensors: dict[str, Tensor] = dict(bare.named_parameters(remove_duplicate=False))
    for key in tensors.keys() - bare.state_dict().keys():
        raise ValueError(f"the state dict lacks {key!r}")
    tensors |= bare.named_buffers(remove_duplicate=False)
    its = {id(value) for value in (*bare.modules(), *tensors.values())}
    named = *module.named_modules(), *module.named_parameters(), *module.named_buffers()
    pairs = [(x, key) for key, value in named for x in (value, memo.get(id(value), value))]
    return bare, tensors, _CopyAlone([pair for pair in pairs if id(pair[0]) not in its])
