"""Train sharded over two processes, export, and serve from a script that knows torch alone.

    python examples/export.py

Before the first step the model is traced without its weights, so one that cannot be exported is an
error at once. At the end both processes write their shards into the program's file. A command makes
the same file of the checkpoint.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  (registers "zero3_spawn")
from lightning_zero3.__main__ import main as zero3
from lightning_zero3.callbacks import ModelExport

SERVE = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
x = torch.tensor([[1.0] * 8, [2.0] * 8, [3.0] * 8])
print("served:", [round(y, 1) for y in program(x).flatten().tolist()], "for 8, 16, 24")
assert not any(name.startswith("lightning") for name in sys.modules)
"""


class Regression(LightningModule):
    """Learns the sum of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        self.example_input_array = torch.zeros(2, 8)  # [samples, features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self(x), y)

    def train_dataloader(self) -> DataLoader:
        x = 3 * torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train, export, serve; then export again, of the checkpoint."""
    seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="zero3_spawn",
            max_epochs=10,
            callbacks=[
                ModelCheckpoint(folder, "best"),
                # batches of any size
                ModelExport(every="end", dynamic_shapes={"x": {0: "batch"}}, verify=True),
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regression())
        program, again = Path(folder, "model.pt2"), Path(folder, "again.pt2")
        subprocess.run([sys.executable, "-c", SERVE, str(program)], check=True)
        zero3(["export", str(Path(folder, "best.ckpt")), str(again)])
        same = program.read_bytes() == again.read_bytes()
        print(f"made of the checkpoint: {'the same file' if same else 'another file'}")


if __name__ == "__main__":
    sys.exit(main())
