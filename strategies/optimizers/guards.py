"""What ranks compare of optimizers, and what these may not keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..collectives import Setting
from ..engine import is_sharded


def require_no_tensor_lists(optimizer: Optimizer, sizes: Counter[tuple[int, ...]]) -> None:
    """Refuse an optimizer that keeps a tensor for each parameter in an attribute of its own.

    Args:
        optimizer: has parameters of these sizes.
        sizes: how many of its parameters have each size.

    Raises:
        ValueError: naming the attribute: those tensors would not follow what it steps on.
    """
    for name, value in vars(optimizer).items():
        found = (
            Counter()
            if name in ("state", "param_groups", "defaults")
            else Counter(_shapes_in(value))
        )
        times = found.total() // max(1, sizes.total())
        if (
            times
            and found == Counter({size: times * number for size, number in sizes.items()})
            and max(map(len, sizes))
        ):
            raise ValueError(
                f"{type(optimizer).__name__} keeps a tensor for each of its parameters in its"
                f" attribute `{name}`, and with Zero3Strategy it steps on other tensors.\nKeep them"
                " in `self.state[parameter]`, as the optimizers of torch do."
            )


def _shapes_in(value: Any, depth: int = 3) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of tensors in nested lists and dicts, except parameters of the module."""
    if isinstance(value, Tensor) and not is_sharded(value):
        yield tuple(value.shape)
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _shapes_in(item, depth - 1)


def list_settings(optimizers: Iterable[Optimizer]) -> list[Setting]:
    """List the options of all param groups that are numbers.

    Tensors on a device are left out: to read one, the host would wait for the device.
    """
    return [
        (type(optimizer).__name__, number, option, value)
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
        named = [
            (f"{option}[{k}]", item) for k, item in enumerate(value) if not isinstance(item, list)
        ]
        return [found for name, item in named for found in _find_numbers(name, item)]
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    # nan is left out: it never equals another rank's, and each nan object has a hash of its own.
    return [(option, value)] if isinstance(value, int | float) and value == value else []
