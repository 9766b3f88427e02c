"""What may be done with a tensor whose values are elsewhere: right or loud. Plain torch, and
nothing of the engine.
"""

from .flat_gradient import unguarded
from .functions import instances
from .given_out import is_gathered
from .home import ResidencyError, home_of, is_sharded
from .numbers import show
from .resting import RestingParameter

__all__ = [
    "ResidencyError",
    "RestingParameter",
    "home_of",
    "instances",
    "is_gathered",
    "is_sharded",
    "show",
    "unguarded",
]
