"""What one rank of many costs by itself, zero3's engine beside FSDP2: torch's `fake` process group
exchanges nothing.

    python benchmarks/fake_ranks.py                        # 8 and 64 ranks on the CPU
    python benchmarks/fake_ranks.py --device cuda          # on one GPU

Memory is exact (on the CPU by heap.c, on a GPU by the caching allocator); the time of a step is the
host's, until all is issued. A gather there is one copy of the shard to the place of each rank (of
which the time of a step with many ranks is largely made, for both), so losses mean nothing.
Interleaved rounds, each in fresh processes.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from about import in_a_line
from entries import SIZES, Job, batches, build, mapped, optimizer_of, shard_by_fsdp2
from rich.console import Console
from rich.table import Table
from train import HERE, build_counter

KINDS = ("zero3", "fsdp2")
WARMUP, STEPS = 3, 8


def step_of(kind, job):
    """A function that runs one step."""
    model = build(job).to(job.device)
    optimizer, device = optimizer_of(model), torch.device(job.device)
    tokens = batches(job, 0)[0].to(device)
    if kind == "fsdp2":
        shard_by_fsdp2(model, dist.init_device_mesh(job.device, (dist.get_world_size(),)))
        optimizer = optimizer_of(model)

        def forward_and_backward():
            model(tokens).backward()

    else:
        from lightning_zero3.strategies.communicators import make_collectives
        from lightning_zero3.strategies.engine import Zero3Engine

        engine = Zero3Engine(
            model,
            [optimizer],
            device=device,
            collectives=make_collectives(dist.group.WORLD, device),
            unit_policy=["Block"] if kind == "zero3, a unit each" else None,
        )

        def forward_and_backward():
            with engine.step():
                loss = model(tokens)
            with engine.backward():
                loss.backward()

    def step():
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(kind, size, ranks, device):
    """Print what this process measured."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    counter = ctypes.CDLL(None)
    preloaded = hasattr(counter, "heap_peak")
    if preloaded:
        counter.heap_in_use.restype = counter.heap_peak.restype = ctypes.c_long
        base = counter.heap_in_use()
    step = step_of(kind, Job("", size, "plain", 1, "time", 0.0, device))
    times = []
    for number in range(WARMUP + STEPS):
        if number == WARMUP and preloaded:
            counter.heap_peak()
        if device == "cuda":
            torch.cuda.synchronize()
            if number == WARMUP:
                torch.cuda.empty_cache()  # of the whole model, in set-up
                torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    shared = sum(int(high, 16) - int(low, 16) for low, high in mapped(0))
    found = {"host_ms": 1e3 * statistics.median(times[WARMUP:])}
    if device == "cuda":
        found |= {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
    elif preloaded:
        found |= {"peak": counter.heap_peak() - base + shared}
    print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(folder) if options.device == "cpu" else None
        for _ in range(options.rounds):
            for ranks in options.ranks:
                for kind in KINDS:
                    program = (
                        f"import fake_ranks; fake_ranks.run({kind!r}, {options.size!r}, {ranks},"
                        f" {options.device!r})"
                    )
                    environ = {"LD_PRELOAD": str(counter)} if counter else {}
                    done = subprocess.run(
                        [
                            "env",
                            *(f"{k}={v}" for k, v in environ.items()),
                            sys.executable,
                            "-W",
                            "ignore",
                            "-c",
                            program,
                        ],
                        cwd=HERE,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    if done.returncode:
                        raise SystemExit(f"{kind} with {ranks} ranks: {done.stderr}")
                    results.setdefault((ranks, kind), []).append(
                        json.loads(done.stdout.splitlines()[-1])
                    )
    table = Table(
        title=f"{options.size} GPT, one rank of many on {options.device}, torch {torch.__version__}"
    )
    for name in ("ranks", "entry", "host ms", "lowest to highest", "peak MB", "reserved MB"):
        table.add_column(name, justify="right")
    for (ranks, kind), runs in results.items():
        times = sorted(run["host_ms"] for run in runs)
        peak, reserved = (
            max(run.get(key, 0) for run in runs) / 1e6 for key in ("peak", "reserved")
        )
        spread = f"{times[0]:.1f} to {times[-1]:.1f}"
        table.add_row(
            str(ranks),
            kind,
            f"{statistics.median(times):.1f}",
            spread,
            f"{peak:.1f}",
            f"{reserved:.1f}",
        )
    stem = HERE / "results" / f"fake-ranks-{options.device}-{options.size}"
    title = in_a_line()
    with stem.with_suffix(".txt").open("w") as file:
        for console in (Console(), Console(file=file, width=120)):
            console.print(title)
            console.print(table)


if __name__ == "__main__":
    main()
