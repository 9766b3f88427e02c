"""What all ranks do alike works anywhere, and what rank 0 does alone is an error on every rank:
weights and optimizer state read, changed and copied, sub-modules called, in hooks, callbacks and after
the run.
"""

import copy
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks

WIDTH = 7  # so that shards of weights are of unequal length, and padded


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.tanh(self.up(x))


class Encoder(nn.Module):
    """As a vision transformer: parameters of its own, beside those of its blocks."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, WIDTH))
        self.positions = nn.Parameter(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = x + self.positions + self.token
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.encoder(x))


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = Model()

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def validation_step(self, batch):
        self.log("loss", self.model(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def norms(module):
    """Of every weight, with a histogram, as a logger takes it."""
    return [
        part
        for p in module.model.parameters()
        for part in (p.norm(), torch.histc(p.detach().float(), 5), p.data.abs().max())
    ]


def moments(module):
    """Statistics of optimizer state, as people log them."""
    state = module.optimizers().optimizer.state
    return [
        statistic(value.float())
        for p in module.model.parameters()
        for value in state[p].values()
        for statistic in (torch.mean, torch.norm, lambda v: v.std(correction=0), torch.numel)
    ]


def sub_module(module):
    with torch.no_grad():
        return [
            module.model.encoder(torch.ones(2, 4, WIDTH)),
            module.model.encoder.blocks[1](torch.ones(WIDTH)),
        ]


def deep_copy(module):
    copied = copy.deepcopy(module.model)
    assert type(copied.head.weight) is nn.Parameter
    with torch.no_grad():
        return [*copied.state_dict().values(), copied(torch.ones(2, 4, WIDTH))]


def state_dict(module):
    return [torch.as_tensor(value).clone() for value in module.model.state_dict().values()]


def clamp(module):
    with torch.no_grad():
        for p in module.model.head.parameters():
            p.clamp_(-0.1, 0.1)
        module.model.head.bias.data[2:4].zero_()
        module.model.head.bias.data[:2].copy_(module.model.head.bias.data[4:6])
        module.model.encoder.token.data.mul_(0.9)
    return norms(module)


def generate(module):
    x, found = torch.ones(1, 4, WIDTH), []
    with torch.no_grad():
        for _ in range(3):
            x = torch.tanh(module.model(x))
            found.append(x)
    return found


def initialise(module):
    """`torch.nn.init` turns gradients off itself."""
    torch.manual_seed(7)
    torch.nn.init.normal_(module.model.head.weight)
    module.model.head.reset_parameters()
    return module.model.head.weight.norm().item(), module.model.head.bias.sum().item()


USES = {
    use.__name__: use
    for use in (norms, moments, sub_module, deep_copy, state_dict, clamp, generate, initialise)
}
PLACES = (
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
    "after",
)


class Use(pl.Callback):
    def __init__(self, use, place, alone):
        self.use, self.place, self.alone, self.found = use, place, alone, []

    def run(self, module):
        if not self.alone or module.trainer.is_global_zero:
            self.found += [
                torch.as_tensor(each).detach().clone() for each in USES[self.use](module)
            ]

    def on_train_batch_end(self, trainer, module, *_):
        if self.place == "on_train_batch_end":
            self.run(module)

    def on_validation_epoch_end(self, trainer, module):
        if self.place == "on_validation_epoch_end":
            self.run(module)

    def on_train_epoch_end(self, trainer, module):
        if self.place == "on_train_epoch_end":
            self.run(module)

    def on_train_end(self, trainer, module):
        if self.place == "on_train_end":
            self.run(module)


def batches(rank, world_size):
    torch.manual_seed(0)
    # the mean of the ranks' losses is that of the joined batch
    data = torch.randn(3, 4, 4, WIDTH)
    mine = data[:, rank * 4 // world_size : (rank + 1) * 4 // world_size]
    return torch.utils.data.DataLoader(list(mine), batch_size=None)


def fit(rank, world_size, strategy, uses, place, alone=False):
    found = {}
    for use in uses:
        module, callback = Lit(), Use(use, place, alone)
        runner = (
            trainer(
                strategy and zero3(unit_policy=["Block", "Encoder"]),
                world_size,
                callbacks=[callback],
                max_epochs=2,
                limit_val_batches=1,
            )
            if strategy
            else trainer("auto", 1, callbacks=[callback], max_epochs=2, limit_val_batches=1)
        )
        data = batches(rank, world_size)
        runner.fit(module, data, data)
        if place == "after":
            callback.run(module)
        found[use] = callback.found
    return found


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks(place):
    (expected,) = run_ranks(fit, 1, None, list(USES), place, timeout=60)
    for found in run_ranks(fit, 2, "zero3", list(USES), place, timeout=90):
        for use in USES:
            assert len(found[use]) == len(expected[use]) > 0, use
            for mine, theirs in zip(found[use], expected[use], strict=True):
                torch.testing.assert_close(
                    mine, theirs, rtol=2e-5, atol=2e-6, msg=lambda m, u=use: f"{u}: {m}"
                )


def fit_alone(rank, world_size, use, place, folder):
    begun = time.monotonic()
    try:
        fit(rank, world_size, "zero3", [use], place, alone=True)
        fit(rank, world_size, "zero3", ["norms"], place)
    except Exception as error:
        told = f"{time.monotonic() - begun} {type(error).__name__}: {error}"
        (Path(folder) / str(rank)).write_text(told)
        raise


@pytest.mark.parametrize("use", USES)
def test_rank_zero_alone(use, tmp_path):
    with pytest.raises(AssertionError, match="failed first"):
        run_ranks(fit_alone, 2, use, "on_train_batch_end", str(tmp_path), timeout=60)
    for rank in range(2):
        seconds, told = (tmp_path / str(rank)).read_text().split(maxsplit=1)
        assert float(seconds) < 20, told
        assert "DivergenceError" in told and "rank 0" in told and "gathered" in told, told
        assert "encoder" in told or "head" in told, told
        assert use != "moments" or "rank 0" in told and "`optimizer.state`, which all" in told, told
