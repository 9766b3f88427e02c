"""`stop_on_nonfinite` with captured steps: the same run, and the same place named, by a second run
that is eager.
"""

import pytest
import torch
from torch import nn

from helpers.one_line import Small, train
from helpers.ranks import run_ranks
from helpers.recorded import Net, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

BAD_STEP = 15


class Counting(CUDAGraphStep):
    """Knows how often it replayed, and whether the last step was a replay."""

    def on_train_batch_start(self, *_):
        self.before = self._runner.step.replays

    def _uninstall(self):
        if self._runner is not None and self._runner.step is not None:
            self.replays = self._runner.step.replays
            self.replayed = self.replays > self.before
        super()._uninstall()


class Spoiled(Net):
    """In one step the last rank gets a batch from which a nan comes."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.ran = kind, 0

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == BAD_STEP and self.global_rank == self.trainer.world_size - 1:
            if self.kind == "loss":
                batch["y"].fill_(-100)  # classes that count for nothing: a mean over none
            else:
                batch["x"][0, 0] = torch.inf


def both_ways(rank, world_size):
    options = {
        "devices": world_size,
        "max_epochs": 4,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    options["strategy"] = lambda: Zero3Strategy(unit_policy=[nn.Linear], stop_on_nonfinite=True)
    callback = Counting(software=True, strict=True)
    assert_same_run(fit(Net(), callback, **options), fit(Net(), **options))
    replays, said = [callback.replays], []
    for kind in ("output", "loss"):
        for callbacks in ([], [callback := Counting(software=True, strict=True)]):
            with pytest.raises(FloatingPointError) as error:
                fit(Spoiled(kind), *callbacks, **options)
            said.append(str(error.value))
        assert callback.replayed
        replays.append(callback.replays)
    return said, replays


@pytest.mark.parametrize("world_size", [1, 2])
def test_captured_steps_are_looked_at_and_their_nan_is_traced(world_size):
    per_epoch = 11 if world_size == 1 else 6
    for said, replays in run_ranks(both_ways, world_size, timeout=200):
        # Three are watched, then three verified, and the first of each later epoch; the bad step is
        # the last one. With two ranks one of the three is the first of an epoch.
        verified = 3 if world_size == 1 else 2
        eager = 3 + verified
        bad = BAD_STEP + 1 - eager - BAD_STEP // per_epoch
        assert replays == [4 * per_epoch - eager - 3] + 2 * [bad]
        assert said[0] == said[1] and said[2] == said[3]
        first = f"In step {BAD_STEP} the first value that is not finite, "
        assert (
            said[0].startswith(first)
            and f", is in the output of unit net.0 in forward, on rank {world_size - 1}." in said[0]
        )
        assert said[2].startswith(f"{first}nan, is in the loss, on rank {world_size - 1}.")


def test_graphs_of_modules_would_hide_the_units_in_them():
    strategy = Zero3Strategy(stop_on_nonfinite=True)
    module = Small(lambda self, batch, batch_idx, loss: loss)
    with pytest.raises(
        GraphCaptureError,
        match=r"`Zero3Strategy\(stop_on_nonfinite=\.\.\.\)` .*Leave it out",
    ):
        train(
            module, CUDAGraphStep(software=True, strict=True, modules=["layer"]), strategy=strategy
        )
