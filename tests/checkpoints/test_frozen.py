"""Checkpoints without what is never trained: how small they are, where they load, what they refuse."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkpoints.runs import full_weights
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

WIDTH = 48


class Adapted(nn.Module):
    """A frozen layer and an adapter of rank 2."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class Finetuned(LightningModule):
    def __init__(self, seed=3, width=WIDTH, weights=None):
        super().__init__()
        torch.manual_seed(seed)
        self.weights, self.losses = weights, []
        with torch.device("meta" if weights else "cpu"):
            self.net = nn.Sequential(Adapted(width), Adapted(width))
        self.register_buffer("seen", torch.zeros(()))

    def configure_model(self):
        if self.weights:
            self.trainer.strategy.load_weights(self.weights)

    def training_step(self, batch, batch_idx):
        self.seen += 1
        loss = (self.net(batch[0])[:, 0] - batch[0].sum(1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        x = torch.randn(
            16, self.net[0].base.in_features, generator=torch.Generator().manual_seed(1)
        )
        return DataLoader(TensorDataset(x), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)  # the frozen ones are among them


def strategy(**options):
    return zero3(unit_policy=None, checkpoint=CheckpointOptions(exclude_frozen=True, **options))


def fit(world_size, module, epochs, read=None, options=None):
    runner = trainer(strategy(**(options or {})), world_size, max_epochs=epochs)
    runner.fit(module, ckpt_path=read)
    return runner


def train(rank, world_size, folder, kind):
    options = {"kind": kind}
    first = Finetuned()
    runner = fit(world_size, first, 1, options=options)
    runner.strategy.save_weights(f"{folder}/base")
    runner.save_checkpoint(f"{folder}/a.ckpt")
    runner.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    whole, again = Finetuned(), Finetuned()
    end = full_weights(fit(world_size, whole, 2))
    found = [(again, fit(world_size, again, 2, f"{folder}/a.ckpt", options))]
    on_meta = Finetuned(weights=f"{folder}/base")
    found.append((on_meta, fit(world_size, on_meta, 2, f"{folder}/a.ckpt", options)))
    for module, again in found:
        assert module.losses == whole.losses[len(first.losses) :]
        assert module.seen == whole.seen == 2 * len(first.losses)
        assert_same_tensors(full_weights(again), end)
    errors = {}
    cases = {
        "other shape": Finetuned(width=WIDTH + 1),
        "no values": Finetuned(weights="none"),
    }
    cases["no values"].configure_model = lambda: None
    for name, module in cases.items():
        with pytest.raises(CheckpointError) as error:
            fit(world_size, module, 2, f"{folder}/a.ckpt", options)
        errors[name] = str(error.value)
    return errors


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_what_is_trained_alone_is_saved_and_loaded(kind, tmp_path):
    errors, others = run_ranks(train, 2, str(tmp_path), kind, timeout=100)
    assert errors == others
    name, shape = "net.0.base.weight", (WIDTH, WIDTH)
    for error in errors.values():
        assert error.startswith(f"The checkpoint leaves out the frozen parameter {name!r} of shape")
        assert f"{shape}, and the model has none of that shape with values." in error
    if kind == "sharded":
        return
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    trained = {f"net.{k}.{name}.weight" for k in (0, 1) for name in ("down", "up")}
    assert set(state["state_dict"]) == trained | {"seen"}
    assert set(torch.load(tmp_path / "weights.ckpt")["state_dict"]) == trained | {"seen"}
    # elsewhere Lightning loads it beside what the model has
    module = Finetuned.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
    expected = dict(Finetuned().named_parameters())
    for key, value in module.state_dict().items():
        if key.endswith("base.weight"):
            assert torch.equal(value, expected[key])
        elif key in trained:
            assert torch.equal(value, state["state_dict"][key])


def average(rank, world_size):
    runner = trainer(strategy(), world_size, max_epochs=1, callbacks=[EMAWeightAveraging()])
    module = Finetuned()
    with pytest.raises(ValueError, match=r"with EMAWeightAveraging, .*\nLeave one of them out"):
        runner.fit(module)
    assert not module.losses


def test_averages_have_all_parameters():
    run_ranks(average, 1)


class Unfrozen(Finetuned):
    """One of the frozen layers is trained for a while."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].base.requires_grad_(batch_idx == 0)


def unfreeze(rank, world_size, folder):
    runner = fit(world_size, Unfrozen(), 1)
    runner.save_checkpoint(f"{folder}/a.ckpt")
    return full_weights(runner)


def test_what_was_trained_and_is_frozen_again_is_saved(tmp_path):
    weights, *_ = run_ranks(unfreeze, 2, str(tmp_path))
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert "net.1.base.weight" not in state
    assert torch.equal(state["net.0.base.weight"], weights["net.0.base.weight"])
    assert not torch.equal(state["net.0.base.weight"], Finetuned().net[0].base.weight)


class Added(Finetuned):
    """One of the frozen layers comes to the optimizer, and is frozen again."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def on_train_batch_start(self, batch, batch_idx):
        base = self.net[0].base.requires_grad_(batch_idx == 1)
        if batch_idx == 1:
            self.optimizers().optimizer.add_param_group({"params": list(base.parameters())})


class Stateless(Unfrozen):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def save_without_states(rank, world_size, folder):
    found = []
    for cls in (Added, Unfrozen, Stateless):
        runner = fit(world_size, cls(), 1)
        for weights_only in (True, False):
            path = f"{folder}/{cls.__name__}{weights_only}.ckpt"
            runner.save_checkpoint(path, weights_only=weights_only)
            found.append((path, full_weights(runner)))
    return found


def test_what_was_trained_is_saved_whatever_optimizer_states_say(tmp_path):
    found, *_ = run_ranks(save_without_states, 2, str(tmp_path), timeout=60)
    for path, weights in found:
        state = torch.load(path, weights_only=True)["state_dict"]
        assert "net.1.base.weight" not in state, path
        assert not torch.equal(weights["net.0.base.weight"], Finetuned().net[0].base.weight)
        assert torch.equal(state["net.0.base.weight"], weights["net.0.base.weight"]), path
