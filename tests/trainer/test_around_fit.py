"""What programs do before and after a run: save, load, move the module, go on with another strategy."""

import multiprocessing as mp

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from helpers.parity import assert_tensors_close, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import NoBatch


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_index):
        self.log("loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


def data():
    return DataLoader(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), batch_size=2)


def test_a_module_that_was_never_fitted_is_saved(tmp_path):
    module = Model()
    runner = trainer("zero3")
    runner.strategy.connect(module)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert_tensors_close(loaded, module.state_dict(), 0.0)


def test_a_strategy_loads_a_checkpoint_before_any_run(tmp_path):
    module = Model()
    runner = trainer("zero3", max_steps=1)
    runner.fit(module, data())
    runner.save_checkpoint(tmp_path / "a.ckpt")
    loaded = trainer("zero3").strategy.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded["global_step"] == 1
    assert_tensors_close(loaded["state_dict"], module.state_dict(), 0.0)


class Noting(TorchCheckpointIO):
    """A plugin of the user's."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.given = path, storage_options
        super().save_checkpoint(checkpoint, path)


def test_a_plugin_gets_path_and_options_as_they_are(tmp_path):
    module, plugin = Model(), Noting()
    runner = trainer("zero3", max_steps=1, plugins=[plugin])
    runner.fit(module, data())
    runner.save_checkpoint(tmp_path / "a.ckpt", storage_options={"own": 1})
    assert plugin.given == (tmp_path / "a.ckpt", {"own": 1})
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert_tensors_close(saved, module.state_dict(), 0.0)


@pytest.mark.parametrize("strategy", ["zero3_spawn", "zero3_notebook"])
def test_the_process_that_called_fit_saves(strategy, tmp_path):
    module = Model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    runner = trainer(strategy, 2, max_steps=2)
    runner.fit(module, data())
    runner.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_tensors_close(saved["state_dict"], module.state_dict(), 0.0)
    assert not torch.equal(saved["state_dict"]["net.0.weight"], before["net.0.weight"])
    other = Model.load_from_checkpoint(tmp_path / "a.ckpt")
    assert_tensors_close(other.state_dict(), module.state_dict(), 0.0)


def test_a_missing_checkpoint_is_what_scripts_catch():
    with pytest.raises(FileNotFoundError, match=r"no/such\.ckpt"):
        trainer("zero3").fit(Model(), data(), ckpt_path="no/such.ckpt")


def test_keys_that_a_checkpoint_lacks_are_left_as_they_are(tmp_path):
    module = Model()
    module.strict_loading = False
    weights = {"net.1.bias": torch.ones(1), "other": torch.ones(1)}
    checkpoint = {"state_dict": weights, "pytorch-lightning_version": "2.6.0"}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    trainer("zero3", limit_val_batches=1.0).validate(module, data(), ckpt_path=tmp_path / "a.ckpt")
    assert module.net[1].bias.item() == 1.0


MISUSES = [lambda batch: (lambda x, y: x)(*batch), lambda b: b[0], len, list, float, lambda b: b.x]


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_batch_that_is_none_says_what_it_is(misuse):
    with pytest.raises((TypeError, AttributeError), match="no sample is left for this rank"):
        misuse(NoBatch())


def go_on(rank, world_size):
    module = Model()
    first = trainer(zero3(unit_policy=["Linear"]), world_size, max_steps=2)
    first.fit(module, data())
    for same in (module.cpu, module.float, lambda: module.to("cpu", torch.float32)):
        assert same() is module
    (before,) = trainer("zero3", world_size, limit_val_batches=1.0).validate(module, data())
    values = {}
    with first.strategy.gathered(module, modify=True):
        other = "ddp" if world_size > 1 else "auto"
        (values["whole"],) = trainer(other, world_size, limit_val_batches=1.0).validate(
            module, data()
        )
        alone = Model()
        alone.load_state_dict(module.state_dict())
        for each in (module, alone):
            trainer(other, world_size, max_steps=3).fit(each, data())
        assert_tensors_close(dict(module.named_parameters()), dict(alone.named_parameters()), 0.0)
        assert not torch.equal(alone.net[0].weight, Model().net[0].weight)
    assert_tensors_close(module.state_dict(), alone.state_dict(), 0.0)
    (expected,) = trainer("zero3", world_size, limit_val_batches=1.0).validate(module, data())
    if world_size == 1:
        for other in ("ddp", "auto"):
            (values[other],) = trainer(other, 1, limit_val_batches=1.0).validate(module, data())
    trainer("zero3", world_size, max_steps=1).fit(module, data())
    assert values.pop("whole")["loss"] == pytest.approx(before["loss"], rel=1e-6)
    return expected["loss"], {name: value["loss"] for name, value in values.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_strategy_goes_on_with_the_module(ranks):
    for expected, values in run_ranks(go_on, ranks, timeout=60):
        assert expected > 0 and len(values) == (2 if ranks == 1 else 0)
        assert all(value == pytest.approx(expected, rel=1e-6) for value in values.values())


class Queue(IterableDataset):
    """What was taken is gone."""

    def __init__(self):
        self.taken = mp.Value("i", 0)

    def __iter__(self):
        for _ in range(5):
            with self.taken.get_lock():
                self.taken.value += 1
            yield torch.ones(1, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_takes_each_item_of_a_stream_once(workers, tmp_path):
    loader = DataLoader(Queue(), batch_size=None, num_workers=workers)
    for epochs, path in ((2, None), (4, tmp_path / "a.ckpt"), (5, tmp_path / "a.ckpt")):
        runner = trainer("zero3", max_epochs=epochs)
        before = loader.dataset.taken.value
        runner.fit(Model(), loader, ckpt_path=path)
        runner.save_checkpoint(tmp_path / "a.ckpt")
        assert loader.dataset.taken.value - before == 5 * (2 if epochs < 5 else 1)
