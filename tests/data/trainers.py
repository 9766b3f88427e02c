"""A real Trainer with a thin strategy around `DataHooks`, for the tests."""

from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero3.strategies.data import DataHooks, DataOptions

SEED = 5


class SharedData(DDPStrategy):
    """DDP, with nothing but the loaders taken over."""

    def __init__(self, options):
        super().__init__(process_group_backend="gloo", timeout=timedelta(seconds=60))
        self.data = DataHooks(options)

    @property
    def _trainer(self):
        return self.lightning_module.trainer

    def setup_environment(self):
        super().setup_environment()
        self.data.take_over(self._trainer)

    def setup(self, trainer):
        super().setup(trainer)
        self.data.seed_ranks(trainer)

    def process_dataloader(self, dataloader):
        return self.data.shard(self._trainer, dataloader)

    def reduce(self, tensor, group=None, reduce_op="mean"):
        # Lightning divides the sum of the batch sizes by the number of ranks in integers, so the mean
        # of a metric is wrong where ranks have different numbers of samples.
        if isinstance(tensor, torch.Tensor) and reduce_op in (None, "mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def on_train_start(self):
        self.data.on_train_start(self._trainer)

    def on_train_batch_start(self, batch, batch_idx):
        self.data.on_train_batch_start(self._trainer)

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        self.data.save(self._trainer, checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path, weights_only=False):
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.data.load(checkpoint)
        return checkpoint


class Recorder(LightningModule):
    """Writes down which samples it saw, by stage, and what it drew from the generators."""

    def __init__(self, loaders, asks_for_steps=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loaders = loaders
        self.asks_for_steps = asks_for_steps
        self.seen = {"train": [], "validate": [], "test": [], "predict": []}
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


class StopAfter(Callback):
    """Ends the process's run abruptly, as a kill would."""

    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if len(module.seen["train"]) == self.batches:
            raise Killed


class Killed(Exception):
    pass


def plain(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return batch


def make_trainer(folder, options, every=1, callbacks=(), **kwargs):
    checkpoints = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=every, save_last=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": world,
            "strategy": SharedData(DataOptions(**{"seed": SEED, **options})),
            "callbacks": [checkpoints, *callbacks] if every else list(callbacks),
            "default_root_dir": folder,
            "max_epochs": 2,
            **quiet,
            **kwargs,
        }
    )
