"""Finetune a model whose backbone is frozen at first, and average its weights: Lightning's own
callbacks, on shards.

    python examples/finetune.py                    # 2 processes on the CPU
    python examples/finetune.py --strategy ddp     # to compare

Under `ddp` the numbers differ: it does not average gradients of what is unfrozen later.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  registers the strategy "zero3"

SAMPLES, WIDTH, EPOCHS = 256, 32, 6


class Classifier(LightningModule):
    """Tells on which side of a circle a point lies. The callback wants a `backbone`."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            layer for _ in range(3) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
        ]
        self.backbone = torch.nn.Sequential(torch.nn.Linear(2, WIDTH), torch.nn.ReLU(), *layers)
        self.head = torch.nn.Linear(WIDTH, 1)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        points, inside = batch  # [batch, 2], [batch, 1]
        return torch.nn.functional.binary_cross_entropy_with_logits(
            self.head(self.backbone(points)), inside
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("loss of the average", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # The head only: the callback adds the backbone when it unfreezes it.
        return torch.optim.AdamW(self.head.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        points = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
        inside = (points.square().sum(1, keepdim=True) < 0.6).float()
        return DataLoader(TensorDataset(points, inside), batch_size=16)

    val_dataloader = train_dataloader


def main(devices: int = 2, strategy: str = "zero3") -> float:
    """Train, and return the loss of the averaged weights."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[
            BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01),
            EMAWeightAveraging(decay=0.9),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier())
    loss = trainer.callback_metrics["loss of the average"].item()
    if trainer.is_global_zero:
        print(f"{strategy}: loss of the averaged weights {loss:.4f}")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="zero3")
    main(**vars(parser.parse_args()))
