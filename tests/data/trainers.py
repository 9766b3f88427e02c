"""A Trainer with strategy zero3 and a module that writes down what it was given."""

from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero3 import CheckpointOptions, DataOptions, Zero3Strategy

SEED = 5


def order_of(epoch, n):
    """The order of ``n`` shuffled samples: what one process draws with seed + epoch."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


class Recorder(LightningModule):
    """Writes down which samples it saw, by stage, and what it drew from the generators."""

    def __init__(self, loaders, asks_for_steps=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loaders = loaders
        self.asks_for_steps = asks_for_steps
        self.seen = {"train": [], "validate": [], "test": [], "predict": []}
        self.steps_before = []  # optimizer steps before each training batch
        self.draws = []
        self.steps = None

    def train_dataloader(self):
        return self.loaders["train"]()

    def val_dataloader(self):
        return self.loaders["validate"]() if "validate" in self.loaders else []

    def test_dataloader(self):
        return self.loaders["test"]()

    def predict_dataloader(self):
        return self.loaders["predict"]()

    def training_step(self, batch, batch_idx):
        self.seen["train"].append((self.current_epoch, batch_idx, plain(batch)))
        self.steps_before.append(self.global_step)
        self.draws.append(torch.rand(()).item())
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.seen["validate"].append(plain(batch))
        self.log("mean", batch.double().mean(), sync_dist=True, batch_size=len(batch))

    def test_step(self, batch, batch_idx):
        self.seen["test"].append(plain(batch))
        self.log("mean", batch.double().mean(), sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch, batch_idx):
        self.seen["predict"].append(plain(batch))
        return batch

    def configure_optimizers(self):
        if self.asks_for_steps:
            self.steps = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.01)


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch


def make_trainer(folder, options, every=1, callbacks=(), checkpoint="file", **kwargs):
    checkpoints = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=every, save_last=False
    )
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": world,
            "strategy": Zero3Strategy(
                data=DataOptions(**{"seed": SEED, **options}),
                checkpoint=CheckpointOptions(checkpoint),
                timeout=timedelta(seconds=60),
                watch=None,
            ),
            "callbacks": [checkpoints, *callbacks] if every else list(callbacks),
            "default_root_dir": folder,
            "enable_checkpointing": bool(every),
            "max_epochs": 2,
            **quiet,
            **kwargs,
        }
    )


def fit(folder, loaders, options=None, ckpt=None, asks_for_steps=False, **kwargs):
    """One run; returns its module and Trainer."""
    torch.manual_seed(11)
    module = Recorder(loaders, asks_for_steps)
    trainer = make_trainer(folder, options or {}, **kwargs)
    trainer.fit(module, ckpt_path=ckpt)
    return module, trainer


def fit_and_resume(folder, *args, **kwargs):
    """A whole run, and runs resumed from each of its checkpoints but the last."""
    module, trainer = fit(folder, *args, **kwargs)
    resumed = {}
    for step in range(1, trainer.global_step):
        again, resumed_trainer = fit(
            f"{folder}/again", *args, ckpt=f"{folder}/step={step}.ckpt", **kwargs
        )
        done = next(
            (k for k, before in enumerate(module.steps_before) if before >= step),
            len(module.steps_before),
        )
        same = {
            "samples": again.seen["train"] == module.seen["train"][done:],
            "draws": again.draws == module.draws[done:],
            "epochs": resumed_trainer.current_epoch == trainer.current_epoch,
            "steps": resumed_trainer.global_step == trainer.global_step,
        }
        resumed[step] = [name for name, is_same in same.items() if not is_same]
    return {
        "train": module.seen["train"],
        "draws": module.draws,
        "differing": resumed,
        "steps": module.steps,
    }
