"""Manual optimization that accumulates with ``toggle_model(sync_grad=False)``: one reduction a
window, and its numbers.
"""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.contracts import count_calls
from helpers.parity import RTOL, assert_tensors_close, full_state, relative, trainer, zero3
from helpers.ranks import run_ranks

WIDTH, LAYERS, WINDOW, WINDOWS, JOINED = 8, 3, 4, 3, 6


class Manual(pl.LightningModule):
    """A window of micro-batches for each step of one optimizer, or of two that take turns."""

    def __init__(self, optimizers, way):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.judge = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.number, self.way, self.losses, self.counts = optimizers, way, [], {}

    def on_train_start(self):
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is not None and self.trainer.world_size > 1:
            self.counts = count_calls(engine.collectives)

    def compute(self, batch, sign):
        loss = sign * torch.tanh(self.judge(torch.tanh(self.net(batch)))).square().mean()
        self.losses.append(loss.item())
        self.manual_backward(loss / WINDOW)

    def training_step(self, batch, batch_idx):
        last = batch_idx % WINDOW == WINDOW - 1
        optimizers = self.optimizers() if self.number == 2 else [self.optimizers()]
        for sign, optimizer in zip((1, -1), optimizers, strict=False):
            with optimizer.toggle_model(sync_grad=last):
                if self.way == "closure" and last:
                    optimizer.step(closure=lambda: self.compute(batch, sign))  # noqa: B023
                else:
                    self.compute(batch, sign)
                    if last and self.way == "clipped":
                        self.clip_gradients(optimizer, 0.01, "norm")
                    if last:
                        optimizer.step()
                if last:
                    optimizer.zero_grad()

    def configure_optimizers(self):
        if self.number == 1:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        judge = torch.optim.SGD(self.judge.parameters(), lr=0.3, weight_decay=0.1)
        return torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9), judge

    def train_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        joined = torch.randn(
            WINDOW * WINDOWS, JOINED, WIDTH, generator=torch.Generator().manual_seed(1)
        )
        return DataLoader([batch.chunk(world_size)[rank] for batch in joined], batch_size=None)


CASES = [(optimizers, way) for optimizers in (1, 2) for way in ("plain", "closure", "clipped")]


def fit(rank, world_size, reduce_once):
    found = {}
    for case in CASES:
        strategy = (
            zero3(unit_policy=["Linear"], reduce_once=reduce_once) if world_size > 1 else "auto"
        )
        fitter = trainer(strategy, world_size)
        fitter.fit(module := Manual(*case))
        state = {name: value.clone() for name, value in full_state(fitter).items()}
        found[case] = module.losses, module.counts.get("reduce_scatter"), state
    return found


@cache
def results(world_size, reduce_once=False):
    return run_ranks(fit, world_size, reduce_once, timeout=60)


@pytest.mark.parametrize(("world_size", "reduce_once"), [(2, True), (3, True), (2, False)])
@pytest.mark.parametrize("case", CASES)
def test_windows_of_manual_optimization(case, world_size, reduce_once):
    ((expected, _, weights),) = (found[case] for found in results(1))
    ranks = [found[case] for found in results(world_size, reduce_once)]
    losses = [sum(step) / world_size for step in zip(*(mine for mine, *_ in ranks), strict=True)]
    assert relative(losses, expected) <= 5 * RTOL and len(set(expected)) == len(expected)
    assert_tensors_close(ranks[0][2], weights, 5 * RTOL)
    # Every unit is reduced in each backward, or in the last one of a window.
    backwards = case[0] * WINDOWS * (1 if reduce_once else WINDOW)
    assert [count for _, count, _ in ranks] == [2 * LAYERS * backwards] * world_size
