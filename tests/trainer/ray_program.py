"""A program for Ray Train: python ray_program.py FOLDER NAME.

NAME is "whole" (two workers), "killed" (one of them dies in step 5 and Ray starts both again), or
"elastic" (a host is lost in step 5, and one comes in step 9).
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

SAMPLES, BATCH, EPOCHS = 48, 8, 2  # a batch of all workers together


class Counts(pl.LightningModule):
    """Says which samples each step has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )
        self.said = []  # (step, samples, loss)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[:, 1:]).square().mean()
        self.said.append((self.global_step, batch[:, 0].int().tolist(), loss.item()))
        return loss

    def train_dataloader(self):
        x = torch.randn(SAMPLES, 9, generator=torch.Generator().manual_seed(1))
        x[:, 0] = torch.arange(SAMPLES)
        sizes = {"batch_size": BATCH // self.trainer.world_size}
        generator = torch.Generator().manual_seed(3)
        return DataLoader(x, shuffle=True, generator=generator, **sizes)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Trouble(pl.Callback):
    def __init__(self, folder, name):
        self.folder, self.name = Path(folder), name

    def on_train_start(self, trainer, module):
        self.attempt = trainer.strategy.broadcast(time.time())

    def on_train_batch_end(self, trainer, module, *rest):
        place = {"attempt": self.attempt, "ranks": trainer.world_size, "rank": trainer.global_rank}
        step, samples, loss = module.said[-1]
        line = json.dumps({**place, "step": step, "samples": samples, "loss": loss})
        with open(self.folder / f"said.{os.getpid()}", "a") as file:
            file.write(line + "\n")

    def on_train_batch_start(self, trainer, module, *rest):
        step, is_first = trainer.global_step, not (self.folder / "trouble").exists()
        if self.name == "killed" and step == 5 and is_first and trainer.global_rank == 1:
            (self.folder / "trouble").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "elastic" and trainer.world_size == 2 and step == 5 and is_first:
            (self.folder / "trouble").touch()
            time.sleep(100)  # until the host is gone
        if self.name == "elastic" and trainer.world_size == 1 and step == 9:
            (self.folder / "grow").touch()
            time.sleep(100)  # until Ray ends this worker, to go on with two


def train(config):
    from ray.train.lightning import prepare_trainer

    from lightning_zero3.ray import RayReport, RayZero3Strategy, latest_checkpoint

    runner = pl.Trainer(
        **{"devices": "auto", "accelerator": "cpu", "max_epochs": EPOCHS},
        strategy=RayZero3Strategy(watch={"lost": 20}),
        callbacks=[RayReport(every_n_train_steps=2), Trouble(config["folder"], config["name"])],
        **{"logger": False, "enable_progress_bar": False, "enable_checkpointing": False},
    )
    prepare_trainer(runner).fit(module := Counts(), ckpt_path=latest_checkpoint())
    torch.save(module.state_dict(), f"{config['folder']}/end.{runner.global_rank}")


def main(folder, name):
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(folder)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    hosts = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address)
    workers = {"num_workers": (1, 2), "elastic_resize_monitor_interval_s": 2.0}
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "name": name},
        scaling_config=ScalingConfig(**(workers if name == "elastic" else {"num_workers": 2})),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            storage_path=str(folder),
            name="run",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    results = []
    # A host can be added in the main thread alone.
    fit = threading.Thread(target=lambda: results.append(trainer.fit()), daemon=True)
    fit.start()
    if name == "elastic":
        wait_for(folder / "trouble", fit)
        cluster.remove_node(hosts[1], allow_graceful=False)
        wait_for(folder / "grow", fit)
        cluster.add_node(num_cpus=1)
    fit.join()
    checkpoints = [Path(c.path).name for c, _ in results[0].best_checkpoints]
    (folder / "result").write_text(json.dumps([results[0].metrics, checkpoints]))
    ray.shutdown()
    cluster.shutdown()


def wait_for(file, fit):
    while not file.exists():
        assert fit.is_alive()
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
