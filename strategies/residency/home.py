"""Who owns which sharded parameter, and what owners do, as seen from here."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class Home(Protocol):
    """The owner of parameters; see :class:`~.engine.access.Access`."""

    in_step: bool  # all ranks run the same code: a read may gather, and a change may be stored

    def compare_notes(self) -> None:
        """Before its values are put together elsewhere: ranks have written the same ones;
        collective.

        Raises:
            DivergenceError: naming a parameter.
        """

    def retire(self) -> None:
        """Another engine has taken the parameters over: stop watching them."""

    def read(self, parameter: nn.Parameter) -> Tensor:
        """The whole value in memory of its own, connected to autograd; collective."""

    def full_values(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """The whole values, detached, of parameters that share this home; collective, each unit is
        gathered once.
        """

    def gathered(
        self, parameters: Iterable[nn.Parameter], modify: bool
    ) -> AbstractContextManager[None]:
        """Inside, the parameters are ordinary and full; collective."""

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Store a full value that all ranks have; local."""

    def age(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Another one whenever its value has changed."""

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole reduced gradient, if the optimizers see one; collective then."""

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """Store a full gradient that all ranks have, or clear it; local."""

    def keeper_of(self, held: Any) -> Any:
        """Who keeps the memory ``held`` of a gradient, see `engine.held_gradients.HeldGradients`;
        None: an earlier engine.
        """


@dataclass
class Sharded:
    """What is known of a sharded parameter."""

    label: str  # its name and its unit's, for errors
    cls: type[nn.Parameter]  # the user's class of it
    dtype: torch.dtype  # the user's; the slot may hold a lower one
    # its owner, who holds it: neither would ever be freed with a strong reference
    home: weakref.ref[Home]
    # its `.data` was read in use: torch does not tell autograd of changes of that, so nobody else
    # may
    aliased: bool = False


_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> Sharded
is_sharded = _SHARDED.__contains__  # whether an engine owns a parameter (resting or in use)
about = _SHARDED.__getitem__  # what is known of one that is


# Added to what is told of a parameter.
IN_COMPILED_CODE = (
    "torch.compile takes the memory of what compiled code reads, and has parameters of layers that"
    " run in it alone. Read it in a function with `@torch.compiler.disable`, compile layers one by"
    " one (`for block in blocks: block.compile()`), and put a checkpoint around each, not around"
    " compiled code that runs several."
)


class ResidencyError(RuntimeError):
    """A sharded parameter was read or written where its value is not there."""


def settle(
    parameter: nn.Parameter, label: str, cls: type[nn.Parameter], dtype: torch.dtype, home: Home
) -> None:
    """Make ``home`` answer for ``parameter`` while it rests; see :class:`Sharded`."""
    _SHARDED[parameter] = Sharded(label, cls, dtype, weakref.ref(home))


def unsettle(parameter: nn.Parameter) -> None:
    """Forget the home of ``parameter``; it is an ordinary parameter from now on."""
    _SHARDED.pop(parameter, None)


def home_of(parameter: Tensor) -> Home | None:
    """Who owns ``parameter``, if anyone does."""
    return _SHARDED[parameter].home() if parameter in _SHARDED else None


def owner_of(parameter: Tensor) -> Home:
    """The same, where there has to be one."""
    home = home_of(parameter)
    if home is None:
        raise ResidencyError(
            f"Parameter {describe(parameter)} outlived the model that it was sharded with, and its"
            " values with it. Hold the module, or keep its `state_dict()` (in `with"
            " strategy.gathered(module):`)."
        )
    return home


def describe(parameter: Tensor) -> str:
    """Name of ``parameter`` and its unit."""
    return _SHARDED[parameter].label
