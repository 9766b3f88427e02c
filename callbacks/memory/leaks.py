"""Detect leaks: memory that grows from the end of one step to the next, and its holders."""

import gc
import types
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

MIB = 2**20
# What the classes of zero3 hold tensors for.
_OURS = {
    "Buffer": "zero3's buffers for unsharded parameters",
    "Chunk": "zero3's shards",
    "Entry": "zero3's shards",
    "SharedMemoryCollectives": "zero3's exchange between ranks",
}
_OUTSIDE = "something outside Python, such as an autograd graph"
_LARGEST_KINDS = 5  # kinds of tensors in a message, the gravest first
_MOST_REFERENCES = 5  # references from a tensor up to a name
# (dtype, shape, has an autograd graph, bytes of the storage, which a view keeps alive as a whole)
TensorKind = tuple[str, tuple[int, ...], bool, int]


@dataclass
class LeakDetector:
    """Watches the floor: the lowest level of memory in use in each window of samples.

    There is one sample a step where the source has one. Memory in use goes up and down within a
    window; only memory that is never given back lifts the floor. A leak is certain when the floor
    rose in each of the last `windows` windows, by at least `least_growth` bytes together. The next
    report takes twice as many windows and twice the growth, so that a long run with a leak has a
    few reports.
    """

    window: int = 10  # samples
    windows: int = 3
    least_growth: int = 8 * MIB
    warm_up: int = 10  # samples in which caches, state and workspaces appear
    floors: list[tuple[int, int]] = field(default_factory=list)  # (bytes, step)
    _samples: int = 0
    _lowest: tuple[int, int] | None = None

    def add(self, live: int, step: int) -> float | None:
        """Add the bytes in use at the end of a step; return bytes per step if a leak is certain."""
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
    def is_suspicious(self) -> bool:
        """Whether the floor has just risen by its share of a leak: a good time for a census.

        A census walks all objects, which is too slow for every step.
        """
        return len(self.floors) > 1 and self.floors[-1][0] - self.floors[-2][0] >= max(
            1, self.least_growth // self.windows
        )


@dataclass(frozen=True)
class Growth:
    """The tensors of one kind that came between two censuses."""

    kind: TensorKind
    more: int  # number of new tensors
    size: int  # bytes that all new tensors keep alive, a storage of several counted once
    is_view: bool  # whether they keep more than their own elements
    holder: str

    def __str__(self) -> str:
        dtype, shape, has_graph, storage = self.kind
        view = f"; a view that keeps {storage / MIB:.1f} MiB: use .clone()" if self.is_view else ""
        graph = "; each keeps an autograd graph alive, use .detach()" if has_graph else ""
        return (
            f"{self.more} more {dtype}{list(shape)} ({self.size / MIB:.1f} MiB), held by"
            f" {self.holder}{view}{graph}"
        )


@dataclass
class LeakWatch:
    """A detector, and a census from when the floor first rose."""

    detector: LeakDetector
    _census: Counter[TensorKind] | None = None

    def add(self, live: int, step: int, device_type: str, module: nn.Module) -> str | None:
        """Add the bytes in use at the end of a step; return a message if a leak is certain."""
        growth = self.detector.add(live, step)
        if growth is None:
            if self.detector.is_suspicious and self._census is None:
                self._census = take_census(device_type)
            return None
        grown = find_grown(self._census, device_type, module) if self._census is not None else []
        self._census = None
        lines = "".join(f"\n  {kind}" for kind in grown)
        if not lines:
            lines = "\n  by nothing that Python can reach: look at autograd graphs and extensions"
        return f"memory that is never given back grows by {growth / MIB:.2f} MiB per step:{lines}"


def take_census(device_type: str) -> Counter[TensorKind]:
    """Count the tensors of each kind that Python can reach."""
    return Counter(kind for kind, _ in _find_tensors(device_type))


def find_grown(before: Counter[TensorKind], device_type: str, module: nn.Module) -> list[Growth]:
    """Find the kinds that grew since `before`, most bytes first, each with one tensor's holder."""
    examples: dict[TensorKind, Tensor] = {}  # of each kind the last one made, as a rule
    storages: dict[TensorKind, set[int]] = {}
    now: Counter[TensorKind] = Counter()
    for kind, item in _find_tensors(device_type):
        examples[kind] = item
        storages.setdefault(kind, set()).add(_storage(item)[0])
        now[kind] += 1
    grown = []
    for kind, more in (now - before).items():
        size = min(more, len(storages[kind])) * kind[3]
        is_view = size > examples[kind].numel() * examples[kind].element_size() * more
        grown.append((kind[2], size, more, kind, is_view))
    # Graphs are never left out for their sizes, as a scalar with a graph may hold everything.
    least = max((size for _, size, *_ in grown), default=0) // 100
    grown = sorted((each for each in grown if each[0] or each[1] >= least), reverse=True)
    found = [
        # `pop`, so that nothing but its holder refers to the tensor.
        Growth(kind, more, size, is_view, name_holder(examples.pop(kind), module))
        for _, size, more, kind, is_view in sorted(
            grown[:_LARGEST_KINDS], key=lambda each: each[1], reverse=True
        )
    ]
    # What a view is of lives on with it, and is no leak of its own.
    named = {s for each in found if each.holder != _OUTSIDE for s in storages[each.kind]}
    return [
        each for each in found if each.holder != _OUTSIDE or named.isdisjoint(storages[each.kind])
    ]


def name_holder(item: Any, module: nn.Module) -> str:
    """Follow references from an object up to a name, such as `model.history[...]`."""
    path = ""
    for _ in range(_MOST_REFERENCES):
        holder, step = _find_holder(item, module)
        path = f"{step}{path}"
        if holder is None:
            return step if step in _OURS.values() else path
        item = holder
    return _our_own(item) or f"a {type(item).__name__}{path}"


def _our_own(holder: Any) -> str | None:
    """Say what an object of zero3's is for; None for any other."""
    cls = type(holder)
    ours = str(cls.__module__).startswith("lightning_zero3.strategies.")
    return _OURS.get(cls.__name__, "zero3's own state") if ours else None


def _find_tensors(device_type: str) -> list[tuple[TensorKind, Tensor]]:
    """Find the tensors on a device that Python can reach, without parameters, with their kinds."""
    found = []
    for item in gc.get_objects():
        # Not `isinstance`, which may run the code of other packages' proxies.
        if (
            issubclass(type(item), Tensor)
            and item.device.type == device_type
            and not issubclass(type(item), Parameter)
        ):
            kind = (
                str(item.dtype).removeprefix("torch."),
                tuple(item.shape),
                item.grad_fn is not None,
                _storage(item)[1],
            )
            found.append((kind, item))
    return found


def _storage(item: Tensor) -> tuple[int, int]:
    """Return (address, bytes) of what holds a tensor's elements."""
    try:
        storage = item.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # sparse, and other tensors without a storage
        return id(item), item.numel() * item.element_size()


def _find_holder(item: Any, module: nn.Module) -> tuple[Any, str]:
    """Return (holder, step): an object that refers to `item`, and the step from it to `item`.

    The holder is None where the step is a full name.
    """
    owners = {
        id(child.__dict__): name or type(module).__name__ for name, child in module.named_modules()
    }
    holders = [holder for holder in gc.get_referrers(item) if not _is_own_frame(holder)]
    for holder in holders:
        key = _key_of(holder, item) if type(holder) is dict else None
        if key is None:
            continue
        if id(holder) in owners:
            return None, f"{owners[id(holder)]}.{key}"
        if "__name__" in holder and "__builtins__" in holder:  # a module's globals
            return None, f"{holder['__name__']}.{key}"
        if "__module__" in holder and "__doc__" in holder:  # a class's namespace
            classes = [each for each in gc.get_referrers(holder) if isinstance(each, type)]
            if classes:
                return None, f"{classes[0].__qualname__}.{key}"
        return holder, f"[{key!r}]" if _is_field(holder, key) else "[...]"
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
    for holder in holders:  # an object whose attributes have no dict yet
        if (name := _our_own(holder)) is not None:
            return None, name
        key = _key_of(getattr(holder, "__dict__", {}), item)
        owner = owners.get(id(getattr(holder, "__dict__", None)), type(holder).__name__)
        return None, f"{owner}.{key}" if key is not None else f"a {type(holder).__name__}"
    return None, _OUTSIDE


def _key_of(holder: dict[Any, Any], item: Any) -> Any:
    """Return the key of `item` in a dict, or None.

    A generator instead of the loop would capture the item, and so be one more holder.
    """
    for key, value in list(holder.items()):
        if value is item:
            return key
    return None


def _is_field(holder: dict[Any, Any], key: Any) -> bool:
    """Say whether a key of a dict has a meaning of its own, rather than being one of many."""
    value = holder[key]
    if not isinstance(key, str):
        return len(holder) == 1
    if not isinstance(value, Tensor):
        return True
    shapes = [each.shape for each in list(holder.values()) if isinstance(each, Tensor)]
    return shapes.count(value.shape) == 1


def _is_own_frame(holder: Any) -> bool:
    """Say whether `holder` is a frame of this file."""
    return isinstance(holder, types.FrameType) and holder.f_code.co_filename == __file__
