"""Time and memory of saving and loading: zero3 against Lightning's FSDP2 and `ddp`, in one run.

    python benchmarks/checkpoints.py               # 100 million parameters, 2 processes
    python benchmarks/checkpoints.py --width 128   # a small model, to try it

All train the same model for one step, then save and load; each does so once in each turn. A figure
is the median over turns and rounds, of the slowest process; the least and the most stand behind it.
Memory is what the process's own pages grew by at most, looked at every two milliseconds (pages of a
file that is mapped are the system's cache, and not counted).
Bytes that were written are synced to disk, but by `ddp` and FSDP2's full file; zero3 also computes
and compares checksums.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from about import in_a_line
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import lightning_zero3

NAMES = ["zero3", "zero3 sharded", "zero3 background", "fsdp2 sharded", "fsdp2 full", "ddp"]


class Model(pl.LightningModule):
    """Blocks of two linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(
            torch.randn(8, self.blocks[0][0].in_features), batch_size=2
        )


def strategy_of(name: str, world_size: int) -> pl.strategies.Strategy:
    if name == "ddp":
        return pl.strategies.DDPStrategy()
    if name.startswith("fsdp2"):
        return ModelParallelStrategy(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=name == "fsdp2 sharded",
        )
    options = lightning_zero3.CheckpointOptions(
        kind="sharded" if name == "zero3 sharded" else "file",
        background=name == "zero3 background",
    )
    return lightning_zero3.Zero3Strategy(checkpoint=options)


def anonymous_mib() -> float:
    """Pages of this process that belong to no file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and MiB that the peak grew by, of the slowest and largest process."""
    before, peak, over = anonymous_mib(), [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], anonymous_mib())

    thread = threading.Thread(target=look)
    thread.start()
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    over.set()
    thread.join()
    took = torch.tensor([seconds, max(peak[0], anonymous_mib()) - before])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took[0].item(), took[1].item()


class Saves(pl.Callback):
    """Saves in the middle of training, as a run does."""

    def __init__(self, path: str, rounds: int) -> None:
        self.path, self.rounds, self.found = path, rounds, []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 1:
            for number in range(self.rounds):
                self.found.append(
                    measure(lambda k=number: trainer.save_checkpoint(f"{self.path}/{k}.ckpt"))
                )
                getattr(trainer.strategy, "finish_saving", lambda: None)()
            trainer.should_stop = True


def run(rank: int, name: str, args: argparse.Namespace, folder: str, results: mp.Queue) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(args.devices),
        LOCAL_WORLD_SIZE=str(args.devices),
    )
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(args.port),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="benchmark",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    saves = Saves(folder, args.rounds)

    def trainer(steps: int, *callbacks: pl.Callback) -> pl.Trainer:
        strategy = strategy_of(name, args.devices)
        return pl.Trainer(
            accelerator="cpu",
            devices=args.devices,
            strategy=strategy,
            max_steps=steps,
            callbacks=list(callbacks),
            **quiet,
        )

    torch.manual_seed(0)
    trainer(1, saves).fit(Model(args.width, args.depth))
    loads = []
    for number in range(args.rounds):
        torch.manual_seed(0)
        module, runner = Model(args.width, args.depth), trainer(1)
        connector, took = runner._checkpoint_connector, []
        for step in ("_restore_modules_and_callbacks", "restore_training_state"):
            timed(connector, step, took)
        if name.startswith("zero3"):
            timed(runner.strategy, "_load_weights", took)
        runner.fit(module, ckpt_path=f"{folder}/{number}.ckpt")
        loads.append((sum(s for s, _ in took), max(m for _, m in took)))
    if rank == 0:
        results.put((saves.found, loads))
    dist.barrier()
    os._exit(0)  # the groups that `ddp` and FSDP2 leave may abort at the interpreter's end


def timed(owner: object, method: str, took: list[tuple[float, float]]) -> None:
    """Measure what a part of loading takes."""
    original = getattr(owner, method)
    setattr(owner, method, lambda *a, **k: took.append(measure(lambda: original(*a, **k))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="saves and loads of a turn")
    parser.add_argument("--port", type=int, default=29611)
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    args = parser.parse_args()
    parameters = args.depth * (8 * args.width**2 + 5 * args.width)
    share = parameters * 12 / args.devices / 2**20
    print(in_a_line())
    print(
        f"{parameters:,} parameters, {args.devices} processes; weights and Adam state of one:"
        f" {share:,.0f} MiB"
    )
    found: dict[str, list[list[tuple[float, float]]]] = {name: [[], []] for name in args.names}
    sizes = {}
    for number, name in enumerate(args.names * args.turns):
        print(f"turn {number // len(args.names) + 1}: {name}", file=sys.stderr, flush=True)
        folder = tempfile.mkdtemp(dir=os.getcwd())
        try:
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(run, (name, args, folder, results), nprocs=args.devices)
            for rows, measured in zip(found[name], results.get(), strict=True):
                rows += measured
            saved = Path(folder, "0.ckpt")
            files = saved.iterdir() if saved.is_dir() else [saved]
            sizes[name] = sum(file.stat().st_blocks * 512 for file in files) / 2**20
        finally:
            shutil.rmtree(folder)
    print(f"{'':18}{'save s':>19}{'load s':>19}{'save MiB':>10}{'load MiB':>10}{'on disk MiB':>13}")
    for name, kinds in found.items():
        seconds = [sorted(row[0] for row in rows) for rows in kinds]
        times = "".join(f"{statistics.median(s):9.2f} {s[0]:4.2f}-{s[-1]:4.2f}" for s in seconds)
        memory = "".join(f"{statistics.median(row[1] for row in rows):10.0f}" for rows in kinds)
        print(f"{name:18}{times}{memory}{sizes[name]:13.0f}")


if __name__ == "__main__":
    main()
