"""What users do with optimizers that has no meaning on shards: look for a parameter's state, share
a `state_dict()`, ...
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
from ..engine import ResidencyError, RestingParameter, Zero3Engine, is_sharded, unguarded

# of the shards that each steps on
_MARKS: WeakKeyDictionary[Optimizer, dict[str, int]] = WeakKeyDictionary()
_MARK = "zero3_shards"  # key of that in a state dict
# ids of the parameters that are sharded for each
_KNOWN: WeakKeyDictionary[Optimizer, set[int]] = WeakKeyDictionary()
_ANEW = (
    "Save with `trainer.save_checkpoint(path)` and load with `trainer.fit(model, ckpt_path=path)`,"
    " on all ranks."
)


def _of_flat(name: str) -> Any:
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
    """State by flat tensor. Asked for a parameter of the module it would have none, and a user
    would go on with that.
    """

    # added to a group, and not sharded for it yet
    is_new: Callable[[Tensor], bool] = staticmethod(lambda key: False)

    __missing__, __contains__, __setitem__, pop = map(
        _of_flat, ("__missing__", "__contains__", "__setitem__", "pop")
    )

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``."""
        return self[key] if key in self else default


def protect(optimizers: Sequence[Optimizer], engine: Zero3Engine) -> None:
    """Tell users of ``optimizers``, which step on the shards of ``engine``, what their dicts are,
    and where ranks differ.

    Raises:
        ValueError: an optimizer keeps tensors of its parameters where they cannot follow.
    """
    entries = [entry for unit in engine.units for entry in unit.entries]
    layout = [(entry.name, entry.part, entry.group.key) for entry in entries]
    mark = {"rank": engine.collectives.global_rank, "layout": crc32(repr(layout).encode())}
    engine.collectives.exchange_log.settings = partial(settings, tuple(optimizers))
    for index, optimizer in enumerate(optimizers):
        mine = [entry for entry in entries if entry.group.key.optimizer == index]
        _require_no_lists(optimizer, Counter(tuple(entry.size) for entry in mine))
        if optimizer not in _MARKS:
            optimizer.register_state_dict_post_hook(_mark_state)
            optimizer.register_load_state_dict_pre_hook(_require_own)
            # torch's own method has it, too
            optimizer.register_load_state_dict_post_hook(partial(_protect_state, holders=2))
        _MARKS[optimizer], _KNOWN[optimizer] = mark, {id(entry.parameter) for entry in mine}
        _protect_state(optimizer)


def _is_new(of: ref[Optimizer], key: Tensor) -> bool:
    optimizer = of()
    if optimizer is None or id(key) in _KNOWN[optimizer]:
        return False
    return any(key is p for group in optimizer.param_groups for p in group["params"])


def _mark(optimizer: Optimizer) -> dict[str, int]:
    sizes = [[p.numel() for p in group["params"]] for group in optimizer.param_groups]
    return {**_MARKS[optimizer], "cuts": crc32(repr(sizes).encode())}


def _mark_state(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    state = {
        key: unguarded(value) if isinstance(value, dict) else value
        for key, value in packed["state"].items()
    }
    return {**packed, "state": state, _MARK: _mark(optimizer)}


def _require_own(optimizer: Optimizer, state: dict[str, Any]) -> None:
    found, mark, name = state.get(_MARK), _mark(optimizer), type(optimizer).__name__
    if found == mark:
        return
    if found is not None and {**found, "cuts": mark["cuts"]} == mark:
        raise ValueError(
            f"This state of {name} is of the same shards, but parameters have been without a"
            f" gradient since it was taken, and {name} steps on those apart: it does not fit any"
            f" more. Take `optimizer.state_dict()` after such a step. {_ANEW}"
        )
    whose = (
        "whole parameters, or of another optimizer"
        if found is None
        else f"rank {found['rank']}'s shards, or of other ones"
    )
    raise ValueError(
        f"This state of {name} is of {whose}, and rank {mark['rank']} steps on shards of its own."
        f" What `optimizer.state_dict()` returns is for the same rank of the same run. {_ANEW}"
    )


def _protect_state(optimizer: Optimizer, holders: int = 1) -> None:
    if type(vars(optimizer).get("state")) is not defaultdict:
        return
    # Others than torch's may share their dict with an optimizer that they wrap. The call below
    # holds it, too.
    if (
        type(optimizer).__module__.startswith("torch.optim.")
        or getrefcount(vars(optimizer)["state"]) <= holders + 1
    ):
        optimizer.state = ShardedState(optimizer.state.default_factory, optimizer.state)
        optimizer.state.is_new = partial(_is_new, ref(optimizer))


def _require_no_lists(optimizer: Optimizer, sizes: Counter[tuple[int, ...]]) -> None:
    for name, value in vars(optimizer).items():
        found = (
            Counter()
            if name in ("state", "param_groups", "defaults")
            else Counter(_sizes_in(value))
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


def _sizes_in(value: Any, depth: int = 3) -> Iterator[tuple[int, ...]]:
    """Of the tensors in nested lists and dicts, except parameters of the module."""
    if isinstance(value, Tensor) and not is_sharded(value):
        yield tuple(value.shape)
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sizes_in(item, depth - 1)


def _require_known(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    resting = (
        isinstance(p, RestingParameter) for group in optimizer.param_groups for p in group["params"]
    )
    if optimizer not in _MARKS and any(resting):
        raise ValueError(
            f"This {type(optimizer).__name__} steps on parameters that are sharded over the ranks,"
            " and was not there when they were: only the optimizers that `configure_optimizers`"
            " returns when `fit` begins step on shards. Return it then (`self.optimizers()` has it"
            " with manual optimization), or step inside `with strategy.gathered(module,"
            " modify=True):`."
        )


register_optimizer_step_pre_hook(_require_known)


def settings(optimizers: Iterable[Optimizer]) -> list[Setting]:
    """Options of all param groups that are numbers; not those on a device, which would have to be
    waited for.
    """
    return [
        (type(optimizer).__name__, number, option, value)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, given in group.items()
        if key not in ("params", "param_names")
        for option, value in _numbers(key, given)
    ]


def _numbers(option: str, value: Any) -> list[tuple[str, float]]:
    """Those in an option. Lists of lists are what an optimizer notes of the tensors that it has on
    this rank.
    """
    if isinstance(value, tuple | list):
        named = [
            (f"{option}[{k}]", item) for k, item in enumerate(value) if not isinstance(item, list)
        ]
        return [found for name, item in named for found in _numbers(name, item)]
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        value = value.item()
    # every nan has a hash of its own
    return [(option, value)] if isinstance(value, int | float) and value == value else []
