"""What the memory is used for: parameters, gradients, optimizer state, buffers, slots, and the
rest.

A strategy that knows exactly says so through `memory_ledger()`; otherwise the live tensors of the
module and its optimizers are counted, each storage once.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...strategies.engine import is_sharded

# `slots`: buffers for communication, such as gathered parameters or gradient buckets.
OF_THE_STRATEGY = ("parameters", "gradients", "optimizer_state", "slots", "buffers")
# batches at fixed addresses, which `CUDAGraphStep` replays
CATEGORIES = (
    *OF_THE_STRATEGY,
    "graph_inputs",
)


def measure(trainer: Trainer, module: LightningModule, device_type: str) -> dict[str, int]:
    """Bytes on this rank by category."""
    inputs = sum(getattr(callback, "graph_input_nbytes", 0) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return {**_measure_state(trainer, module, device_type), "graph_inputs": inputs}


def _measure_state(trainer: Trainer, module: LightningModule, device_type: str) -> dict[str, int]:
    told = getattr(trainer.strategy, "memory_ledger", None)
    if told is not None:
        ledger = told()
        if missing := set(OF_THE_STRATEGY) - set(ledger):
            raise KeyError(
                f"{type(trainer.strategy).__name__}.memory_ledger() lacks {sorted(missing)}"
            )
        return {category: int(ledger[category]) for category in OF_THE_STRATEGY}
    seen: set[int] = set()
    parameters = list(module.parameters())
    return {
        "parameters": _count(parameters, device_type, seen),
        "gradients": _count((p.grad for p in parameters if p.grad is not None), device_type, seen),
        "optimizer_state": _count(_optimizer_tensors(trainer), device_type, seen),
        "slots": _ddp_buckets(trainer.strategy.model, device_type),
        "buffers": _count(module.buffers(), device_type, seen),
    }


def measure_module(module: LightningModule, device_type: str) -> int:
    """Bytes of parameters and buffers before a strategy has touched them."""
    return _count([*module.parameters(), *module.buffers()], device_type, set())


def measure_units(trainer: Trainer, module: LightningModule, device_type: str) -> dict[str, int]:
    """Bytes of model state on this rank by unit: parameters, gradients and optimizer state."""
    told = getattr(trainer.strategy, "memory_ledger", None)
    if told is not None:
        return {name: int(size) for name, size in told(per_unit=True)["units"].items()}
    state = {}
    for optimizer in trainer.optimizers:
        state.update(getattr(optimizer, "state", {}))
    seen: set[int] = set()
    units: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        tensors = [parameter, *_find_tensors(state.get(parameter, {}))]
        if parameter.grad is not None:
            tensors.append(parameter.grad)
        unit = unit_of(name)
        units[unit] = units.get(unit, 0) + _count(tensors, device_type, seen)
    return units


def unit_of(name: str) -> str:
    """The part of a model that a parameter belongs to: up to the first index, else the first name.

    `model.layers.3.mlp.weight` is of `model.layers.3`, `head.weight` of `head`.
    """
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which has no storage of its own; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _optimizer_tensors(trainer: Trainer) -> Iterator[Tensor]:
    for optimizer in trainer.optimizers:
        yield from _find_tensors(getattr(optimizer, "state", {}))


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _find_tensors(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _find_tensors(child)


def _count(tensors: Iterable[Tensor], device_type: str, seen: set[int]) -> int:
    """Bytes of the storages behind the tensors, each storage once over all calls with `seen`."""
    total = 0
    for tensor in tensors:
        tensor = local_part(tensor)
        # zero3's, of an earlier run: it has no memory of its own
        if tensor.device.type != device_type or is_sharded(tensor):
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in seen:  # 0: freed, as FSDP does with gathered parameters
            seen.add(address)
            total += storage.nbytes()
    return total


def _ddp_buckets(model: Any, device_type: str) -> int:
    """DDP reduces gradients in buckets of its own, as large as the gradients, unless these are
    views of them.
    """
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    trained = [p for p in model.parameters() if p.requires_grad and p.device.type == device_type]
    return sum(p.numel() * p.element_size() for p in trained)
