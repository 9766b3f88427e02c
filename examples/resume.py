"""Stop a run in the middle of an epoch and continue it with the very next sample.

    python examples/resume.py            # 2 processes on the CPU
    python examples/resume.py --devices 1

The run is made twice: once whole, once stopped after some steps and resumed from its checkpoint.
Both must see the same samples in the same order. Nothing in the module or in
the loader knows about it: the position travels in Lightning's own checkpoint.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  registers the strategy "zero3"

SAMPLES, BATCH, EPOCHS = 50, 4, 2


class Regression(LightningModule):
    """Learns y = 3x, and writes down which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        )
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        index, x = batch
        self.seen.append(index.tolist())
        return torch.nn.functional.mse_loss(self.model(x), 3 * x)

    def train_dataloader(self) -> DataLoader:
        x = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)  # [SAMPLES, 1]
        return DataLoader(TensorDataset(torch.arange(SAMPLES), x), batch_size=BATCH, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Stop(Callback):
    """Ends training after some steps, wherever in the epoch that is."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        trainer.should_stop = trainer.global_step == self.steps


def fit(
    folder: Path, devices: int, strategy: object, steps: int = -1, checkpoint: str | None = None
) -> Regression:
    """Train until the last epoch, or for some steps."""
    # The same weights to begin with on every rank; the order of samples follows from the same seed.
    torch.manual_seed(7)
    model = Regression()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            Stop(steps),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path=checkpoint)
    return model


def compare(folder: Path, devices: int, strategy: object = "zero3", stop: int = 5) -> None:
    """Assert that a stopped and resumed run is the whole run."""
    make = strategy if callable(strategy) else lambda: strategy
    whole = fit(folder / "whole", devices, make())
    first = fit(folder / "parts", devices, make(), steps=stop)
    rest = fit(
        folder / "parts", devices, make(), checkpoint=str(folder / "parts" / f"step={stop}.ckpt")
    )
    assert first.seen + rest.seen == whole.seen, "the resumed run saw other samples"
    rank = whole.global_rank
    print(
        f"rank {rank}: {len(first.seen)} batches, stopped, {len(rest.seen)} more: the same"
        f" {len(whole.seen)} batches"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    # One folder for all processes: those that Lightning starts inherit the environment.
    folder = os.environ.setdefault("RESUME_EXAMPLE_FOLDER", tempfile.mkdtemp())
    compare(Path(folder), arguments.devices)
