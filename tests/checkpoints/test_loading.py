"""What runs beside the loading of weights: callbacks, hooks of modules, states that are no parameters."""

import pytest
import torch
from checkpoints.runs import Shuffled, full_weights
from lightning.pytorch import Callback

from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints.errors import CheckpointError


def runner(world_size, kind, *callbacks, epochs=1):
    strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(kind=kind))
    return trainer(strategy, world_size, max_epochs=epochs, callbacks=list(callbacks))


def state_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class Looks(Shuffled):
    def configure_optimizers(self):
        self.seen = state_of(self)
        return super().configure_optimizers()


class Reads(Callback):
    seen = None

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.seen = state_of(module)


class Ones(Callback):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        module.load_state_dict({name: torch.ones(value.shape) for name, value in checkpoint["state_dict"].items()})


class Halves(Ones):
    def on_load_checkpoint(self, trainer, module, checkpoint):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.full(parameter.shape, 0.5))


def around(rank, world_size, folder, kind):
    path, module = f"{folder}/a.ckpt", Shuffled()
    first = runner(world_size, kind)
    first.fit(module)
    first.save_checkpoint(path)
    saved, found = full_weights(first), {}
    reads, looks = Reads(), Looks()
    runner(world_size, kind, reads).fit(looks, ckpt_path=path)
    found["new"] = reads.seen, looks.seen
    for callback in (Ones(), Halves()):
        for name, again, wanted in (
            ("new model", runner(world_size, kind, callback), Shuffled()),
            ("same trainer", first, module),
            ("second trainer", runner(world_size, kind, callback), module),
        ):
            if again is first:
                first.callbacks.append(callback)
            again.fit(wanted, ckpt_path=path)  # no epoch is left to be trained
            found[type(callback).__name__, name] = full_weights(again)
        first = again
        first.callbacks.remove(callback)
    return saved, found


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_callbacks_read_and_replace_what_was_loaded(world_size, kind, tmp_path):
    ranks = run_ranks(around, world_size, str(tmp_path), kind, timeout=100)
    (saved, whole), *_ = ranks  # rank 0 alone has full weights
    for seen in [seen for _, found in ranks for seen in found.pop("new")]:
        assert_same_tensors(seen, saved)
    assert len(whole) == 6
    for (callback, name), state in whole.items():
        value = {"Ones": 1.0, "Halves": 0.5}[callback]
        assert state and all((tensor == value).all() for tensor in state.values()), (callback, name)


def double(rank, world_size, folder):
    options = {"precision": "64-true", "max_epochs": 1}
    first = trainer(zero3(unit_policy=None), world_size, **options)
    first.fit(Shuffled())
    first.save_checkpoint(f"{folder}/a.ckpt")
    again = trainer(zero3(unit_policy=None), world_size, **options)
    again.fit(Shuffled(), ckpt_path=f"{folder}/a.ckpt")
    return full_weights(first), full_weights(again)


def test_no_digit_is_lost(tmp_path):
    for saved, loaded in run_ranks(double, 1, str(tmp_path)):
        assert_same_tensors(loaded, saved)


def meta(rank, world_size, folder):
    first = runner(world_size, "sharded")
    first.fit(Shuffled())
    first.save_checkpoint(f"{folder}/a.ckpt")
    with torch.device("meta"):
        module = Shuffled()
    again = runner(world_size, "sharded")
    again.fit(module, ckpt_path=f"{folder}/a.ckpt")
    assert_same_tensors(full_weights(again), full_weights(first))
    module.net.append(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "net.6.weight", "net.6.bias"'):
        runner(world_size, "sharded").fit(module, ckpt_path=f"{folder}/a.ckpt")
    return True


def test_a_model_on_the_meta_device_is_loaded_when_it_has_memory(tmp_path):
    assert run_ranks(meta, 2, str(tmp_path)) == [True, True]


def unreadable(rank, world_size, folder):
    first = runner(world_size, "sharded")
    first.fit(Shuffled())
    first.save_checkpoint(f"{folder}/a.ckpt")

    class Missing(Shuffled):
        def on_load_checkpoint(self, checkpoint):
            def fail():
                raise OSError("gone")

            if rank == 1:
                checkpoint["state_dict"]["net.0.bias"].read = fail

    with pytest.raises(CheckpointError, match="(?s)Loading weights failed on rank 1: .*net.0.bias.*gone"):
        runner(world_size, "sharded").fit(Missing(), ckpt_path=f"{folder}/a.ckpt")
    return True


def test_all_ranks_fail_where_one_cannot_read(tmp_path):
    assert run_ranks(unreadable, 2, str(tmp_path)) == [True, True]
