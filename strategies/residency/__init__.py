"""What may be done with a tensor whose values are elsewhere: right or loud. Plain torch, and nothing of the engine.

====================  ==================================================================================================
home                  who owns a sharded parameter, and gathers or stores its values when asked to
resting               the state of a parameter outside its unit's use: every operation on it comes here first
in use                an ordinary parameter that views the gathered slot, and counts what is written to it
sharded copy          a whole gradient, whose changes its home stores, or a gathered value, which can only be read
flat gradient         this rank's shard of many gradients, as an optimizer sees them; norms of it are refused
flat parameter        the same of values
====================  ==================================================================================================
"""

from .resting import ResidencyError, is_sharded

__all__ = ["ResidencyError", "is_sharded"]
