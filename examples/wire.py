"""What travels between the ranks, and what it costs in memory: the same training without options,
with two of the strategy, each by itself, and with both.

    python examples/wire.py               # 2 processes on the CPU
    python examples/wire.py --devices 4
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3

WIDTH, BLOCKS, STEPS, MICRO_BATCHES = 128, 4, 5, 4

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    # Gradients of a window add up on each rank, and travel with its last micro-batch: fewer bytes,
    # the same numbers but for rounding, and a full-size fp32 gradient in memory.
    "reduce once": {"reduce_once": True},
    # Gradients travel as bfloat16, each rounded once, and are added up in fp32.
    "reduce in bf16": {"reduce_dtype": "bf16"},
    "both": {"reduce_once": True, "reduce_dtype": "bf16"},
}


class Block(torch.nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, WIDTH] to the same
        return x + self.layers(self.norm(x))


class Regression(LightningModule):
    """Learns a product of two random projections."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, target = batch
        loss = (self.head(self.blocks(x)) - target).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SentBytes(Callback):
    """Adds up the bytes that this rank sends for weights and for gradients."""

    def __init__(self) -> None:
        self.weights = self.gradients = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        communicator = trainer.strategy.engine.collectives  # all that travels goes through it
        communicator.all_gather = self._counted(communicator.all_gather, "weights")
        communicator.reduce_scatter = self._counted(communicator.reduce_scatter, "gradients")
        # rounded ones
        communicator.all_to_all = self._counted(communicator.all_to_all, "gradients")

    def _counted(self, exchange: Callable[..., Any], what: str) -> Callable[..., Any]:
        def counted(buffer: torch.Tensor, *args: Any) -> Any:
            world_size = torch.distributed.get_world_size()
            setattr(
                self, what, getattr(self, what) + buffer.nbytes * (world_size - 1) // world_size
            )
            return exchange(buffer, *args)

        return counted


def train(devices: int, options: dict[str, Any]) -> dict[str, float]:
    """Figures of a run: what a rank sends in a step and what it keeps in memory, in bytes; the mean
    loss.
    """
    seed_everything(7, verbose=False)
    sent = SentBytes()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=lightning_zero3.Zero3Strategy(unit_policy=["Block"], **options),
        accumulate_grad_batches=MICRO_BATCHES,
        max_epochs=1,
        callbacks=[sent],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x, a, b = torch.randn(
        3, devices * STEPS * MICRO_BATCHES * 8, WIDTH, generator=torch.Generator().manual_seed(1)
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(x, x + a * b), batch_size=8))
    ledger = trainer.strategy.memory_ledger()
    return {
        "weights": sent.weights / STEPS,
        "gradients": sent.gradients / STEPS,
        "buffer": ledger["reduce_buffer"],
        "state": ledger["parameters"] + ledger["gradients"] + ledger["optimizer_state"],
        "loss": trainer.callback_metrics["loss"].item(),
    }


def main(devices: int = 2) -> dict[str, dict[str, float]]:
    """Train with each of OPTIONS, print the figures and return them."""
    found = {name: train(devices, options) for name, options in OPTIONS.items()}
    if lightning_zero3.current_world().rank == 0:
        print(
            f"{'':14}   sent per step (KB)       in memory (KB)\n{'':14} weights  gradients    "
            "buffer   state      loss"
        )
        for name, row in found.items():
            weights, gradients, buffer, state = (
                row[key] / 1000 for key in ("weights", "gradients", "buffer", "state")
            )
            print(
                f"{name:14} {weights:7.0f} {gradients:10.0f} {buffer:9.0f} {state:7.0f}"
                f" {row['loss']:9.6f}"
            )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    main(**vars(parser.parse_args()))
