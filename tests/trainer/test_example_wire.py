"""The example of what travels: its figures against arithmetic."""

import importlib.util
from pathlib import Path

import pytest
import torch

from helpers.ranks import run_ranks

FILE = Path(__file__).parents[2] / "examples" / "wire.py"


def load():
    spec = importlib.util.spec_from_file_location("wire_example", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def run_example(rank, world):
    return load().main(world)


def test_what_options_send_and_keep():
    with torch.device("meta"):
        model = load().Regression()
    whole = sum(4 * p.numel() for p in model.parameters())
    for found in run_ranks(run_example, 2, timeout=100):
        plain = found["fp32"]
        sent = {name: row["gradients"] for name, row in found.items()}
        # half of each gradient, for each of 4 micro-batches
        assert sent["fp32"] == 4 * whole / 2
        assert sent["reduce once"] == whole / 2
        assert sent["reduce in bf16"] == 4 * whole / 4
        assert sent["both"] == whole / 4
        assert len({row["weights"] for row in found.values()}) == 1
        for name, row in found.items():
            # values, gradients, two of AdamW
            assert row["state"] == pytest.approx(4 * whole / 2, rel=1e-3), name
            assert (row["buffer"] > plain["buffer"] + whole / 2) == (
                name in ("reduce once", "both")
            ), name
            assert row["loss"] == pytest.approx(plain["loss"], rel=1e-3), name
            assert row["loss"] != plain["loss"] or name in ("fp32", "reduce once"), (
                "nothing was rounded"
            )
