"""Step times of this checkout beside those of another one, in turns, on two CPU processes.

    git worktree add ../before COMMIT
    python benchmarks/beside.py ../before [--rounds 3] [--runs tiny:plain:40 tiny:acc4:24 ...]

A run is a model, a case (see `train.py`) and a number of steps. Printed are the ratios of the
medians of all steps to those of the other checkout, of each round, and of the least; and whether
every loss is the same, bit by bit.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from entries import Job
from rich.progress import track
from train import HERE, launch

RUNS = ["tiny:plain:40", "tiny:acc4:24", "tiny:frozen:30", "small:plain:8", "medium:plain:5"]


def package(checkout, folder):
    """A folder from which the package of a checkout is imported, as it is installed."""
    inside = Path(folder) / "lightning_zero3"
    inside.mkdir(parents=True)
    for file in (checkout / "strategies" / "lightning_zero3").glob("*.py"):
        (inside / file.name).write_text(file.read_text())
    for name in ("strategies", "callbacks"):
        (inside / name).symlink_to(checkout / name)
    return str(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", nargs="+", default=RUNS)
    options = parser.parse_args()
    here, before = HERE.parent, options.before.resolve()
    commits = [
        subprocess.check_output(
            ["git", "-C", path, "rev-parse", "--short", "HEAD"], text=True
        ).strip()
        for path in (here, before)
    ]
    with tempfile.TemporaryDirectory() as folder:
        columns = {  # entry, where its package is
            "now": ("L:zero3", package(here, f"{folder}/now")),
            "before": ("L:zero3", package(before, f"{folder}/before")),
            "fsdp2": ("L:fsdp2", f"{folder}/now"),
            "ddp": ("L:ddp", f"{folder}/now"),
        }
        print(
            f"{commits[0]} over {commits[1]}, FSDP2 and ddp: medians, by round, least of all steps"
        )
        for run in options.runs:
            size, case, steps = run.split(":")
            found = {name: [] for name in columns}
            turns = [name for _ in range(options.rounds) for name in columns]
            for name in track(turns, description=run):
                entry, os.environ["PYTHONPATH"] = columns[name]
                job = Job(entry, size, case, int(steps), "time", time.time(), "cpu")
                ranks = launch(job, 2)
                if isinstance(ranks, str):
                    raise SystemExit(f"{run}, {name}: {ranks}")
                found[name].append(ranks[0])
            print(row(run, found))


def row(run, found):
    """One line of ratios."""
    cells, mine = [], found["now"]
    for name in list(found)[1:]:
        theirs = found[name]
        rounds = sorted(
            statistics.median(a["wall"]) / statistics.median(b["wall"])
            for a, b in zip(mine, theirs, strict=True)
        )
        middle, least = (
            pick(t for each in mine for t in each["wall"])
            / pick(t for each in theirs for t in each["wall"])
            for pick in (statistics.median, min)
        )
        cells.append(f"{name} {middle:.2f} ({rounds[0]:.2f}-{rounds[-1]:.2f}) {least:.2f}")
    same = mine[0]["losses"] == found["before"][0]["losses"]
    return f"{run:16} {'  '.join(cells)}  losses {'the same' if same else 'DIFFER'}"


if __name__ == "__main__":
    main()
