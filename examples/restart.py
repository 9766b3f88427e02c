"""A process is killed in the middle of training; torchrun starts all of them again, and they go on
from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 1 examples/restart.py

In the first attempt rank 1 kills itself in step 12. Rank 0 says which rank died and where it was,
and ends too. The second attempt finds the checkpoint of step 10.
"""

import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  registers the strategy "zero3"


class Regression(LightningModule):
    """Learns y = 3x."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_attempt and self.global_rank == 1 and self.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        (x,) = batch
        return torch.nn.functional.mse_loss(self.model(x), 3 * x)

    def train_dataloader(self) -> DataLoader:
        x = torch.linspace(-1, 1, 400).unsqueeze(1)  # [400, 1]
        return DataLoader(TensorDataset(x), batch_size=10, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        print(f"rank {self.global_rank} begins at step {self.global_step}", flush=True)


if __name__ == "__main__":
    # One folder for all processes and attempts. Not in the shared folder for temporary files, where
    # others could make one of this name first.
    folder = Path("restart-checkpoints", os.environ["TORCHELASTIC_RUN_ID"])
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="zero3",
        max_epochs=1,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # "last" is nothing in the first attempt, which begins anew.
    trainer.fit(Regression(), ckpt_path="last")
    print(f"rank {trainer.global_rank} ends at step {trainer.global_step}", flush=True)
