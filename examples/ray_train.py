"""Ray Train starts the workers. One is killed; Ray starts them again, and they go on from the last
checkpoint.

    pip install "ray[train]"
    python examples/ray_train.py

In the first attempt rank 1 kills itself in step 12. The other worker says which rank died and
where, and ends too. With `num_workers=(1, 2)` Ray goes on with the workers that it still has room
for, and with two again when a host comes: nothing else changes here, but for the loader's batch
size, which is each worker's (divide by `self.trainer.world_size` to keep that of a step).
"""

import os
import signal
from pathlib import Path

import ray
import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero3.ray import RayReport, RayZero3Strategy, latest_checkpoint


class Regression(LightningModule):
    """Learns y = 3x."""

    def __init__(self, killed: Path) -> None:
        super().__init__()
        self.killed = killed  # is there from the second attempt on
        self.model = torch.nn.Sequential(
            torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and self.global_step == 12 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (x,) = batch
        loss = torch.nn.functional.mse_loss(self.model(x), 3 * x)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        x = torch.linspace(-1, 1, 400).unsqueeze(1)  # [400, 1]
        return DataLoader(TensorDataset(x), batch_size=10, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(config: dict[str, str]) -> None:
    """What each worker does."""
    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayZero3Strategy(),
        max_epochs=1,
        callbacks=[RayReport(every_n_train_steps=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prepare_trainer(trainer)
    checkpoint = latest_checkpoint()  # None in the first attempt
    print(f"a worker begins with {checkpoint and Path(checkpoint).parent.name}", flush=True)
    trainer.fit(Regression(Path(config["killed"])), ckpt_path=checkpoint)


if __name__ == "__main__":
    folder = Path("ray-checkpoints").resolve()  # with several hosts: one that all of them see
    folder.mkdir()
    ray.init(address="local", num_cpus=2, include_dashboard=False)  # on a cluster: ray.init()
    result = TorchTrainer(
        train,
        train_loop_config={"killed": str(folder / "killed")},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=str(folder),
            name="run",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    kept = sorted(path.name for path in (folder / "run").glob("checkpoint_0*"))
    print(f"ended at step {result.metrics['step']}; checkpoints: {', '.join(kept)}")
