"""Training speed and memory of zero3 beside its peers, on the same work in the same run.

    python benchmarks/train.py cpu                          # two gloo ranks, all sizes and cases
    python benchmarks/train.py cpu --sizes tiny --rounds 3  # a part of it
    python benchmarks/train.py gpu                          # one GPU, NCCL with one rank

Rounds are interleaved: each runs every entry once, in fresh processes. Times are compared as ratios
inside this run; losses are compared too, so that nothing fast is wrong. On CPUs `B:single` is what
no exchange at all would cost: every rank trains by itself, on its own batches. Results go to
benchmarks/results as JSON, a table and a plot.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from about import about
from entries import GPT, SIZES, Job
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

HERE = Path(__file__).parent
ENTRIES = {
    "cpu": [
        "L:ddp",
        "L:fsdp2",
        "L:zero3",
        "L:zero3_sockets",
        "B:ddp",
        "B:fsdp2",
        "B:single",
        "L:fsdp",
        "L:deepspeed3",
    ],
    "gpu": [
        "L:single",
        "L:ddp",
        "L:fsdp",
        "L:fsdp2",
        "L:deepspeed3",
        "L:zero3",
        "B:single",
        "B:ddp",
        "B:fsdp2",
    ],
}
REFERENCE = {"cpu": "L:ddp", "gpu": "L:single"}
PEER, MINE = "L:fsdp2", "L:zero3"
# by default neighbours as small as the thin models' blocks are one unit
BY_BLOCK = "L:zero3+unit_policy=Block"
BY_RANKS, WORLD_SIZES = ["L:ddp", "L:fsdp2", "L:zero3"], (1, 2, 4)
CASES = {size: ["plain", "frozen", "acc4"] for size in ("tiny", "small", "medium")}
CASES |= {"thin8": ["plain"], "thin48": ["plain"]}
TARGETS = {  # of times: over the reference, over FSDP2, in case "plain" alone
    "cpu": ({"plain": 1.05, "acc4": 1.10, "frozen": 1.25}, 0.70),
    "gpu": ({"plain": 1.02, "acc4": 1.02, "frozen": 1.02}, 1.0),
}
SAME = 1e-5  # relative difference of losses above which an entry has trained another model


def launch(job, world_size, counter=None, limit_s=600):
    """Results of all ranks, or the text of the first error; with the ``counter`` of the heap
    preloaded.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    shared |= {
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    shared |= {"LD_PRELOAD": str(counter)} if counter else {}
    shared |= {"PYTHONDONTWRITEBYTECODE": ""}  # the peers were compiled when they were installed
    # Lightning takes the processes for torchrun's
    shared |= {
        "TORCHELASTIC_RUN_ID": "benchmark",
        "GROUP_RANK": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "entries.py"), json.dumps(asdict(job)), folder]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(world_size)
        ]
        try:
            said = [rank.communicate(timeout=limit_s)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"not finished after {limit_s} s"
        finally:
            for rank in ranks:
                rank.kill()
        files = sorted(Path(folder).glob("*.json"))
        if len(files) == world_size:
            return [json.loads(file.read_text()) for file in files]
    lines = [
        line
        for text in said
        for line in text.splitlines()
        if re.match(r"[\w.]*(Error|Exception): ", line)
    ]
    return lines[0] if lines else f"exit codes {[rank.returncode for rank in ranks]}"


def build_counter(folder):
    """heap.c as a library; None where there is no C compiler (the tables then say "-")."""
    library = Path(folder) / "heap.so"
    done = subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "heap.c"], check=False
    )
    return library if done.returncode == 0 else None


def entries_of(kind, size):
    """All that is measured of one size."""
    return ENTRIES[kind] + [BY_BLOCK] * (size.startswith("thin") and MINE in ENTRIES[kind])


def measure(kind, sizes, cases, rounds, steps, world_size, counter):
    """{size: {case: {entry: {...}}}}, after each round."""
    results = {}
    chosen = [(size, case) for size in sizes for case in CASES[size] if not cases or case in cases]
    with Progress() as progress:
        bar = progress.add_task(
            "", total=sum(len(entries_of(kind, size)) for size, _ in chosen) * (rounds + 1)
        )
        for size, case in chosen:
            found = results.setdefault(size, {}).setdefault(
                case, {entry: {"runs": []} for entry in entries_of(kind, size)}
            )
            for number in range(rounds + 1):  # the last counts memory
                for entry, record in found.items():
                    progress.update(bar, advance=1, description=f"{size} {case} {entry}")
                    if "error" in record:
                        continue
                    memory = number == rounds
                    if memory and counter is None:
                        continue
                    device = "cuda" if kind == "gpu" else "cpu"
                    job = Job(
                        entry,
                        size,
                        case,
                        2 if memory else steps,
                        "heap" if memory else "time",
                        time.time(),
                        device,
                    )
                    ranks = launch(job, world_size, counter if memory else None)
                    if isinstance(ranks, str):
                        record["error"] = ranks
                    elif memory:
                        record["live"], record["peak"] = (
                            max(rank[key] for rank in ranks) for key in ("live", "peak")
                        )
                    else:
                        record["runs"].append(ranks)
                yield results


def memory_against_ranks(counter):
    """{entry: {world size: (bytes live after a step, most bytes within it)}} of the tiny model, the
    heaviest rank's.
    """
    found = {}
    for entry in track(BY_RANKS, description="memory against ranks"):
        for world_size in WORLD_SIZES:
            ranks = launch(
                Job(entry, "tiny", "plain", 2, "heap", time.time(), "cpu"), world_size, counter
            )
            if not isinstance(ranks, str):
                found.setdefault(entry, {})[world_size] = tuple(
                    max(rank[key] for rank in ranks) for key in ("live", "peak")
                )
    return found


def summarize(records, reference):
    """One row for each entry: medians over all steps of all rounds, ratios to the reference's."""

    def times(entry, key, pick=statistics.median):
        return pick(t for run in records[entry]["runs"] for t in run[0][key])

    rows = {}
    losses = {e: [r["losses"] for r in rec["runs"][0]] for e, rec in records.items() if rec["runs"]}
    for entry, record in records.items():
        if "error" in record or not record["runs"]:
            rows[entry] = {"error": record.get("error", "not run")}
            continue
        ratios = by_round(record, records[reference])
        rows[entry] = {
            "step_ms": 1e3 * times(entry, "wall"),
            "ratio": statistics.median(ratios),
            "ratio_range": [ratios[0], ratios[-1]],
            "best_ratio": times(entry, "wall", min) / times(reference, "wall", min),
            "cpu_ratio": times(entry, "cpu") / times(reference, "cpu"),
            "over_fsdp2": (
                statistics.median(by_round(record, records[PEER]))
                if records.get(PEER, {}).get("runs")
                else None
            ),
            "first_step_s": statistics.median(run[0]["first"] for run in record["runs"]),
            "wire_mb": statistics.median(run[0]["wire"] for run in record["runs"]) / 1e6,
            "live_mb": record.get("live", 0) / 1e6,
            "peak_mb": (
                max(
                    record.get("peak", 0),
                    *(r.get("allocated", 0) for run in record["runs"] for r in run),
                )
                / 1e6
            ),
            "reserved_mb": max(r.get("reserved", 0) for run in record["runs"] for r in run) / 1e6,
            "loss_difference": (
                None
                if trains_alone(entry, record)
                else difference(losses[entry], losses[reference])
            ),
        }
    return rows


def by_round(record, beside):
    """Ratios of the median step times of each round, sorted."""
    mine, theirs = (
        [statistics.median(run[0]["wall"]) for run in each["runs"]] for each in (record, beside)
    )
    return sorted(a / b for a, b in zip(mine, theirs, strict=False))


def trains_alone(entry, record):
    """Ranks that exchange nothing train models of their own."""
    return entry == "B:single" and len(record["runs"][0]) > 1


def difference(mine, theirs):
    """Largest relative difference of two entries' losses, over ranks and micro-batches."""
    pairs = [
        (a, b)
        for mine_, theirs_ in zip(mine, theirs, strict=True)
        for a, b in zip(mine_, theirs_, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def show(size, case, rows, reference):
    """The table of one case."""
    table = Table(
        title=f"{size}, {case}: against {reference} in the same run", title_justify="left"
    )
    names = [
        "entry",
        "step ms",
        "ratio",
        "lowest to highest",
        "best",
        "CPU",
        "over FSDP2",
        "first step s",
        "loopback MB",
    ]
    for name in [*names, "live MB", "peak MB", "reserved MB", "loss difference"]:
        table.add_column(name, justify="left" if name == "entry" else "right", no_wrap=True)
    table.caption = "\n".join(
        f"{entry}: {row['error'][:150]}" for entry, row in rows.items() if "error" in row
    )
    table.caption_justify = "left"
    for entry, row in rows.items():
        if "error" in row:
            continue
        low, high = row["ratio_range"]
        table.add_row(
            entry,
            f"{row['step_ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row['best_ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['over_fsdp2']:.2f}" if row["over_fsdp2"] else "-",
            f"{row['first_step_s']:.1f}",
            f"{row['wire_mb']:.1f}",
            f"{row['live_mb']:.1f}" if row["live_mb"] else "-",
            f"{row['peak_mb']:.1f}" if row["peak_mb"] else "-",
            f"{row['reserved_mb']:.1f}" if row["reserved_mb"] else "-",
            "-" if row["loss_difference"] is None else f"{row['loss_difference']:.1e}",
        )
    return table


def against_targets(summary, added, kind):
    """What zero3 is meant to reach, and what was found: [case, measure, found, target] each."""
    found = []
    over_reference, over_peer = TARGETS[kind]
    reference = REFERENCE[kind]
    for size, cases in summary.items():
        for case, rows in cases.items():
            mine, peer, base = (rows.get(entry, {}) for entry in (MINE, PEER, reference))
            if size.startswith("thin") or not all("step_ms" in row for row in (mine, peer, base)):
                continue
            name = f"{size} {case}"
            found.append(
                (name, "largest relative difference of losses", mine["loss_difference"], SAME)
            )
            found.append(
                (name, f"step time over {reference}'s", mine["ratio"], over_reference[case])
            )
            if case == "plain":
                found.append((name, "step time over FSDP2's", mine["over_fsdp2"], over_peer))
            if peer["peak_mb"]:
                found.append((name, "peak over FSDP2's", mine["peak_mb"] / peer["peak_mb"], 1.0))
            first = mine["first_step_s"] / base["first_step_s"]
            found.append((name, f"time to the first step over {reference}'s", first, 1.05))
    if BY_BLOCK in added and PEER in added:
        found.append(
            ("thin", "time that a unit adds, over FSDP2's", added[BY_BLOCK] / added[PEER], 0.35)
        )
    return found


def against_contract(summary, world_size):
    """What zero3 keeps between steps, over what it should: [case, measure, found, target] each.

    16 bytes for each element of its shards, the slots of two neighbouring units, the fp32 gradients
    of one unit, and what training alone keeps beside 12 bytes for each element (its gradients are
    cleared).
    """
    found = []
    for size, cases in summary.items():
        rows = cases.get("plain", {})
        mine, alone = (rows.get(entry, {}).get("live_mb") for entry in (MINE, "B:single"))
        if mine and alone and not size.startswith("thin"):
            with torch.device("meta"):
                model = GPT(*SIZES[size])
            units = [model.embed, *model.blocks, model.norm, model.head]
            numels = [sum(p.numel() for p in unit.parameters()) for unit in units]
            slots = (
                max(a + b for a, b in zip(numels, numels[1:], strict=False))
                if world_size > 1
                else 0
            )
            reduced = max(numels) if world_size > 1 else 0
            other = alone - 12e-6 * sum(numels)
            wanted = 16e-6 * sum(numels) / world_size + 4e-6 * (slots + reduced) + other
            found.append(
                (f"{size} plain", "live between steps over the contract", mine / wanted, 1.05)
            )
    return found


def show_targets(found):
    """The table of them."""
    table = Table(title="targets of zero3", title_justify="left")
    for name in ("case", "measure", "found", "at most", ""):
        table.add_column(name, justify="left" if name in ("case", "measure") else "right")
    for case, measure, value, target in found:
        figures = (
            f"{number:.3f}" if number > SAME else f"{number:.0e}" for number in (value, target)
        )
        table.add_row(case, measure, *figures, "" if value <= target else "missed")
    return table


def show_by_ranks(by_ranks):
    """The table of memory against the number of ranks."""
    table = Table(
        title="tiny, plain: MB live after a step / most within it, by ranks", title_justify="left"
    )
    for name in ["entry", *map(str, WORLD_SIZES)]:
        table.add_column(name, justify="left" if name == "entry" else "right")
    for entry, sizes in by_ranks.items():
        cells = [sizes.get(world_size) for world_size in WORLD_SIZES]
        table.add_row(entry, *(f"{c[0] / 1e6:.1f} / {c[1] / 1e6:.1f}" if c else "-" for c in cells))
    return table


def per_unit(summary):
    """Milliseconds that each block of width 16 adds, from 8 and 48 blocks; what communication and
    hooks cost by themselves.

    `L:zero3` has all of these blocks in one unit, `BY_BLOCK` each in its own, as FSDP2 does.
    """
    if not {"thin8", "thin48"} <= summary.keys():
        return {}
    few, many = summary["thin8"]["plain"], summary["thin48"]["plain"]
    return {
        e: (many[e]["step_ms"] - few[e]["step_ms"]) / 40
        for e in many
        if "step_ms" in many[e] and "step_ms" in few[e]
    }


def plot(summary, added, by_ranks, path):
    """Step time, memory, and the time that a block adds, as bars; memory against the number of
    ranks, as lines.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (f"{s} {c}", r)
        for s, cases in summary.items()
        if not s.startswith("thin")
        for c, r in cases.items()
    ]
    columns = len(panels) + bool(added or by_ranks)
    if not columns:
        return
    figure, axes = pyplot.subplots(2, columns, figsize=(4 * columns, 6), squeeze=False)
    for column, (title, rows) in enumerate(panels):
        shown = {entry: row for entry, row in rows.items() if "ratio" in row}
        axes[0][column].barh(list(shown), [row["ratio"] for row in shown.values()])
        axes[0][column].axvline(1.0, color="black", linewidth=0.8)
        axes[0][column].set_title(f"{title}: step time, ratio")
        axes[1][column].barh(
            list(shown), [row["peak_mb"] for row in shown.values()], color="lightgray", label="peak"
        )
        axes[1][column].barh(
            list(shown), [row["live_mb"] for row in shown.values()], label="live between steps"
        )
        axes[1][column].set_title(f"{title}: memory of a rank, MB")
        axes[1][column].legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    if added:
        axes[0][-1].barh(list(added), list(added.values()))
        axes[0][-1].set_title("ms a block of width 16 adds")
    if added or by_ranks:
        axes[0][-1].set_visible(bool(added))
        axes[1][-1].set_visible(bool(by_ranks))
    # two may lie on each other
    for (entry, sizes), style in zip(by_ranks.items(), ("-", "-", ":"), strict=False):
        axes[1][-1].plot(
            list(sizes), [peak / 1e6 for _, peak in sizes.values()], style, marker="o", label=entry
        )
    if by_ranks:
        axes[1][-1].set(title="tiny plain: peak MB, by ranks", xticks=WORLD_SIZES)
        axes[1][-1].set_ylim(bottom=0)
        axes[1][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def write(setting, results, by_ranks, kind, stem):
    """What was measured until now, as ``stem``.json, .txt and .png."""
    reference = REFERENCE[kind]
    stem.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        s: {c: summarize(records, reference) for c, records in cases.items()}
        for s, cases in results.items()
    }
    added = per_unit(summary)
    raw = {
        s: {c: {e: r["runs"] for e, r in rec.items()} for c, rec in cases.items()}
        for s, cases in results.items()
    }
    stem.with_suffix(".json").write_text(
        json.dumps(
            {
                **setting,
                "summary": summary,
                "added_ms_per_block": added,
                "by_ranks": by_ranks,
                "runs": raw,
            }
        )
    )
    with stem.with_suffix(".txt").open("w") as file:
        console = Console(file=file, width=180)
        console.print(json.dumps(setting, indent=1))
        for size, cases in summary.items():
            for case, rows in cases.items():
                console.print(show(size, case, rows, reference))
        if added:
            console.print(
                "ms that a block of width 16 adds:", {e: round(ms, 3) for e, ms in added.items()}
            )
        if by_ranks:
            console.print(show_by_ranks(by_ranks))
        found = against_targets(summary, added, kind) + against_contract(summary, setting["ranks"])
        console.print(show_targets(found))
    plot(summary, added, by_ranks, stem.with_suffix(".png"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=ENTRIES)
    parser.add_argument("--sizes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cases", nargs="+", choices=["plain", "acc4", "frozen"], default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=5, help="measured in each run, after three of warm-up"
    )
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--entries", nargs="+", default=None)
    parser.add_argument(
        "--reference",
        default=None,
        help="the entry that ratios are to; ddp on CPUs, one device on a GPU",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.entries:
        ENTRIES[options.kind] = options.entries
    REFERENCE[options.kind] = options.reference or REFERENCE[options.kind]
    world_size = options.ranks or (2 if options.kind == "cpu" else 1)
    setting = {
        **about(),
        "ranks": world_size,
        "rounds": options.rounds,
    }
    part = [] if options.sizes == list(CASES) else [*options.sizes]
    part += [*(options.cases or []), *([f"{world_size}-ranks"] if options.ranks else [])]
    stem = options.out / "-".join(["train", options.kind, *part])
    with tempfile.TemporaryDirectory() as folder:
        counter = build_counter(folder) if options.kind == "cpu" else None
        by_ranks = memory_against_ranks(counter) if counter and "tiny" in options.sizes else {}
        for results in measure(
            options.kind,
            options.sizes,
            options.cases,
            options.rounds,
            options.steps,
            world_size,
            counter,
        ):
            done = {
                len(record["runs"])
                for cases in results.values()
                for found in cases.values()
                for record in found.values()
            }
            # A run that is cut short leaves the rounds before.
            write({**setting, "rounds": max(done)}, results, by_ranks, options.kind, stem)
    print(stem.with_suffix(".txt").read_text())


if __name__ == "__main__":
    main()
