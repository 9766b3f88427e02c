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


def _register() -> None:
    """Register `Zero3Strategy`; Lightning refuses a name that another class has.

    Where the module was executed again (a reload) the class that users import now takes the place
    of the old one.
    """
    for name in Zero3Strategy.registered_names:
        taken_by = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else None
        if taken_by is not None and taken_by.__module__ == Zero3Strategy.__module__:
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
