"""Ray Train makes the processes and their group, and its environment says which is which."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from checkpoints.runs import full_weights
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks

SCRIPT = """
import sys
import lightning.pytorch as pl, ray, torch
import lightning_zero3
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchConfig, TorchTrainer

def train(config):
    sys.path.insert(0, config["tests"])
    from trainer.test_ray import Counts
    runner = pl.Trainer(
        devices="auto", accelerator="cpu", strategy="zero3", plugins=[RayLightningEnvironment()],
        max_epochs=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )
    runner.fit(Counts())
    world = runner.strategy.world
    assert (runner.world_size, world.local_world_size, world.num_nodes) == (2, 2, 1)
    runner.save_checkpoint(config["folder"] + "/end.ckpt")

if __name__ == "__main__":
    tests, folder = sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"tests": tests, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder),
    ).fit()
"""


class Counts(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return DataLoader(
            torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=4
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(rank, world_size):
    runner = trainer(
        zero3(unit_policy=None), world_size, max_epochs=2, use_distributed_sampler=True
    )
    runner.fit(Counts())
    return full_weights(runner)


def test_two_workers_train_as_two_processes(tmp_path):
    pytest.importorskip("ray", reason="pip install 'ray[train]'")
    Path(tmp_path, "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(Path(__file__).parents[1]), str(tmp_path)]
    environ = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    assert_same_tensors(found, run_ranks(train, 2, timeout=60)[0])
