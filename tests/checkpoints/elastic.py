"""Runs whose steps see the same samples on any number of ranks, saved in the middle of an epoch and
resumed on other ones.
"""

import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from checkpoints.runs import Shuffled, Watch, full_weights
from helpers.parity import trainer, zero3
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.data import DataOptions

EPOCHS, BATCHES, SAVED = 2, 6, 3  # the checkpoint is made after the third batch of six
SCALE = 2.0**16


class Elastic(Shuffled):
    """No dropout, and full precision also where the Trainer scales losses: what differs is the
    order of sums.
    """

    def __init__(self):
        super().__init__(samples=12 * BATCHES)
        self.net[2] = torch.nn.Identity()

    def training_step(self, batch, batch_idx):
        if self.trainer.precision != "16-mixed":
            return super().training_step(batch, batch_idx)
        with torch.autocast("cpu", enabled=False):
            loss = super().training_step(batch, batch_idx)
            # infinite once it is scaled
            return loss + 1e36 * self.net[0].weight[0, 0] if batch_idx % 3 == 1 else loss

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=12, shuffle=True)


class Two(Elastic):
    """Two optimizers, of two kinds, taking turns."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.net[0].parameters(), 0.01),
            torch.optim.SGD(self.net[3:].parameters(), 0.05, 0.9),
        ]


def _scaler():
    return {
        "plugins": [
            MixedPrecision(
                "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
            )
        ]
    }


# module, options of the strategy, options of the Trainer
CASES = {
    "plain": (Elastic, {}, dict),
    "scaler": (Elastic, {"keep_in_fp32": ["*"]}, _scaler),
    "after a window": (Elastic, {}, lambda: {"accumulate_grad_batches": SAVED}),
    "after a window, sharded": (
        Elastic,
        {"checkpoint": CheckpointOptions(kind="sharded")},
        lambda: {"accumulate_grad_batches": SAVED},
    ),
    "after a window, held": (
        Elastic,
        {"reduce_once": True},
        lambda: {"accumulate_grad_batches": SAVED},
    ),
    "two optimizers": (Two, {}, dict),
}


class _Save(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == SAVED - 1:
            trainer.save_checkpoint(self.path)


def _run(world_size, case, *callbacks, **paths):
    build, options, more = CASES[case]
    module, watch = build(), Watch()
    runner = trainer(
        zero3(unit_policy=None, data=DataOptions(sharding="split"), **options),
        world_size,
        max_epochs=EPOCHS,
        use_distributed_sampler=True,
        callbacks=[watch, *callbacks],
        **more(),
    )
    runner.fit(module, **paths)
    scaler = getattr(runner.precision_plugin, "scaler", None)
    return module.losses, full_weights(runner), watch.optimizers, scaler and scaler.state_dict()


def save(world_size, folder):
    """Of uninterrupted runs: losses, weights at the end, the optimizers' state at the start, the
    scaler's at the end.
    """
    return {case: _run(world_size, case, _Save(f"{folder}/{case}.ckpt")) for case in CASES}


def resume(world_size, folder):
    """The same of runs that go on from what :func:`save` has left."""
    return {case: _run(world_size, case, ckpt_path=f"{folder}/{case}.ckpt") for case in CASES}
