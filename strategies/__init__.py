"""Registers `Zero3Strategy` with Lightning under its names."""

import sys

from lightning.pytorch.strategies import StrategyRegistry

from .checkpoints import CheckpointOptions
from .collectives import DivergenceError
from .data import DataOptions
from .engine import ResidencyError
from .launch.rendezvous import current_world
from .launch.world import LaunchError, World
from .liveness.watchdog import WatchOptions
from .state_dicts.collective_errors import CheckpointError
from .zero3 import Zero3Strategy

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "DataOptions",
    "DivergenceError",
    "LaunchError",
    "ResidencyError",
    "WatchOptions",
    "World",
    "Zero3Strategy",
    "current_world",
]


def _full_name(cls: object) -> str:
    return f"{getattr(cls, '__module__', '?')}.{getattr(cls, '__qualname__', repr(cls))}"


def _register() -> None:
    """Register `Zero3Strategy` once, and refuse to replace a class of another package.

    Lightning reads the name when a Trainer is built. Overriding the entry would change which class
    an unrelated part of the program gets, so the second registration fails.

    Raises:
        RuntimeError: another class is registered under one of the names.
    """
    for name in Zero3Strategy.registered_names:
        if name not in StrategyRegistry:
            continue
        taken_by = StrategyRegistry[name]["strategy"]
        if _full_name(taken_by) != _full_name(Zero3Strategy):
            raise RuntimeError(
                f'The strategy name "{name}" is already taken by {_full_name(taken_by)}, so'
                f" {_full_name(Zero3Strategy)} cannot be registered under it.\nImport only one of"
                f' the two packages, or call `StrategyRegistry.remove("{name}")` before this'
                " import; if both names end alike, one file was imported under two names:"
                " take the checkout off sys.path."
            )
        # The module was executed again (a reload): register the class that users import now.
        StrategyRegistry.remove(name)
    Zero3Strategy.register_strategies(StrategyRegistry)


def _refuse_other_package(**options: object) -> None:
    raise ImportError(
        'strategy="zero3" works with the package `lightning`, not with `pytorch_lightning`, whose'
        " classes are others.\nWrite `import lightning.pytorch as pl` for `import pytorch_lightning"
        " as pl`, in all of the program (and the model's class)."
    )


_register()
# hazard: to import it, which takes a third of a second and changes warning filters, is no way to
# reach its registry
if "pytorch_lightning.strategies" in sys.modules:
    for name in Zero3Strategy.registered_names:
        sys.modules["pytorch_lightning.strategies"].StrategyRegistry.register(
            name, _refuse_other_package
        )
