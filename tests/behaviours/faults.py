"""Engines that are broken on purpose: each outcome must be recognised."""

import os
import time

from .harness import ENGINES, Run


class Unreduced(Run):
    """Every rank keeps its own gradients."""

    is_reference = False

    def _average(self, p):
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
    def set_up(self):
        raise KeyError("no reason")


ENGINES.update({"unreduced": Unreduced, "sleeping": Sleeping, "dying": Dying, "raising": Raising})
