"""What ranks compare of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def list_settings(optimizers: Iterable[Optimizer]) -> list[str]:
    """List the options of all param groups that are numbers, in words.

    Tensors on a device are left out: to read one, the host would wait for the device.
    """
    return [
        f"{option!r} = {value} in param group {number} of {type(optimizer).__name__}"
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, given in group.items()
        if key not in ("params", "param_names")
        for option, value in _find_numbers(key, given)
    ]


def _find_numbers(option: str, value: Any) -> list[tuple[str, float]]:
    """Find the numbers in an option: [(name, number)].

    Lists of lists are left out: there an optimizer notes the tensors that it has on this rank.
    """
    if isinstance(value, tuple | list):
        return [
            found
            for k, item in enumerate(value)
            if not isinstance(item, list)
            for found in _find_numbers(f"{option}[{k}]", item)
        ]
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    # nan is left out: it never equals another rank's, and each nan object has a hash of its own.
    return [(option, value)] if isinstance(value, int | float) and value == value else []
