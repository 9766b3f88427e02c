"""What a step asks of the host and of the wire, counted, zero3's engine beside FSDP2: one rank of
two, of torch's `fake` group.

    python benchmarks/calls.py

Python calls that a block adds to a step (`sys.setprofile`; the difference of models of 48 and of 8
blocks, less that of a loop without any strategy; by default all these blocks are one unit of zero3,
because they are small: hence the entry with a unit for each block), collectives of the GPT of 9
million parameters, and the elements that a rank receives in them, over the 3 (N - 1) / N of its
parameters that ZeRO-3 has to. Counts are exact, and the same in each run.
"""

import json
import subprocess
import sys
from collections import Counter

import torch
import torch.distributed as dist
from about import in_a_line
from entries import SIZES, Job, batches, build, optimizer_of
from fake_ranks import WARMUP, step_of
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from train import HERE

KINDS, RANKS = ("single", "zero3", "zero3, a unit each", "fsdp2"), 2


class Wire(TorchDispatchMode):
    """Counts collectives by name, and bytes that this rank receives in them."""

    def __init__(self):
        super().__init__()
        self.calls, self.nbytes = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.calls[name] += 1
            tensors = (
                [args[1]]
                if "reduce_scatter" in name
                else args[0]
                if isinstance(args[0], list)
                else [args[0]]
            )
            share = RANKS if name.startswith("allreduce") else 1  # there and back
            self.nbytes += share * sum(t.nbytes for t in tensors) * (RANKS - 1) // RANKS
        return func(*args, **(kwargs or {}))


def single(job):
    """A step of a loop without any strategy."""
    model = build(job)
    optimizer, tokens = optimizer_of(model), batches(job, 0)[0]

    def step():
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(kind, size):
    """Print what this process counted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    job = Job("", size, "plain", 1, "time", 0.0, "cpu")
    step = single(job) if kind == "single" else step_of(kind, job)
    for _ in range(WARMUP):
        step()
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    with Wire() as wire:
        step()
    print(json.dumps({"python": calls, "collectives": wire.calls, "nbytes": wire.nbytes}))


def counted(kind, size):
    """What a fresh process counts."""
    program = f"import calls; calls.run({kind!r}, {size!r})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind}, {size}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    few, many = "thin8", "thin48"
    blocks = SIZES[many][1] - SIZES[few][1]
    per_block = {
        kind: (counted(kind, many)["python"] - counted(kind, few)["python"]) / blocks
        for kind in KINDS
    }
    parameters = sum(
        p.numel() for p in build(Job("", "tiny", "plain", 1, "time", 0.0, "cpu")).parameters()
    )
    least = 3 * 4 * parameters * (RANKS - 1) / RANKS  # bytes, in fp32
    table = Table(title=f"one rank of {RANKS}, torch {torch.__version__}")
    for name in (
        "entry",
        "Python calls that a block adds",
        "collectives of a step",
        "received over 3 (N - 1) / N",
    ):
        table.add_column(name, justify="left" if name == "entry" else "right")
    for kind in KINDS[1:]:
        found = counted(kind, "tiny")
        collectives = ", ".join(
            f"{count} {name.strip('_')}" for name, count in found["collectives"].items()
        )
        table.add_row(
            kind,
            f"{per_block[kind] - per_block['single']:.0f}",
            collectives,
            f"{found['nbytes'] / least:.3f}",
        )
    title = in_a_line()
    with (HERE / "results" / "calls.txt").open("w") as file:
        for console in (Console(width=140), Console(file=file, width=140)):
            console.print(title)
            console.print(table)


if __name__ == "__main__":
    main()
