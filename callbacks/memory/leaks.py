"""A growing floor: memory that is still there at the end of every step, and who holds it."""

import gc
import types
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

MIB = 2**20
_NAMED = 5  # kinds of tensors, the gravest
_FOLLOWED = 5  # references, on the way to a name
Group = tuple[str, tuple[int, ...], bool]  # dtype, shape, whether an autograd graph hangs on it


@dataclass
class LeakDetector:
    """Watches the lowest level of each window of samples, one sample a step where one is to be had.

    Memory in use goes up and down within a window; only what is never given back lifts the lowest
    level. It is a leak when the floor rose in every one of the last `windows` windows, by at least
    `least_growth` bytes together. The next report takes twice as many windows and twice the growth,
    so that a long run with a leak is told of it a few times.
    """

    window: int = 10  # samples
    windows: int = 3
    least_growth: int = 8 * MIB
    warm_up: int = 10  # samples in which caches, state and workspaces appear
    floors: list[tuple[int, int]] = field(default_factory=list)  # (bytes, step)
    _samples: int = 0
    _lowest: tuple[int, int] | None = None

    def add(self, live: int, step: int) -> float | None:
        """The level at the end of a step; returns bytes per step when a leak is certain."""
        self._samples += 1
        if self._samples <= self.warm_up:
            return None
        self._lowest = (live, step) if self._lowest is None else min(self._lowest, (live, step))
        if (self._samples - self.warm_up) % self.window:
            return None
        self.floors.append(self._lowest)
        self._lowest = None
        del self.floors[: -self.windows - 1]
        rises = [
            later[0] - earlier[0]
            for earlier, later in zip(self.floors, self.floors[1:], strict=False)
        ]
        if len(rises) < self.windows or min(rises) <= 0 or sum(rises) < self.least_growth:
            return None
        (_, first), (_, last) = self.floors[0], self.floors[-1]
        del self.floors[:-1]
        self.windows, self.least_growth = 2 * self.windows, 2 * self.least_growth
        return sum(rises) / (last - first)

    @property
    def suspicious(self) -> bool:
        """The floor has just risen by its share of a leak: a good time for a census, which takes a
        while.
        """
        return len(self.floors) > 1 and self.floors[-1][0] - self.floors[-2][0] >= max(
            1, self.least_growth // self.windows
        )


@dataclass(frozen=True)
class Grown:
    """Tensors of one kind that became more between two censuses."""

    group: Group
    more: int  # tensors
    size: int  # bytes, all of the new ones
    holder: str

    def __str__(self) -> str:
        dtype, shape, has_graph = self.group
        graph = "; each keeps an autograd graph alive, use .detach()" if has_graph else ""
        return (
            f"{self.more} more {dtype}{list(shape)} ({self.size / MIB:.1f} MiB), held by"
            f" {self.holder}{graph}"
        )


@dataclass
class LeakWatch:
    """A detector, and the census taken when the floor first rose, to compare with."""

    detector: LeakDetector
    _before: Counter[Group] | None = None

    def add(self, live: int, step: int, device_type: str, module: nn.Module) -> str | None:
        """The level at the end of a step; returns a message when a leak is certain."""
        growth = self.detector.add(live, step)
        if growth is None:
            if self.detector.suspicious and self._before is None:
                self._before = take_census(device_type)
            return None
        grown = find_grown(self._before, device_type, module) if self._before is not None else []
        self._before = None
        named = "".join(f"\n  {group}" for group in grown)
        named = (
            named or "\n  by nothing that Python can reach: look at autograd graphs and extensions"
        )
        return f"memory that is never given back grows by {growth / MIB:.2f} MiB per step:{named}"


def take_census(device_type: str) -> Counter[Group]:
    """How many tensors of each kind Python can reach."""
    return Counter(group for group, _ in _live(device_type))


def find_grown(before: Counter[Group], device_type: str, module: nn.Module) -> list[Grown]:
    """The kinds that became more since `before`, the gravest first, with what holds one of them."""
    examples = dict(_live(device_type))  # of each kind the last one made, as a rule
    now = take_census(device_type)
    grown = []
    for group, more in (now - before).items():
        size = examples[group].numel() * examples[group].element_size() * more
        grown.append((group[2], size, more, group))
    # a scalar with a graph may hold everything, so graphs come before sizes
    grown.sort(reverse=True)
    return [
        # Popped, so that nothing but its holder refers to the tensor.
        Grown(group, more, size, name_holder(examples.pop(group), module))
        for _, size, more, group in grown[:_NAMED]
    ]


def name_holder(item: Any, module: nn.Module) -> str:
    """Follow references from an object up to something with a name, such as
    `model.history[...]`.
    """
    path = ""
    for _ in range(_FOLLOWED):
        holder, step = _find_holder(item, module)
        path = f"{step}{path}"
        if holder is None:
            return path
        item = holder
    return f"a {type(item).__name__}{path}"


def _live(device_type: str) -> list[tuple[Group, Tensor]]:
    found = []
    for item in gc.get_objects():
        # isinstance() on proxies of other packages may run their code; type() does not.
        if (
            issubclass(type(item), Tensor)
            and item.device.type == device_type
            and not issubclass(type(item), Parameter)
        ):
            group = (
                str(item.dtype).removeprefix("torch."),
                tuple(item.shape),
                item.grad_fn is not None,
            )
            found.append((group, item))
    return found


def _find_holder(item: Any, module: nn.Module) -> tuple[Any, str]:
    """(holder, step) of one object that refers to the item; holder None where the step is a full
    name.
    """
    owners = {
        id(child.__dict__): name or type(module).__name__ for name, child in module.named_modules()
    }
    holders = [holder for holder in gc.get_referrers(item) if not _is_local(holder)]
    for holder in holders:
        key = _key_of(holder, item) if type(holder) is dict else None
        if key is None:
            continue
        if id(holder) in owners:
            return None, f"{owners[id(holder)]}.{key}"
        if "__name__" in holder and "__builtins__" in holder:  # a module's globals
            return None, f"{holder['__name__']}.{key}"
        return holder, f"[{key!r}]"
    for holder in holders:
        if type(holder) in (list, tuple, set, deque):
            return holder, "[...]"
        if isinstance(holder, types.FrameType):
            code = holder.f_code
            return (
                None,
                f"a local variable of {code.co_name}() at {code.co_filename}:{holder.f_lineno}",
            )
        if isinstance(holder, types.CellType):
            return None, "a variable that a function captured"
    for holder in holders:  # an object whose attributes are not in a dict of their own yet
        key = _key_of(getattr(holder, "__dict__", {}), item)
        owner = owners.get(id(getattr(holder, "__dict__", None)), type(holder).__name__)
        return None, f"{owner}.{key}" if key is not None else f"a {type(holder).__name__}"
    return None, "something outside Python, such as an autograd graph"


def _key_of(holder: dict[Any, Any], item: Any) -> Any:
    """A loop, since a generator would capture the item and become one more holder."""
    for key, value in list(holder.items()):
        if value is item:
            return key
    return None


def _is_local(holder: Any) -> bool:
    """A frame of this file, or its local variables."""
    return isinstance(holder, types.FrameType) and holder.f_code.co_filename == __file__
