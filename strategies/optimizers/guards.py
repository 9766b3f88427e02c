"""Refuse uses of optimizers that have no meaning on shards.

Examples: to read the state of one parameter, or to share a `state_dict()` between ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from sys import getrefcount
from typing import Any
from weakref import WeakKeyDictionary, ref
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..collectives import Setting
from ..engine import ResidencyError, ShardedParameter, Zero3Engine, is_sharded, unguarded

# For each optimizer on shards, a mark that tells its shards from others: rank and hash of layout.
_MARKS: WeakKeyDictionary[Optimizer, dict[str, int]] = WeakKeyDictionary()
_MARK_KEY = "zero3_shards"  # key of the mark in a state dict
# For each optimizer, ids of the parameters that are sharded for it.
_SHARDED_IDS: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
_REMEDY = (
    "Save with `trainer.save_checkpoint(path)` and load with `trainer.fit(model, ckpt_path=path)`,"
    " on all ranks."
)


def _refuse_sharded_keys(name: str) -> Any:
    """Return the method ``name`` of `defaultdict`, which refuses a sharded parameter as a key."""
    method = getattr(defaultdict, name)

    def call(self: ShardedState, key: Any, *args: Any) -> Any:
        if is_sharded(key) and not self.is_new(key):
            raise ResidencyError(
                "An optimizer's state is of the flat tensors in its param groups, and it has none"
                " of a single parameter. Read or change all of it (`for state in"
                " optimizer.state.values()`), on all ranks. To start a parameter's anew, take it"
                " out of its group in `with strategy.param_groups():`, and put it back in another."
            )
        return method(self, key, *args)

    return call


class ShardedState(defaultdict):
    """An optimizer's state by flat tensor, which raises for a parameter of the module.

    Without the error a user would find no state for the parameter and go on with none.
    """

    # Says whether a parameter was added to a group and is not sharded for it yet.
    is_new: Callable[[Tensor], bool] = staticmethod(lambda key: False)

    __missing__, __contains__, __setitem__, pop = map(
        _refuse_sharded_keys, ("__missing__", "__contains__", "__setitem__", "pop")
    )

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key``, or ``default``."""
        return self[key] if key in self else default


def guard_optimizers(optimizers: Sequence[Optimizer], engine: Zero3Engine) -> None:
    """Guard the state of ``optimizers``, which step on the shards of ``engine``, against misuse.

    The exchange log compares their numeric options between ranks from now on.

    Raises:
        ValueError: an optimizer keeps a tensor for each parameter in an attribute of its own, where
            sharding cannot replace them.
    """
    entries = [entry for unit in engine.units for entry in unit.entries]
    layout = [(entry.name, entry.part, entry.group.key) for entry in entries]
    mark = {"rank": engine.collectives.global_rank, "layout": crc32(repr(layout).encode())}
    engine.collectives.exchange_log.settings = partial(list_settings, tuple(optimizers))
    for index, optimizer in enumerate(optimizers):
        mine = [entry for entry in entries if entry.group.key.optimizer == index]
        _require_no_tensor_lists(optimizer, Counter(tuple(entry.size) for entry in mine))
        if optimizer not in _MARKS:
            optimizer.register_state_dict_post_hook(_add_mark)
            optimizer.register_load_state_dict_pre_hook(_require_own_state)
            # While the hook runs, torch's `Optimizer.load_state_dict` refers to the state, too.
            optimizer.register_load_state_dict_post_hook(partial(_protect_state, holders=2))
        _MARKS[optimizer], _SHARDED_IDS[optimizer] = mark, {id(entry.parameter) for entry in mine}
        _protect_state(optimizer)


def _is_new(reference: ref[Optimizer], key: Tensor) -> bool:
    optimizer = reference()
    if optimizer is None or id(key) in _SHARDED_IDS[optimizer]:
        return False
    return any(key is p for group in optimizer.param_groups for p in group["params"])


def _current_mark(optimizer: Optimizer) -> dict[str, int]:
    sizes = [[p.numel() for p in group["params"]] for group in optimizer.param_groups]
    return {**_MARKS[optimizer], "cuts": crc32(repr(sizes).encode())}


def _add_mark(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = {
        key: unguarded(value) if isinstance(value, dict) else value
        for key, value in packed["state"].items()
    }
    return {**packed, "state": state, _MARK_KEY: _current_mark(optimizer)}


def _require_own_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    found, mark, name = state.get(_MARK_KEY), _current_mark(optimizer), type(optimizer).__name__
    if found == mark:
        return
    if found is not None and {**found, "cuts": mark["cuts"]} == mark:
        raise ValueError(
            f"This state of {name} is of the same shards, but parameters have been without a"
            f" gradient since it was taken, and {name} steps on those apart: it does not fit any"
            f" more. Take `optimizer.state_dict()` after such a step. {_REMEDY}"
        )
    whose = (
        "whole parameters, or of another optimizer"
        if found is None
        else f"rank {found['rank']}'s shards, or of other ones"
    )
    raise ValueError(
        f"This state of {name} is of {whose}, and rank {mark['rank']} steps on shards of its own."
        f" What `optimizer.state_dict()` returns is for the same rank of the same run. {_REMEDY}"
    )


def _protect_state(optimizer: Optimizer, holders: int = 1) -> None:
    if type(vars(optimizer).get("state")) is not defaultdict:
        return
    # An optimizer that is not torch's may share its dict with an optimizer that it wraps, which
    # would keep the old one. `getrefcount` counts the reference of its own argument, too.
    if (
        type(optimizer).__module__.startswith("torch.optim.")
        or getrefcount(vars(optimizer)["state"]) <= holders + 1
    ):
        optimizer.state = ShardedState(optimizer.state.default_factory, optimizer.state)
        optimizer.state.is_new = partial(_is_new, ref(optimizer))


def _require_no_tensor_lists(optimizer: Optimizer, sizes: Counter[tuple[int, ...]]) -> None:
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
                f" attribute `{name}`. With Zero3Strategy it steps on other tensors (flat shards,"
                " or whole parameters on the ranks that own them), which those do not follow. Keep"
                " them in `self.state[parameter]`, as the optimizers of torch do."
            )


def _shapes_in(value: Any, depth: int = 3) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of tensors in nested lists and dicts, except parameters of the module."""
    if isinstance(value, Tensor) and not is_sharded(value):
        yield tuple(value.shape)
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _shapes_in(item, depth - 1)


def _require_known(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if optimizer not in _MARKS and any(isinstance(p, ShardedParameter) for p in parameters):
        raise ValueError(
            f"This {type(optimizer).__name__} steps on parameters that are sharded over the ranks,"
            " and was not there when they were: only the optimizers that `configure_optimizers`"
            " returns when `fit` begins step on shards. Return it then (`self.optimizers()` has it"
            " with manual optimization), or step inside `with strategy.gathered(module,"
            " modify=True):`."
        )


register_optimizer_step_pre_hook(_require_known)


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
