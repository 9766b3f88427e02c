"""Where the time goes from the start of the processes to the end of the first step: zero3 beside
`ddp` and FSDP2, in turns.

    python benchmarks/start.py   # a few minutes on two cores; writes results/start.txt

*Imports* are Python's, torch's and Lightning's, the same for all. *Set-up* is what the strategy
does until the first batch: its own imports, the process group, the model and its shards. The *first
step* is training's. Medians, and the ratio to `ddp`'s.
"""

import argparse
import statistics
import time

from about import in_a_line
from entries import SIZES, Job
from rich.console import Console
from rich.progress import track
from rich.table import Table
from train import HERE, launch

ENTRIES = ["L:ddp", "L:fsdp2", "L:zero3"]
PHASES = ["imports", "set-up", "first step", "in all"]


def phases(entry, size, case):
    """Seconds of each phase on rank 0."""
    ranks = launch(Job(entry, size, case, 1, "time", time.time(), "cpu"), 2)
    if isinstance(ranks, str):
        raise SystemExit(f"{entry}: {ranks}")
    imported, ready, first = (ranks[0][key] for key in ("imported", "ready", "first"))
    return imported, ready - imported, first - ready, first


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument(
        "--cases", nargs="+", choices=["plain", "acc4", "frozen"], default=["plain", "frozen"]
    )
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    title, tables = in_a_line(), []
    for size, case in [(size, case) for size in options.sizes for case in options.cases]:
        found = {entry: [] for entry in ENTRIES}
        for _ in track(range(options.rounds), description=f"{size} {case}"):
            for entry, rounds in found.items():
                rounds.append(phases(entry, size, case))
        table = Table(
            title=f"{size}, {case}: seconds (over ddp's), {options.rounds} starts",
            title_justify="left",
        )
        for name in ["entry", *PHASES]:
            table.add_column(name, justify="left" if name == "entry" else "right")
        medians = {
            entry: [statistics.median(column) for column in zip(*rounds, strict=True)]
            for entry, rounds in found.items()
        }
        for entry, row in medians.items():
            table.add_row(
                entry,
                *(
                    f"{s:.2f} ({s / base:.2f})"
                    for s, base in zip(row, medians[ENTRIES[0]], strict=True)
                ),
            )
        tables.append(table)
    with (HERE / "results" / "start.txt").open("w") as file:
        for console in (Console(), Console(file=file, width=120)):
            console.print(title, *tables, sep="\n")


if __name__ == "__main__":
    main()
