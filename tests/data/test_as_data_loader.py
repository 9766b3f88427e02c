"""The loader that a Trainer shows answers for the user's."""

import warnings

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import lightning_zero3  # noqa: F401  (registers the strategy)
from helpers.parity import trainer
from helpers.ranks import run_ranks

NAMES = """batch_size dataset sampler batch_sampler num_workers collate_fn pin_memory drop_last timeout
    worker_init_fn multiprocessing_context generator prefetch_factor persistent_workers
    pin_memory_device in_order""".split()


def collate(samples):
    return torch.stack(samples)


def fitted(loader):
    runner = trainer("zero3", max_steps=1, use_distributed_sampler=True)
    runner.fit(BoringModel(), loader)
    return runner


def test_it_is_a_data_loader_with_the_users_attributes():
    mine = DataLoader(
        RandomDataset(32, 8),
        batch_size=2,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=collate,
        drop_last=True,
        generator=torch.Generator(),
        timeout=60,
    )
    shown = fitted(mine).train_dataloader
    assert isinstance(shown, DataLoader) and len(NAMES) == 16
    for name in NAMES:
        assert getattr(shown, name) is getattr(mine, name), name
    for name in set(NAMES) - {"worker_init_fn"}:
        with pytest.raises(AttributeError, match=rf"'{name}' cannot change any more"):
            setattr(shown, name, "spawn")
    with pytest.raises(AttributeError, match="nothing"):
        shown.nothing  # noqa: B018


def test_lightnings_hint_about_workers_comes(monkeypatch):
    monkeypatch.setattr(data_connector, "suggested_max_num_workers", lambda processes: 8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitted(DataLoader(RandomDataset(32, 8)))
    assert any("'train_dataloader' does not have many workers" in str(w.message) for w in told)


class Indices(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return i, torch.ones(32)


class Hard(BoringModel):
    """Draws ten samples by weight, and gives the next ten the weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_index):
        self.seen += batch[0].tolist()
        return super().training_step(batch[1], batch_index)

    def on_train_epoch_end(self):
        weights = torch.zeros(40, dtype=torch.double)
        first = 10 * (self.current_epoch + 1)
        weights[first : first + 10] = 1
        self.trainer.train_dataloader.sampler.weights = weights


def draw(rank, world_size):
    first = torch.cat([torch.ones(10), torch.zeros(30)])
    loader = DataLoader(Indices(), batch_size=2, sampler=WeightedRandomSampler(first, 8))
    module = Hard()
    runner = trainer("zero3", world_size, max_epochs=3, use_distributed_sampler=True)
    runner.fit(module, loader)
    return module.seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_the_sampler_act_in_the_next_epoch(ranks):
    for seen in run_ranks(draw, ranks, timeout=60):
        per_epoch = 8 // ranks
        assert len(seen) == 3 * per_epoch
        for epoch in range(3):
            drawn = seen[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert {i // 10 for i in drawn} == {epoch}, seen
