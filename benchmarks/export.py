"""What exporting a model takes: time, and memory beside the shards.

    python benchmarks/export.py              # 1.07 GB of weights in fp32, on two processes
    python benchmarks/export.py --width 256  # a small model, to try it

A sharded model is exported by ModelExport, and as one would without it: `full_state_dict()` on rank
0 into a copy of the model, then `torch.export.export` and `save`. Then the command makes the file
of a checkpoint, in a process of its own. Memory is what each process's own pages grew by at most
(pages of a file that is mapped are the system's cache, and not counted). Modules are imported and a
small model is traced before.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from about import in_a_line
from torch import nn

import lightning_zero3
from checkpoints import measure
from lightning_zero3.__main__ import main as zero3
from lightning_zero3.callbacks import ModelExport


class Model(pl.LightningModule):
    """Blocks of two linear layers; a unit is a block."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.example_input_array = torch.randn(2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.example_input_array, batch_size=1)


class Measured(ModelExport):
    """Notes what the two parts of an export took."""

    took: dict[str, tuple[float, float]]

    def prepare(self, trainer: pl.Trainer) -> None:
        work = super().prepare
        self.took = {"ModelExport, before the first step": measure(lambda: work(trainer))}

    def export(self, trainer: pl.Trainer) -> None:
        work = super().export
        self.took["ModelExport, at the end"] = measure(lambda: work(trainer))


def gather(trainer: pl.Trainer, width: int, depth: int, file: Path) -> None:
    """Export on rank 0 alone; collective."""
    state = trainer.strategy.full_state_dict()
    if trainer.is_global_zero:
        with torch.device("meta"):
            model = Model(width, depth)
        model.load_state_dict(state, assign=True)
        program = torch.export.export(model.eval(), (torch.randn(2, width),))
        torch.export.save(program, file)
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    dist.barrier()


def run(rank: int, args: argparse.Namespace, folder: str, results: mp.SimpleQueue) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(args.devices),
        LOCAL_WORLD_SIZE=str(args.devices),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(args.port),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="benchmark",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    export_alone(nn.Linear(2, 2), torch.randn(1, 2))
    export = Measured(every="end", dirpath=folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=lightning_zero3.Zero3Strategy(unit_policy=["Sequential"]),
        max_steps=1,
        callbacks=[export],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Model(args.width, args.depth))
    trainer.save_checkpoint(f"{folder}/it.ckpt", weights_only=True)
    file = Path(folder, "gathered.pt2")
    work = measure(lambda: gather(trainer, args.width, args.depth, file))
    export.took["gathered on rank 0"] = work
    if rank == 0:
        results.put(export.took)


def export_alone(module: nn.Module, x: torch.Tensor) -> None:
    """Import what an export imports."""
    with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
        torch.export.save(torch.export.export(module, (x,)), file.name)


def command(_: int, args: argparse.Namespace, folder: str, results: mp.SimpleQueue) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{args.port}", rank=0, world_size=1)
    names = [f"{folder}/it.ckpt", f"{folder}/again.pt2"]
    skeleton = f"{folder}/model.pt2.skeleton"
    zero3(["export", *names, "--skeleton", skeleton])
    results.put(measure(lambda: zero3(["export", *names, "--skeleton", skeleton])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--port", type=int, default=29631)
    args = parser.parse_args()
    unit = 4 * (8 * args.width**2 + 5 * args.width)
    print(in_a_line())
    print(
        f"{args.devices} processes; {args.depth * unit / 1e6:,.0f} MB of weights, in units of"
        f" {unit / 1e6:,.0f} MB; load {os.getloadavg()[0]:.1f}"
    )
    folder = tempfile.mkdtemp(dir=os.getcwd())
    try:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run, (args, folder, results), nprocs=args.devices)
        took = results.get()
        mp.spawn(command, (args, folder, results))
        took["the command, of a checkpoint"] = results.get()
        print(f"{'':36}{'s':>7}{'MB':>8}")
        for name, (seconds, mib) in took.items():
            print(f"{name:36}{seconds:7.2f}{mib * 2**20 / 1e6:8.0f}")
        written = [Path(folder, name).read_bytes() for name in ("model.pt2", "again.pt2")]
        print(f"the command's file is {'the same' if written[0] == written[1] else 'ANOTHER'}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
