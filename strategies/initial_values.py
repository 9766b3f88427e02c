"""Initial values of modules that were created on the meta device, unit by unit."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from .engine.sharded import nothing


class Initializer:
    """Gives parameters and buffers on the meta device memory, and the values of their modules.

    A layer, and a module around it that has no parameters elsewhere, is initialised by its
    ``reset_parameters()``, or by ``_reset_parameters()`` as torch calls it in attention and
    transformers, and then by ``_init_weights(layer)`` of the nearest
    module around it that has this method, as Hugging Face's models and others of their kind do it
    in their constructors, where it is lost on the meta device.

    Args:
        model: the whole model.
        loaded: names of what is going to be loaded, and is not initialised.
    """

    def __init__(self, model: nn.Module, loaded: Container[str] = ()) -> None:
        self._model, self._loaded = model, loaded
        self._names = {module: name for name, module in model.named_modules()}
        # the ids of each module's parameters, as constructors run: those inside before those
        # around, and in the order of their names
        self._ids: dict[nn.Module, set[int]] = {}
        model.apply(lambda m: self._ids.update({m: set(map(id, m.parameters()))}))

    def fill_buffers(self) -> None:
        """Initialise running statistics of norm layers, and other buffers by ``_init_weights``;
        before parameters have memory.

        Raises:
            ValueError: that left one as it was.
        """
        for prefix, module in self._model.named_modules():
            waiting = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
            if not waiting:
                continue
            for name in waiting:
                module._buffers[name] = _unset(cast(Tensor, module._buffers[name]))
            if hasattr(module, "reset_running_stats"):
                cast(Any, module).reset_running_stats()
            else:
                self._init_weights(module)
            for name in waiting:
                buffer, full = cast(Tensor, module._buffers[name]), f"{prefix}.{name}".lstrip(".")
                if full in self._loaded:
                    buffer.zero_()
                elif _has_unset(buffer):
                    raise ValueError(
                        f"Buffer {full!r} is on the meta device, from where only the running"
                        " statistics of norm layers, and what `_init_weights` sets, can be"
                        ' initialised. Create it with `device="cpu"`.'
                    )

    def fill(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Initialise the parameters of a unit.

        Raises:
            ValueError: nothing initialises one of them.
        """
        unset = []
        for name, p in parameters:
            if not p.is_meta:
                continue
            value = _unset(p.detach())
            if name in self._loaded:
                value.zero_()
            else:
                owner = self._model.get_submodule(name.rpartition(".")[0])
                self._require_no_adapter(name, owner)
                unset.append((name, p, owner))
            torch.utils.swap_tensors(p, nn.Parameter(value, requires_grad=p.requires_grad))
        here, owners = {id(p) for _, p, _ in unset}, {owner for *_, owner in unset}
        # and modules around them without parameters elsewhere; not those tied to theirs
        chosen = [
            m
            for m, ids in self._ids.items()
            if m in owners or (ids and ids <= here and not m._parameters)
        ]
        for module in chosen:
            reset = getattr(module, "reset_parameters", None) or getattr(
                module, "_reset_parameters", None
            )
            if reset is not None:
                with torch.no_grad():
                    reset()
        # some models initialise layers from the module around them
        for module in chosen:
            self._init_weights(module)
        for name, p, owner in unset:
            if _has_unset(p.detach()):
                raise ValueError(
                    f"Parameter {name!r} is on the meta device, and no `reset_parameters()` of"
                    f" {type(owner).__name__} initialises it. Add that method, or create the module"
                    " on the CPU."
                )

    def _require_no_adapter(self, name: str, module: nn.Module) -> None:
        """Refuse layers of peft's, which the model's ``_init_weights`` would initialise as its own.

        What they begin with (zeros, so that an adapter changes nothing) is known to their
        constructor alone.
        """
        for around in self._upwards(module):
            if hasattr(type(around), "adapter_layer_names"):
                raise ValueError(
                    f"Parameter {name!r} is of an adapter that was added on the meta device, where"
                    f" its initial values are lost.\nGive it memory and values:"
                    " `layer.lora_A.to_empty(device='cpu')`, the same for `lora_B`, and"
                    " `layer.reset_lora_parameters(adapter, True)` (docs/howto/lora.md)."
                )

    def _upwards(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the module, and those around it."""
        yield module
        name = self._names[module]
        while name:
            name = name.rpartition(".")[0]
            yield self._model.get_submodule(name)

    def _init_weights(self, module: nn.Module) -> None:
        if (around := self._around(module)) is not None:
            with torch.no_grad():
                around._init_weights(module)

    def _around(self, module: nn.Module) -> Any:
        """Return the nearest module around it, or itself, whose ``_init_weights`` takes a layer."""
        for around in self._upwards(module):
            if _takes_layer(getattr(around, "_init_weights", None)):
                return around
        return None


def _takes_layer(method: object) -> bool:
    try:
        inspect.signature(method).bind(None)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _unset(tensor: Tensor) -> Tensor:
    """Return memory for a tensor, with a value in it that no initialisation chooses."""
    return torch.full_like(tensor, nothing(tensor.dtype), device="cpu")


def _has_unset(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return False  # all its values are possible ones
    value = nothing(tensor.dtype)
    return bool((tensor.isnan() if value != value else tensor == value).any())
