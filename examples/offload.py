"""Model state and activations in host memory: the same training with each kind of offload, and
what is where.

    python examples/offload.py --accelerator gpu --devices 1
    python examples/offload.py                 # 2 processes on the CPU

On the CPU the device is the host: offload does the same work there, and saves nothing.
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

import lightning_zero3

WIDTH, BLOCKS, STEPS = 256, 4, 10
# of model state: None; a kind; or how much may stay on the device. Of activations: None, "host", or
# how much
KINDS = (
    (None, None),
    ("optimizer", None),
    ("parameters", None),
    ("4MiB", None),
    ("parameters", "host"),
    (None, "1MiB"),
)


class Autoencoder(LightningModule):
    """Learns to repeat its input through a narrow layer."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, *[4 * WIDTH, WIDTH] * BLOCKS]
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        )
        self.losses: list[float] = []
        self.mib: dict[str, float] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layers(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        ledger = self.trainer.strategy.memory_ledger()
        self.mib = {name: nbytes / 2**20 for name, nbytes in ledger.items()}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(STEPS * 128, WIDTH), batch_size=64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def train(
    offload: str | None, activations: str | None, accelerator: str, devices: int
) -> Autoencoder:
    """Train with one kind of offload."""
    seed_everything(1, verbose=False)
    model = Autoencoder()
    trainer = Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=lightning_zero3.Zero3Strategy(offload=offload, activations=activations),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return model


def main() -> dict[Any, list[float]]:
    """Train with each kind; print and return the losses, and where what lies [MiB]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    found, rows = {}, []
    for kind in KINDS:
        model = train(*kind, args.accelerator, args.devices)
        on_device = sum(model.mib[k] for k in ("parameters", "gradients", "optimizer_state"))
        rows.append(
            f"{kind[0]!s:12}{kind[1]!s:12}{model.losses[-1]:12.8f}{on_device:11.1f}"
            f"{model.mib['host']:10.1f}"
        )
        found[kind] = model.losses
    if model.global_rank == 0:
        print(
            f"{'offload':12}{'activations':12}{'last loss':>12}{'device MiB':>11}{'host MiB':>10}",
            *rows,
            sep="\n",
        )
    return found


if __name__ == "__main__":
    main()
