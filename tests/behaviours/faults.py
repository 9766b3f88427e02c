"""Engines that are broken on purpose: each outcome must be recognised."""

import os
import time

from .harness import ENGINES, Run


class Unreduced(Run):
    """Every rank keeps its own gradients."""

    is_reference = False

    def _average(self, before):
        pass


class Sleeping(Run):
    def set_up(self):
        super().set_up()
        if self.rank == 0:
            time.sleep(600)


class Dying(Run):
    def set_up(self):
        os._exit(3)


class Raising(Run):
    refuses = True

    def set_up(self):
        raise KeyError("no reason")


class RaisingOnOneRank(Unreduced):
    """What `read-outside-a-step` announces, but rank 0 goes on without a word."""

    refuses = True

    def set_up(self):
        super().set_up()
        if self.rank == 1:
            raise RuntimeError(
                "'head.weight' is sharded over the ranks and was read outside a step"
            )


ENGINES.update(
    {cls.__name__.lower(): cls for cls in (Unreduced, Sleeping, Dying, Raising, RaisingOnOneRank)}
)
