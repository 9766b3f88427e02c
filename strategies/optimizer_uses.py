"""What users do with optimizers that has no meaning on shards: look for a parameter's state, share a `state_dict()`, ..."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .collectives import Setting
from .engine import ResidencyError, Zero3Engine, is_sharded
from .residency.resting import RestingParameter

_MARKS: WeakKeyDictionary[Optimizer, dict[str, int]] = WeakKeyDictionary()  # of the shards that each steps on
_MARK = "zero3_shards"  # key of that in a state dict


def _of_flat(name: str) -> Any:
    method = getattr(defaultdict, name)

    def call(self: ShardedState, key: Any, *args: Any) -> Any:
        if is_sharded(key):
            raise ResidencyError(
                "An optimizer's state is of the flat tensors in its param groups, and it has none of a single parameter. Read "
                "or change all of it (`for state in optimizer.state.values()`), on all ranks. To start a parameter's anew, "
                "take it out of its group in `with strategy.param_groups():`, and put it back in another."
            )
        return method(self, key, *args)

    return call


class ShardedState(defaultdict):
    """State by flat tensor. Asked for a parameter of the module it would have none, and a user would go on with that."""

    __missing__, __contains__, __setitem__, pop = map(_of_flat, ("__missing__", "__contains__", "__setitem__", "pop"))

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``."""
        return self[key] if key in self else default


def protect(optimizers: Sequence[Optimizer], engine: Zero3Engine) -> None:
    """Tell users of ``optimizers``, which step on the shards of ``engine``, what their dicts are, and where ranks differ."""
    layout = [(entry.name, entry.part) for unit in engine.units for entry in unit.entries]
    mark = {"rank": engine.collectives.global_rank, "layout": crc32(repr(layout).encode())}
    engine.collectives.diary.settings = partial(settings, tuple(optimizers))
    for optimizer in optimizers:
        _protect_state(optimizer)
        if optimizer not in _MARKS:
            optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, _MARK: dict(_MARKS[optimizer])})
            optimizer.register_load_state_dict_pre_hook(_require_own)
            optimizer.register_load_state_dict_post_hook(_protect_state)
        _MARKS[optimizer] = mark


def _require_own(optimizer: Optimizer, state: dict[str, Any]) -> None:
    found, mark = state.get(_MARK), _MARKS[optimizer]
    if found != mark:
        whose = "whole parameters" if found is None else f"rank {found['rank']}'s shards, or of other ones"
        raise ValueError(
            f"This state of {type(optimizer).__name__} is of {whose}, and rank {mark['rank']} steps on shards of its own. What "
            "`optimizer.state_dict()` returns is for the same rank of the same run. Save with "
            "`trainer.save_checkpoint(path)` and load with `trainer.fit(model, ckpt_path=path)`, on all ranks."
        )


def _protect_state(optimizer: Optimizer) -> None:
    # Only torch's own: another may share its dict with an optimizer that it wraps.
    if type(optimizer).__module__.startswith("torch.optim.") and type(optimizer.state) is defaultdict:
        optimizer.state = ShardedState(dict, optimizer.state)


def _require_known(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    resting = (isinstance(p, RestingParameter) for group in optimizer.param_groups for p in group["params"])
    if optimizer not in _MARKS and any(resting):
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
