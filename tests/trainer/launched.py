"""What every row of the table of launchers starts: it trains, and says who it was.

python launched.py FOLDER STRATEGY DEVICES NODES [HOW]
"""

import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import lightning_zero3


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(x, ranks, rank, shuffle=False)
        return DataLoader(x, batch_size=8 // ranks, sampler=sampler)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(folder, strategy, devices, nodes, plugin=None):
    if strategy == "zero3":
        strategy = lightning_zero3.Zero3Strategy(start_timeout=20)
    runner = pl.Trainer(
        **{"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "strategy": strategy},
        **{"max_epochs": 2, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        **{"use_distributed_sampler": False, "plugins": plugin and [plugin]},
    )
    runner.fit(module := Model())
    runner.save_checkpoint(Path(folder, "end.ckpt"))
    world = getattr(runner.strategy, "world", None)
    said = {
        "rank": runner.global_rank,
        "ranks": runner.world_size,
        "losses": module.losses,
        "launcher": world and world.launcher,
        "why": world and world.because("rank"),
    }
    Path(folder, f"said.{os.getpid()}").write_text(json.dumps(said))


def in_a_group(rank, folder, *arguments):
    """What `torch.multiprocessing.spawn` by hand calls."""
    dist.init_process_group(
        "gloo", rank=rank, world_size=2
    )  # MASTER_ADDR and MASTER_PORT say where
    fit(folder, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def main(folder, strategy, devices, nodes, how=""):
    arguments = (strategy, int(devices), int(nodes))
    if how == "by hand":
        torch.multiprocessing.spawn(in_a_group, (folder, *arguments), nprocs=2)
        return
    if how == "twice":
        fit(folder, *arguments)  # as a study does
    elif how == "changed folder":
        os.chdir("/")
    elif how == "changed argv":
        sys.argv[1:] = []
    plugin = None
    if how.endswith("Environment"):
        from lightning.fabric.plugins import environments

        plugin = getattr(environments, how)()
    fit(folder, *arguments, plugin)


if __name__ == "__main__":
    main(*sys.argv[1:])
