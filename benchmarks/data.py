"""Throughput of the sharded loaders, beside what they replace, in one run.

    python benchmarks/data.py   # minutes on two cores; prints a table for results/data.md

Every pair takes turns, pass by pass, so that both see the same machine. Two ratios are given. One
is of time on the clock: the median over pairs of passes, and in brackets the range of the middle
half of them. The other is of CPU time of the process that reads, fastest pass to fastest pass;
without workers it does all the work, and on a machine that is busy with other things this is the
one to trust.

- By batch: this rank's share of a `DataLoader`, against the same `DataLoader` with the
  `DistributedSampler` that Lightning puts in. Above 1 is slower than that. Samples of 64 floats are
  the worst case: they cost next to nothing themselves.
- Dispatch: rank 0 reads for two ranks, against Accelerate's `DataLoaderDispatcher`.
- Per-sample seeds: what seeding python, numpy and torch adds to each sample.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from about import in_a_line
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_zero3.strategies.data import DataOptions, shard_dataloader

WORLD, BATCH = 2, 32
# shape, batches in a pass
SAMPLES = {
    "64 floats": ((64,), 200),
    "3 x 64 x 64 floats": ((3, 64, 64), 50),
}
Seconds = tuple[float, float]  # on the clock, of CPU time


class Tensors(Dataset):
    """Sample i is row i % 256 of one tensor."""

    def __init__(self, size: int, shape: tuple[int, ...]) -> None:
        self.size, self.rows = size, torch.randn(256, *shape)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % 256].clone()


class TensorStream(IterableDataset):
    """The same as a stream."""

    def __init__(self, size: int, shape: tuple[int, ...]) -> None:
        self.tensors = Tensors(size, shape)

    def __iter__(self) -> Iterable[torch.Tensor]:
        return (self.tensors[index] for index in range(len(self.tensors)))


def seconds_of(loader: Iterable[torch.Tensor]) -> Seconds:
    """One pass, from the first batch to the end: starting workers is not what is compared."""
    batches = iter(loader)
    next(batches)
    start = time.perf_counter(), time.process_time()
    for _ in batches:
        pass
    return time.perf_counter() - start[0], time.process_time() - start[1]


def take_turns(ours: Iterable, theirs: Iterable, pairs: int) -> list[tuple[Seconds, Seconds]]:
    """Seconds of both in each pair of passes, each first in every other one."""
    found = []
    for pair in range(pairs + 1):
        if pair % 2:
            theirs_s, ours_s = seconds_of(theirs), seconds_of(ours)
        else:
            ours_s, theirs_s = seconds_of(ours), seconds_of(theirs)
        found.append((ours_s, theirs_s))
    return found[1:]  # the first pair warms up


def row(name: str, found: list[tuple[Seconds, Seconds]], batches: int) -> str:
    """A row of the table."""
    cells = [
        f"{statistics.median(pair[who][0] for pair in found) / batches * 1e6:.0f}" for who in (0, 1)
    ]
    ratios = sorted(ours[0] / theirs[0] for ours, theirs in found)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    cells.append(f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    fastest = [min(pair[who][1] for pair in found) for who in (0, 1)]
    cells.append(f"{fastest[0] / fastest[1]:.3f}")
    return f"| {' | '.join([name, *cells])} |"


def shard(
    loader: DataLoader, rank: int, sharding: str = "batch", per_sample_seed: bool = False
) -> Iterable:
    """Ours, as the strategy makes it."""
    options = DataOptions(sharding=sharding, seed=1, per_sample_seed=per_sample_seed)  # type: ignore[arg-type]
    return shard_dataloader(loader, rank=rank, world_size=WORLD, stage="fit", options=options)


def by_batch(pairs: int) -> list[str]:
    """Rows for both kinds of samples, without workers and with two."""
    lines = []
    for name, (shape, batches) in SAMPLES.items():
        for workers in (0, 2):
            dataset = Tensors(BATCH * batches * WORLD, shape)
            kwargs = {
                "batch_size": BATCH,
                "num_workers": workers,
                "persistent_workers": workers > 0,
            }
            kwargs["multiprocessing_context"] = "forkserver" if workers else None
            ours = shard(DataLoader(dataset, shuffle=True, **kwargs), 0)
            theirs = DataLoader(
                dataset, sampler=DistributedSampler(dataset, WORLD, 0, shuffle=True), **kwargs
            )
            found = take_turns(ours, theirs, pairs)
            lines.append(
                row(
                    f"by batch, {name}, {workers} workers, against DistributedSampler",
                    found,
                    batches - 1,
                )
            )
    return lines


def per_sample_seeds(pairs: int) -> str:
    """Microseconds that seeding adds to a sample."""
    shape, batches = SAMPLES["64 floats"]
    dataset = Tensors(BATCH * batches * WORLD, shape)
    make = lambda seeded: shard(DataLoader(dataset, batch_size=BATCH), 0, per_sample_seed=seeded)  # noqa: E731
    found = take_turns(make(True), make(False), pairs)
    added = (
        statistics.median(seeded[1] - plain[1] for seeded, plain in found)
        / (BATCH * (batches - 1))
        * 1e6
    )
    return f"Per-sample seeds add {added:.1f} us of CPU time to a sample."


def dispatch(rank: int, folder: str, pairs: int) -> None:
    """On both ranks: a stream that rank 0 reads; rank 0 writes the rows."""
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import PartialState

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD
    )
    PartialState(cpu=True)
    lines = []
    for name, (shape, batches) in SAMPLES.items():
        stream = TensorStream(BATCH * batches * WORLD, shape)
        ours = shard(DataLoader(stream, batch_size=BATCH), rank, "dispatch")
        theirs = prepare_data_loader(
            DataLoader(stream, batch_size=BATCH), dispatch_batches=True, put_on_device=True
        )
        found = take_turns(ours, theirs, pairs)
        lines.append(row(f"dispatch, {name}, against Accelerate's dispatcher", found, batches - 1))
    if rank == 0:
        Path(folder, "rows").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of passes")
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    print(f"{in_a_line()}.\n")
    print(
        "| | ours, us a batch | theirs | ratio of time | fastest CPU time |\n|---|---|---|---|---|"
    )
    print("\n".join(by_batch(pairs)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(dispatch, (folder, pairs), nprocs=WORLD, start_method="spawn")
        print(Path(folder, "rows").read_text())
    print(f"\n{per_sample_seeds(pairs)}")


if __name__ == "__main__":
    main()
