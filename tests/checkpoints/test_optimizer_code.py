"""What an optimizer's own code and its hooks do when it is saved and loaded."""

import warnings

import pytest
import torch

from checkpoints.runs import Shuffled, optimizer_states
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions


class Optimized(Shuffled):
    def __init__(self, *optimizers, fresh=False):
        super().__init__()
        self.given, self.fresh = optimizers, fresh
        self.automatic_optimization = False

    def configure_optimizers(self):
        layers = (self.net[0], self.net[3]) if len(self.given) > 1 else (self.net,)
        return [make(layer.parameters()) for make, layer in zip(self.given, layers, strict=True)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.trainer.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def on_load_checkpoint(self, checkpoint):
        if self.fresh:
            checkpoint["optimizer_states"] = []


def fit(world_size, kind, module, read=None, write=None):
    strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(kind=kind))
    runner = trainer(strategy, world_size, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.fit(module, ckpt_path=read)  # no epoch is left to be trained
        if write:
            runner.save_checkpoint(write)
    return runner, [str(w.message) for w in caught if "its own `" in str(w.message)]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.5)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.5)


SEEN = []


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.register_state_dict_pre_hook(lambda o: o.param_groups[0].update(noted=2))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "epochs": 3})

    def before(optimizer, state):
        SEEN.append(state.pop("epochs"))
        state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]

    def after(optimizer):
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        SEEN.append(sum(float(momentum.abs().sum()) for momentum in momenta))  # read by now

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    return optimizer


class Own(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


def own_code(rank, world_size, folder, kind):
    fit(world_size, kind, Optimized(adam), write=f"{folder}/adam.ckpt")
    runner, _ = fit(world_size, kind, Optimized(adamw), read=f"{folder}/adam.ckpt")
    group = runner.optimizers[0].param_groups[0]
    assert (group["lr"], group["decoupled_weight_decay"]) == (0.01, True)

    fit(world_size, kind, Optimized(hooked), write=f"{folder}/hooked.ckpt")
    runner, _ = fit(world_size, kind, Optimized(hooked), read=f"{folder}/hooked.ckpt")
    group = runner.optimizers[0].param_groups[0]
    assert (group["lr"], group["noted"]) == (0.5, 2)
    assert SEEN[0] == 3 and SEEN[1] > 0 and len(SEEN) == 2

    path, own = f"{folder}/own.ckpt", Optimized(lambda parameters: Own(parameters, lr=0.1))
    _, told = fit(world_size, kind, own, write=path)
    return told + fit(world_size, kind, own, read=path)[1]


@pytest.mark.parametrize("kind", ["sharded", "file"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_own_code_is_asked(world_size, kind, tmp_path):
    told, *others = run_ranks(own_code, world_size, str(tmp_path), kind, timeout=100)
    assert len(told) == 2 and all(
        text.startswith("Own has its own `load_state_dict`, which zero3 does not call")
        for text in told
    )
    assert not any(others)


def count(rank, world_size, folder):
    path = f"{folder}/a.ckpt"
    fit(world_size, "sharded", Optimized(adam), write=path)
    runner, _ = fit(world_size, "sharded", Optimized(adamw, fresh=True), read=path)
    assert runner.optimizers[0].param_groups[0]["lr"] == 0.02
    state = optimizer_states(runner)
    assert rank or state[0]["state"] == {}
    with pytest.raises(
        ValueError,
        match=r'states of 1 optimizers, .* returns 2\.\nReturn .*checkpoint\["optimizer_states"\] = \[\]',
    ):
        fit(world_size, "sharded", Optimized(adam, adam), read=path)
    return True


@pytest.mark.parametrize("world_size", [1, 2])
def test_fresh_optimizers_and_another_number(world_size, tmp_path):
    assert all(run_ranks(count, world_size, str(tmp_path)))


class Evaluated(Shuffled):
    validation_step = Shuffled.training_step


def save_after_each(rank, world_size, folder):
    runner, module = (
        trainer(zero3(unit_policy=None), world_size, limit_val_batches=1.0),
        Evaluated(),
    )
    found = {}
    for name, run in {"fit": runner.fit, "validate": runner.validate}.items():
        run(module, module.train_dataloader())
        for weights_only in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                runner.save_checkpoint(f"{folder}/{name}.ckpt", weights_only)
            found[name, weights_only] = [
                str(w.message) for w in caught if "no optimizer states" in str(w.message)
            ]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_without_optimizer_states_is_told_of(world_size, tmp_path):
    """They end with an evaluation, with zero3 as with Lightning's FSDP; whoever saves then wants to
    know.
    """
    for rank, found in enumerate(run_ranks(save_after_each, world_size, str(tmp_path))):
        told = found.pop(("validate", False))
        assert len(told) == (rank == 0) and all("weights_only=True" in text for text in told)
        assert not any(found.values())
