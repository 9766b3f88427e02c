"""What was given out of slots and buffers so that torch does not count what is written to it:
addresses, arrays, aliases.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .home import ResidencyError, is_sharded

untyped_storage = Tensor.untyped_storage  # torch's own
SLOTS: dict[int, list[Alias]] = {}  # storage of a slot -> what of it was given out
_BUFFERS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # buffer -> where to note that it was


@dataclass
class Alias:
    """Memory of a weight that may be written to past torch."""

    now: Tensor  # the weight in its slot, or a part of it
    before: Tensor  # a copy of what it was
    array: weakref.ref[Any]  # which the user made of it

    def changed(self) -> bool:
        """Whether it was written to since this was asked."""
        same = same_bits(self.now, self.before)
        self.before = self.before if same else self.now.clone()
        return not same


def same_bits(now: Tensor, before: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal, NaN and the sign of zero included."""
    a, b = (
        each.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for each in (now, before)
    )
    return torch.equal(a, b)


def note_uncounted(buffer: Tensor, noted: bytearray, place: int) -> None:
    """Set ``noted[place]`` when ``buffer`` was given out so that torch does not count what is
    written to it.
    """
    _BUFFERS[buffer] = noted, place


def note(*given: Any) -> None:
    """Buffers among ``given`` may be written to."""
    if _BUFFERS:
        for buffer in given:
            if isinstance(buffer, Tensor) and buffer in _BUFFERS:
                noted, place = _BUFFERS[buffer]
                noted[place] = 1


def watch(tensor: Tensor, array: Any = None) -> None:
    """What is written to ``tensor`` by what it was given to (an ``array`` of numpy, for one) is
    stored when its use ends.
    """
    aliases = SLOTS.get(storage_of(tensor)) if SLOTS else None
    # else it has its full precision, or is the user's in `gathered`
    if aliases is not None and tensor.numel():
        if not isinstance(array, np.ndarray):
            if any(each.now.is_set_to(tensor) for each in aliases):
                return
            array = set()  # nobody has this one
        aliases.append(Alias(tensor.detach(), tensor.detach().clone(), weakref.ref(array)))


def storage_of(tensor: Tensor) -> int:
    """Tells the storage of ``tensor`` from others; 0 if it has none, or more than one."""
    with torch._C.DisableTorchFunction():  # modes, too
        try:
            return untyped_storage(tensor)._cdata
        except RuntimeError:
            return 0


def is_gathered(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter that is in use, or a view of one in its slot."""
    with torch._C.DisableTorchFunctionSubclass():
        return is_sharded(tensor) or is_sharded(tensor._base) or storage_of(tensor) in SLOTS


class GuardedStorage:
    """A storage that is asked what and where it is, and not written to."""

    def __init__(
        self,
        storage: torch.UntypedStorage,
        answers: frozenset[str],
        refusal: Callable[[], ResidencyError],
    ) -> None:
        self._storage, self._answers, self._refusal = storage, answers, refusal

    def __len__(self) -> int:
        return len(self._storage)

    def __getattr__(self, name: str) -> Any:
        if name in self._answers:
            return getattr(self._storage, name)
        raise AttributeError(name) if name.startswith("__") else self._refusal()


OF_MEMORY = frozenset(
    "_cdata data_ptr nbytes size device is_cuda is_pinned is_shared element_size _weak_ref"
    " _fix_weakref resizable".split()
)
