"""Values of weights in `on_save_checkpoint` and `on_load_checkpoint`."""

import pytest
import torch

from checkpoints.runs import Shuffled, full_weights
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions


class Scaled(Shuffled):
    save = load = None

    def on_save_checkpoint(self, checkpoint):
        if self.save is not None:
            checkpoint["state_dict"] = self.save(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint):
        if self.load is not None:
            checkpoint["state_dict"] = self.load(checkpoint["state_dict"])


def tripled(state):
    return {name: value * 3 for name, value in state.items()}


def fit(world_size, kind, module, read=None):
    strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(kind=kind))
    runner = trainer(strategy, world_size, max_epochs=1)
    runner.fit(module, ckpt_path=read)  # no epoch is left to be trained
    return runner


def change(rank, world_size, folder, kind):
    module = Scaled()
    runner = fit(world_size, kind, module)
    found = {"whole": full_weights(runner)}
    runner.save_checkpoint(f"{folder}/plain.ckpt")
    for times in (lambda value: value * 3, lambda value: 3 - value, torch.exp):
        module.save = lambda state, times=times: {
            name: times(value) for name, value in state.items()
        }
        with pytest.raises(
            RuntimeError,
            match="(?s)needs the values of 'net.0.weight'.*on_load_checkpoint.*full_state_dict",
        ):
            runner.save_checkpoint(f"{folder}/refused.ckpt")
    module.save = lambda state: tripled(runner.strategy.full_state_dict())
    runner.save_checkpoint(f"{folder}/tripled.ckpt")
    found["saved"] = full_weights(fit(world_size, kind, Scaled(), f"{folder}/tripled.ckpt"))
    module = Scaled()
    module.load = tripled
    found["loaded"] = full_weights(fit(world_size, kind, module, f"{folder}/plain.ckpt"))
    return found


@pytest.mark.parametrize("kind", ["sharded", "file"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_are_changed_where_the_error_says(world_size, kind, tmp_path):
    found, *_ = run_ranks(change, world_size, str(tmp_path), kind, timeout=100)
    assert_same_tensors(found["saved"], tripled(found["whole"]))
    assert_same_tensors(found["loaded"], tripled(found["whole"]))
