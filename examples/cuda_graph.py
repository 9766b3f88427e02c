"""Train with the step as a CUDA graph, and check that nothing else changed.

    python examples/cuda_graph.py                    # on a GPU; without one, a software graph
    python examples/cuda_graph.py --strategy zero3
    python examples/cuda_graph.py --refused          # why a step cannot be captured, and where
    python examples/cuda_graph.py --modules          # such a step, with its layers captured
    python examples/cuda_graph.py --optimizer        # the optimizer's update in a second graph

The same model is trained twice, eagerly and captured. Weights and everything that was logged must
be equal, bit by bit.
"""

import argparse
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  registers the strategy "zero3"
from lightning_zero3.callbacks import CUDAGraphStep

SAMPLES, WIDTH, BATCH = 400, 64, 32


class Deep(LightningModule):
    """Many small layers, which keep Python busier than the GPU."""

    def __init__(self, refused: bool = False) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(8)
        ]
        self.model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
        self.refused = refused

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        if self.refused and loss.item() > 1000:
            print("That is a large loss.")
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        data = TensorDataset(x, x.sin().sum(1, keepdim=True))
        # the last batch is smaller
        return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A graph keeps Python numbers: the learning rate is a tensor, and `capturable` and `fused`
        # keep the rest in tensors.
        rate = torch.tensor(0.003, device=self.device)
        return torch.optim.AdamW(
            self.parameters(), lr=rate, fused=True, capturable=self.device.type == "cuda"
        )


def fit(
    callback: CUDAGraphStep | None,
    strategy: str = "auto",
    epochs: int = 3,
    refused: bool = False,
    accelerator: str = "auto",
) -> tuple[Deep, dict[str, Tensor]]:
    """Train; returns the module and what was logged."""
    torch.manual_seed(7)
    module = Deep(refused)
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[callback] if callback else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(8)  # of dropout
    start = time.perf_counter()
    trainer.fit(module)
    what = (
        "eager"
        if callback is None
        else "captured"
        if torch.cuda.is_available()
        else "captured, in slow software"
    )
    print(f"{what}: {time.perf_counter() - start:.2f} s")
    return module, dict(trainer.callback_metrics)


def compare(
    strategy: str = "auto",
    epochs: int = 3,
    refused: bool = False,
    accelerator: str = "auto",
    **options: Any,
) -> None:
    """Assert that the captured run is the eager run; that nothing could be captured is an error
    where it was not the aim.
    """
    strict = not refused or "modules" in options
    callbacks = None, CUDAGraphStep(software=True, strict=strict, **options)
    runs = [fit(callback, strategy, epochs, refused, accelerator) for callback in callbacks]
    (eager, eager_logged), (captured, logged) = runs
    for (name, mine), reference in zip(
        captured.state_dict().items(), eager.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, reference), f"{name} differs"
    assert logged.keys() == eager_logged.keys() and all(
        torch.equal(logged[k], eager_logged[k]) for k in logged
    )
    print(f"the same weights and the same {len(logged)} logged values, bit by bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("--modules", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    arguments = parser.parse_args()
    if arguments.modules:
        compare(arguments.strategy, arguments.epochs, refused=True, modules=["model"])
    else:
        compare(
            arguments.strategy, arguments.epochs, arguments.refused, optimizer=arguments.optimizer
        )
