"""Train on two processes, go on with one, and read the result as of any other run.

    python examples/checkpoints.py

All processes write a checkpoint's file at once, while training goes on. Another number of processes
reads it, and so do Lightning itself, plain torch and tools without the model's class; one command
makes it a folder of safetensors.
"""

import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero3 import CheckpointOptions, Zero3Strategy
from lightning_zero3.__main__ import main as zero3


class Regression(LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))  # [samples, features]
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(folder: Path, devices: int, epochs: int) -> None:
    """Train to the end of an epoch, from the last checkpoint if there is one."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=Zero3Strategy(start_method="spawn", checkpoint=CheckpointOptions(background=True)),
        max_epochs=epochs,
        callbacks=[
            ModelCheckpoint(
                folder, "{epoch}", save_top_k=-1, save_last="link", enable_version_counter=False
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), ckpt_path="last")


def main() -> None:
    """Train, go on, look, read."""
    with tempfile.TemporaryDirectory() as parent:
        folder, weights = Path(parent, "run"), Path(parent, "weights")
        fit(folder, devices=2, epochs=2)
        fit(folder, devices=1, epochs=4)
        zero3(["inspect", str(folder)])
        zero3(["inspect", str(folder / "epoch=3.ckpt")])
        zero3(["consolidate", "--safetensors", str(folder / "last.ckpt"), str(weights)])
        checkpoint = torch.load(folder / "last.ckpt", weights_only=True, mmap=True)
        model = Regression.load_from_checkpoint(folder / "last.ckpt").cpu()
        x = torch.randn(64, 8)
        error = torch.nn.functional.mse_loss(model.net(x), x.sum(1, keepdim=True)).item()
        print(
            f"epoch {checkpoint['epoch']}, error of the model: {error:.3f} (the target's variance"
            " is 8)"
        )


if __name__ == "__main__":
    sys.exit(main())
