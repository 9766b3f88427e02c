"""Two ranks take every decision together."""

import lightning.pytorch as pl
from lightning.pytorch import Callback

from helpers.ranks import run_ranks
from helpers.recorded import Net, assert_same, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graph_runner import GraphCaptureError


class Counting(CUDAGraphStep):
    def on_train_end(self, trainer, pl_module):
        self.replays, self.recaptures = self._runner.replays, self._runner.recaptures
        super().on_train_end(trainer, pl_module)


class Changes(Callback):
    """On rank 1 a dropout rate changes."""

    def on_train_batch_start(self, trainer, pl_module: pl.LightningModule, batch, batch_idx):
        if trainer.global_step == 12 and trainer.global_rank == 1:
            pl_module.net[3].p = 0.05


class AllUsed(Net):
    """DDP asks on the host which parameters were used, where some may not be."""

    def __init__(self):
        super().__init__()
        self.unused.requires_grad_(False)


class WaitsOnRankOne(AllUsed):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if self.global_rank == 1:
            output["loss"].item()
        return output


def both_ways(rank, world_size):
    """Eager and captured runs, with what is seen of each."""
    options = {"strategy": "ddp", "devices": world_size, "max_epochs": 5, "num_sanity_val_steps": 0}
    results = {}
    for name, more, callbacks in [
        ("accumulation", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, []),
        ("a change on one rank", {}, [Changes]),
    ]:
        callback = Counting(software=True, strict=True, max_graphs=6)
        runs = [fit(AllUsed(), *(c() for c in callbacks), *extra, **options, **more) for extra in ([], [callback])]
        for seen in zip(*(run.seen for run in runs), strict=True):
            assert_same(seen[1], seen[0], f"{name}, rank {rank}")
        assert_same(runs[1].state, runs[0].state, name)
        results[name] = callback.replays, callback.recaptures
    try:
        fit(WaitsOnRankOne(), CUDAGraphStep(software=True, strict=True), **{**options, "max_epochs": 1})
    except GraphCaptureError as error:
        results["refused"] = str(error)
    try:
        fit(Net(), CUDAGraphStep(software=True, strict=True), **{**options, "strategy": Zero3Strategy()})
    except GraphCaptureError as error:
        results["zero3"] = str(error)
    return results


def test_two_ranks_decide_together():
    first, second = run_ranks(both_ways, 2, timeout=250)
    assert first["accumulation"] == second["accumulation"] and first["accumulation"][0] > 8
    assert first["a change on one rank"] == second["a change on one rank"] and first["a change on one rank"][1] == 1
    assert "On another rank the step cannot be captured" in first["refused"]
    assert "_local_scalar_dense needs a value" in second["refused"]
    assert "exchanges parameters between 2 ranks" in first["zero3"] and first["zero3"] == second["zero3"]
