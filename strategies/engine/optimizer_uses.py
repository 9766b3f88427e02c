"""What users do with optimizers that has no meaning on shards: look for a parameter's state, share a `state_dict()`, ..."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..collectives import Setting
from ..residency.resting import ResidencyError, RestingParameter, is_sharded
from .unit import Unit

_KNOWN: WeakSet[Optimizer] = WeakSet()  # to engines
_MARK = "zero3_shards"  # in a state dict: whose they are


class ShardedState(defaultdict):
    """State by flat tensor. Asked for a parameter of the module it would have none, and a user would go on with that."""

    def __missing__(self, key: Any) -> Any:
        """Begin the state of ``key``, as the optimizer does."""
        _require_flat(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        """Whether ``key`` has state."""
        _require_flat(key)
        return super().__contains__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace the state of ``key``."""
        _require_flat(key)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``."""
        return self[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """Take the state of ``key`` away."""
        _require_flat(key)
        return super().pop(key, *default)


def _require_flat(key: Any) -> None:
    if is_sharded(key):
        raise ResidencyError(
            "An optimizer's state is of the flat tensors in its param groups, and it has none of a single parameter. Read or "
            "change all of it (`for state in optimizer.state.values()`), on all ranks. To start a parameter's anew, take it "
            "out of its group in `with strategy.param_groups():`, and put it back in another."
        )


def protect(optimizers: Iterable[Optimizer], units: Sequence[Unit], rank: int) -> list[Any]:
    """Tell users of ``optimizers`` what their dicts are; returns the handles of hooks.

    Args:
        optimizers: step on this rank's shards of ``units``.
        units: of the engine.
        rank: this one's.
    """
    layout = [(entry.name, entry.part) for unit in units for entry in unit.entries]
    mark, handles = {"rank": rank, "layout": crc32(repr(layout).encode())}, []

    def check(optimizer: Optimizer, state: dict[str, Any]) -> None:
        found = state.get(_MARK)
        if found != mark:
            whose = "whole parameters" if found is None else f"rank {found['rank']}'s shards, or of other ones"
            raise ValueError(
                f"This state of {type(optimizer).__name__} is of {whose}, and rank {rank} steps on shards of its own. What "
                "`optimizer.state_dict()` returns is for the same rank of the same run. Save with "
                "`trainer.save_checkpoint(path)` and load with `trainer.fit(model, ckpt_path=path)`, on all ranks."
            )

    for optimizer in optimizers:
        _KNOWN.add(optimizer)
        _protect_state(optimizer)
        handles.append(optimizer.register_state_dict_post_hook(lambda _, state: {**state, _MARK: dict(mark)}))
        handles.append(optimizer.register_load_state_dict_pre_hook(check))
        handles.append(optimizer.register_load_state_dict_post_hook(_protect_state))
    return handles


def _protect_state(optimizer: Optimizer) -> None:
    # Only torch's own: another may share its dict with an optimizer that it wraps.
    if type(optimizer).__module__.startswith("torch.optim.") and type(optimizer.state) is defaultdict:
        optimizer.state = ShardedState(dict, optimizer.state)


def _require_known(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _KNOWN:
        return
    if any(isinstance(p, RestingParameter) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"This {type(optimizer).__name__} steps on parameters that are sharded over the ranks, and was not there when they "
            "were: only the optimizers of `configure_optimizers` step on shards. Return it there (`self.optimizers()` has it "
            "with manual optimization), or step inside `with strategy.gathered(module, modify=True):`."
        )


register_optimizer_step_pre_hook(_require_known)


def settings(optimizers: Iterable[Optimizer]) -> list[Setting]:
    """Options of all param groups that are numbers, except those on a device, which would have to be waited for."""
    found = []
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for option in optimizer.defaults:
                value = group.get(option)
                if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
                    value = value.item()
                if isinstance(value, int | float) and value == value:  # every nan has a hash of its own
                    found.append((type(optimizer).__name__, number, option, value))
    return found
