"""Where the time of a step goes: operators of zero3 beside its peers, by torch.profiler, each in
fresh processes.

    python benchmarks/operators.py tiny          # a size of train.py
    python benchmarks/operators.py tiny --entries L:zero3 L:ddp B:single --case acc4

Milliseconds of rank 0 in a step, without the time of operators inside. `B:single` is a loop without
exchanges. What is in no operator is Python and waiting. The profiler slows steps down; train.py has
their times.
"""

import argparse
import statistics
import time

from about import in_a_line
from entries import SIZES, Job
from rich.console import Console
from rich.table import Table
from train import launch


def measure(entries, size, case, steps, device, ranks):
    """{entry: {row of the table: milliseconds}}."""
    found = {}
    for entry in entries:
        results = launch(Job(entry, size, case, steps, "operators", time.time(), device), ranks)
        if isinstance(results, str):
            raise SystemExit(f"{entry}: {results}")
        rank = results[0]
        rows = {name: milliseconds for name, (_, milliseconds) in rank["operators"].items()}
        wall, cpu = (1e3 * statistics.mean(rank[key]) for key in ("wall", "cpu"))
        found[entry] = {
            "step": wall,
            "processor": cpu,
            "in no operator": wall - sum(rows.values()),
            **rows,
        }
    return found


def show(found, size, case, longest=25):
    table = Table(title=f"{size}, {case}: ms in a step", title_justify="left")
    table.add_column("operator")
    for entry in found:
        table.add_column(entry, justify="right")
    names = dict.fromkeys(name for rows in found.values() for name in rows)
    by_size = sorted(names, key=lambda name: -max(rows.get(name, 0) for rows in found.values()))
    for name in by_size[:longest]:
        table.add_row(name, *(f"{rows.get(name, 0):.2f}" for rows in found.values()))
    Console(width=150).print(in_a_line(), table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--case", choices=["plain", "acc4", "frozen"], default="plain")
    parser.add_argument("--entries", nargs="+", default=["B:single", "L:ddp", "L:fsdp2", "L:zero3"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    ranks = 2 if options.device == "cpu" else 1
    show(
        measure(options.entries, options.size, options.case, options.steps, options.device, ranks),
        options.size,
        options.case,
    )


if __name__ == "__main__":
    main()
