"""Count the memory of parameters, gradients, optimizer state, buffers and of what exchanges need.

A strategy that knows the exact bytes has a method `memory_ledger()`; for others this module counts
the live tensors of the module and its optimizers, each storage once.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...strategies.engine import is_sharded

# `unsharded_units`: whole parameters of the units in use; `reduce_buffer`: gradients on their way,
# which `ddp` calls buckets. The names are those of `python -m lightning_zero3 plan`.
STRATEGY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "unsharded_units",
    "reduce_buffer",
    "buffers",
)
# `graph_inputs`: batches at fixed addresses, from which `CUDAGraphStep` replays.
CATEGORIES = (*STRATEGY_CATEGORIES, "graph_inputs")


def measure(trainer: Trainer, module: LightningModule, device_type: str) -> dict[str, int]:
    """Count the bytes on this rank by category."""
    # Lightning does not declare its attribute
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    inputs = sum(getattr(callback, "graph_input_nbytes", 0) for callback in callbacks)
    return {**_measure_state(trainer, module, device_type), "graph_inputs": inputs}


def _measure_state(trainer: Trainer, module: LightningModule, device_type: str) -> dict[str, int]:
    read_ledger = getattr(trainer.strategy, "memory_ledger", None)
    if read_ledger is not None:
        ledger = read_ledger()
        if missing := set(STRATEGY_CATEGORIES) - set(ledger):
            raise KeyError(
                f"{type(trainer.strategy).__name__}.memory_ledger() lacks {sorted(missing)}"
            )
        return {category: int(ledger[category]) for category in STRATEGY_CATEGORIES}
    seen: set[int] = set()
    parameters = list(module.parameters())
    return {
        "parameters": _count_bytes(parameters, device_type, seen),
        "gradients": _count_bytes(
            (p.grad for p in parameters if p.grad is not None), device_type, seen
        ),
        "optimizer_state": _count_bytes(_optimizer_tensors(trainer), device_type, seen),
        "unsharded_units": 0,
        "reduce_buffer": _measure_ddp_buckets(trainer.strategy.model, device_type),
        "buffers": _count_bytes(module.buffers(), device_type, seen),
    }


def measure_module(module: LightningModule, device_type: str) -> int:
    """Count the bytes of parameters and buffers before a strategy has touched them."""
    return _count_bytes([*module.parameters(), *module.buffers()], device_type, set())


def measure_units(trainer: Trainer, module: LightningModule, device_type: str) -> dict[str, int]:
    """Count the bytes of parameters, gradients and optimizer state on this rank by unit."""
    read_ledger = getattr(trainer.strategy, "memory_ledger", None)
    if read_ledger is not None:
        return {name: int(size) for name, size in read_ledger(per_unit=True)["units"].items()}
    state: dict[Tensor, Any] = {}
    for optimizer in trainer.optimizers:
        state.update(getattr(optimizer, "state", {}))
    seen: set[int] = set()
    units: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        tensors = [parameter, *_find_tensors(state.get(parameter, {}))]
        if parameter.grad is not None:
            tensors.append(parameter.grad)
        unit = unit_of(name)
        units[unit] = units.get(unit, 0) + _count_bytes(tensors, device_type, seen)
    return units


def unit_of(name: str) -> str:
    """Return the unit of a parameter: its name up to the first index, else the first part.

    `model.layers.3.mlp.weight` belongs to `model.layers.3`, `head.weight` to `head`.
    """
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return parts[0]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, which has no storage itself, or any other tensor."""
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


def _count_bytes(tensors: Iterable[Tensor], device_type: str, seen: set[int]) -> int:
    """Count the bytes of the tensors' storages, each once over all calls with the same `seen`."""
    total = 0
    for tensor in tensors:
        tensor = local_part(tensor)
        # A parameter that zero3 sharded in an earlier run has no memory of its own.
        if tensor.device.type != device_type or is_sharded(tensor):
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # 0: a freed storage, such as FSDP's gathered parameters have
        if address and address not in seen:
            seen.add(address)
            total += storage.nbytes()
    return total


def _measure_ddp_buckets(model: Any, device_type: str) -> int:
    """Count the bytes of DDP's buckets, which are as large as the gradients.

    With `gradient_as_bucket_view` the gradients are views of the buckets, so these count as 0.
    """
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    trained = [p for p in model.parameters() if p.requires_grad and p.device.type == device_type]
    return sum(p.numel() * p.element_size() for p in trained)
