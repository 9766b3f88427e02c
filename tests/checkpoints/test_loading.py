"""What runs beside the loading of weights: callbacks, hooks of modules, states that are no
parameters.
"""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torchmetrics.classification import BinaryConfusionMatrix

from checkpoints.runs import Shuffled, full_weights
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError


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
        module.load_state_dict(
            {name: torch.ones(value.shape) for name, value in checkpoint["state_dict"].items()}
        )


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


@pytest.mark.parametrize("kind", ["sharded", "file"])
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
    module.net.append(nn.Linear(1, 1))
    with pytest.raises(
        RuntimeError, match=r'Missing key\(s\) in state_dict: "net.6.weight", "net.6.bias"'
    ):
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
            def fail(target):
                raise OSError("gone")

            if rank == 1:
                checkpoint["state_dict"]["net.0.bias"].read_into = fail

    with pytest.raises(
        CheckpointError, match="(?s)Loading weights failed on rank 1: .*net.0.bias.*gone"
    ):
        runner(world_size, "sharded").fit(Missing(), ckpt_path=f"{folder}/a.ckpt")
    return True


def test_all_ranks_fail_where_one_cannot_read(tmp_path):
    assert run_ranks(unreadable, 2, str(tmp_path)) == [True, True]


class Counter(nn.Module):
    """Saves what is no parameter and no buffer, and takes a buffer of any length."""

    def __init__(self):
        super().__init__()
        self.count, self.values = 0, torch.zeros(3)
        self.register_buffer("rows", torch.zeros(0, 3))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {
            prefix + "values": self.values.clone(),
            prefix + "count": torch.tensor(self.count),
        }

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.values, self.count = (
            state_dict.pop(prefix + "values").clone(),
            int(state_dict.pop(prefix + "count")),
        )
        self.rows = torch.zeros_like(state_dict[prefix + "rows"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Kept(Shuffled):
    def __init__(self):
        super().__init__()
        self.counter, self.matrix = Counter(), BinaryConfusionMatrix()
        self.matrix.persistent(True)
        self.register_buffer("old", torch.zeros(2))
        self._register_state_dict_hook(
            lambda module, state, prefix, _: state.update(new=state.pop("old") + 0)
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, *_: state.update(old=state.pop("new"))
        )

    def state_dict(self):  # takes nothing
        return super().state_dict()

    def training_step(self, batch, batch_idx):
        self.counter.count += 1
        self.counter.values += 1
        self.counter.rows = torch.cat([self.counter.rows, torch.ones(1, 3)])
        self.old += 1
        self.matrix.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))
        return super().training_step(batch, batch_idx)

    @property
    def kept(self):
        return (
            self.counter.count,
            self.counter.values,
            self.counter.rows,
            self.old,
            self.matrix.confmat,
        )


def keep(rank, world_size, folder, kind):
    path, module = f"{folder}/a.ckpt", Kept()
    first = runner(world_size, kind)
    first.fit(module)
    first.save_checkpoint(path)
    found = {"saved": copy.deepcopy(module.kept)}
    new = Kept()
    runner(world_size, kind).fit(new, ckpt_path=path)
    found["new model"] = new.kept
    with torch.device("meta"):
        new = Kept()
    new.counter, new.matrix, new.old = Counter(), Kept().matrix, torch.zeros(2)
    runner(world_size, kind).fit(new, ckpt_path=path)
    found["on meta"] = new.kept
    first.fit_loop.max_epochs = 2
    first.fit(module)
    assert module.counter.count == 2 * found["saved"][0]
    first.fit_loop.max_epochs = 1
    first.fit(module, ckpt_path=path)
    return {**found, "same trainer": module.kept}


@pytest.mark.parametrize("kind", ["sharded", "file"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_load_what_is_no_parameter(world_size, kind, tmp_path):
    for found in run_ranks(keep, world_size, str(tmp_path), kind, timeout=100):
        steps, *saved = found.pop("saved")
        assert steps == saved[1].size(0) > 1
        for name, (count, *tensors) in found.items():
            assert count == steps, name
            assert all(torch.equal(a, b) for a, b in zip(tensors, saved, strict=True)), name
