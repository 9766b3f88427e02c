"""What the watch does on the training thread: it writes to memory, and asks nobody anything."""

import sys
from collections import Counter

from lightning.pytorch.callbacks import Callback

from helpers.models import Lit, Recipe
from helpers.parity import sharded_gradients, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.liveness import (
    heartbeats,
    position,
    strategy,
    watchdog,
)

FILES = [module.__file__ for module in (heartbeats, position, strategy, watchdog)]
STEPS = range(2, 6)


class Listener(Callback):
    """Counts what functions of the watch call on this thread: (file, name), the file "C" for
    functions without one.
    """

    def __init__(self):
        self.called, self.asked = Counter(), Counter()

    def listen(self, counter):
        def note(frame, event, arg):
            if event == "c_call" and frame.f_code.co_filename in FILES:
                counter["C", arg.__name__] += 1
            elif (
                event == "call"
                and frame.f_back is not None
                and frame.f_back.f_code.co_filename in FILES
            ):
                counter[frame.f_code.co_filename, frame.f_code.co_name] += 1

        sys.setprofile(note)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        # From the end of a step to the end of another.
        if batch_idx == STEPS.start - 1:
            self.listen(self.called)
        elif batch_idx == STEPS.stop - 1:
            sys.setprofile(None)

    def on_train_end(self, trainer, pl_module):
        self.listen(self.asked)
        trainer.strategy.watch.all_end_with(ValueError())
        sys.setprofile(None)


def fit(rank, size):
    listener = Listener()
    trainer(zero3(), size, callbacks=[listener]).fit(Lit(Recipe(steps=8), sharded_gradients))
    return listener.called, listener.asked


def test_a_step_asks_no_store_and_exchanges_nothing_for_the_watch():
    for called, asked in run_ranks(fit, 2):
        # What talks to the store is heard.
        assert {name for file, name in asked if file == "C"} >= {"set", "wait", "compare_set"}
        for heard in ((position.__file__, "begin_step"), (position.__file__, "activity")):
            assert called[heard] >= len(STEPS) and called[heard] % len(STEPS) == 0, called
        outside = {(file, name) for file, name in called if file == "C" or "/torch/" in file}
        assert not outside
