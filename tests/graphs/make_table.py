"""Train each case eagerly and as graphs, compare everything, and write what came out to
docs/CUDA_GRAPHS.md.

    PYTHONPATH=tests python tests/graphs/make_table.py

It trains on the CPU, with the software graph. Each case is a fit of `helpers.recorded.Net`
(dropout, batch norm, a frozen and an unused layer, a metric, logged values of all kinds), of which
a callback writes down what Lightning promises.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from helpers.ranks import run_ranks
from helpers.recorded import Counting, Net, Run, assert_same, fit, half
from lightning_zero3 import Zero3Strategy

TABLE = Path(__file__).resolve().parents[2] / "docs" / "CUDA_GRAPHS.md"


# Options of the model, options of the Trainer. Dropout is in all of them.
CASES = {
    "accumulation 1": ({}, {}),
    "accumulation 4": ({}, {"accumulate_grad_batches": 4}),
    "clipping by norm": ({}, {"gradient_clip_val": 0.1}),
    "clipping by value": ({}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "dropout in activation checkpoints": ({"checkpointed": True}, {}),
    "ragged last batch": ({"batch_size": 5}, {"accumulate_grad_batches": 2, "max_epochs": 12}),
    "validation in the middle": ({}, {"val_check_interval": 3}),
    "resume in the middle of an epoch": ({}, {"max_epochs": 8, "ckpt_path": "step=7.ckpt"}),
    "scheduler, momentum": ({"optimizer": "sgd", "scheduled": True}, {}),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}),
    "16-mixed": ({}, {"plugins": half}),
}
STRATEGIES = {
    "one device": (1, lambda: "auto"),
    "zero3, one rank": (1, Zero3Strategy),
    "zero3, two ranks": (2, partial(Zero3Strategy, unit_policy=[nn.Linear])),
    "ddp, two ranks": (2, lambda: "ddp"),
}
COLUMNS = {
    "weights and optimizer": ["optimizer"],
    "gradients": [
        "gradients before zero_grad",
        "gradients after backward",
        "gradients before the step",
    ],
    "losses, outputs": ["batch", "loss before backward", "outputs"],
    "logged values": ["logged", "progress bar", "validation", "epoch", "rate"],
    "counters": ["counters", "global step"],
    "random state": ["random state", "random state of the device"],
}


def same(mine, reference):
    try:
        assert_same(mine, reference)
    except AssertionError as error:
        return f"differ: {error}"
    return "equal"


def compare(mine: Run, reference: Run) -> list[str]:
    """One word for each column, and for the calls of hooks."""
    found = []
    for column, names in COLUMNS.items():
        pair = [[value for name, value in run.seen if name in names] for run in (mine, reference)]
        if column.startswith("weights"):
            pair = [
                [*values, run.state] for values, run in zip(pair, (mine, reference), strict=True)
            ]
        assert all(pair), column
        found.append(same(*pair))
    return [*found, same(dict(mine.calls), dict(reference.calls))]


def make(strategy, **arguments):
    net = Net(**arguments)
    if strategy() == "ddp":  # which allows no layer that is trained and unused
        net.unused.requires_grad_(False)
    return net


def row(case, strategy, devices, folder):
    """What came out of one case, and how many micro-batches were replayed."""
    arguments, options = CASES[case]
    net = partial(make, strategy, **arguments)
    epochs = 12 if strategy() == "ddp" else 4  # whose micro-batches are of several shapes
    options = {"strategy": strategy, "devices": devices, "max_epochs": epochs, **options}
    if "ckpt_path" in options:
        save = ModelCheckpoint(folder, every_n_train_steps=7, save_top_k=-1, filename="{step}")
        fit(
            net(),
            save,
            **{**options, "ckpt_path": None, "max_epochs": 2},
            enable_checkpointing=True,
        )
        options["ckpt_path"] = f"{folder}/{options['ckpt_path']}"
    callback = Counting(software=True, strict=True)
    runs = [fit(net(), *extra, **options) for extra in ([], [callback])]
    counts = f"{callback.replays} of {callback.steps}", f"{callback.verified}"
    return [*compare(runs[1], runs[0]), *counts]


def rows(rank, world_size, setup, folder):
    devices, strategy = STRATEGIES[setup]
    return {case: row(case, strategy, devices, f"{folder}/{k}") for k, case in enumerate(CASES)}


def line(case, cells):
    return f"| {case} | " + " | ".join(cells) + " |"


def table(found):
    titles = [*COLUMNS, "hook calls", "replayed", "verified"]
    lines = ["| | " + " | ".join(titles) + " |", "|-" * (len(titles) + 1) + "|"]
    return "\n".join(lines + [line(case, cells) for case, cells in found.items()])


def main():
    parts = [
        "# Captured runs beside eager ones",
        (
            "Written by `tests/graphs/make_table.py`: each case is trained twice from the same"
            " seed, eagerly and with `CUDAGraphStep`, and all that a callback sees of both runs is"
            " compared bit by bit (`nan` is `nan`, `0.0` is `-0.0`). Of the micro-batches, the first"
            " three of each shape are watched, the next is captured and replayed, the next three run"
            " eagerly beside a replay that must be the same, and so does the first of a shape in"
            " each epoch; all others are replayed. So a shape that comes once an epoch, as that of a"
            " ragged last batch, is never replayed (`zero3`'s loader on two ranks fills that batch"
            " from the head of the epoch). Hook calls are all that Lightning makes, of the module, the"
            " callbacks and the strategy. With the software graph on the CPU, Python"
            f" {sys.version.split()[0]}, torch {torch.__version__}; `pytest -m gpu tests/graphs`"
            " makes the lines of one rank again on a GPU, where the random state of the device"
            " counts, too."
        ),
    ]
    for setup, (devices, _) in STRATEGIES.items():
        with tempfile.TemporaryDirectory() as folder:
            everyone = run_ranks(rows, devices, setup, folder, timeout=1500)
        assert all(found == everyone[0] for found in everyone), everyone
        parts += [f"## {setup[0].upper()}{setup[1:]}", table(everyone[0])]
    TABLE.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    from graphs import make_table  # ranks import it by name

    make_table.main()
