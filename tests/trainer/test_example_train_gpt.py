"""The example trains, sharded over two processes, and a resumed run goes on where the first
ended.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.ranks import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
RANKS = 2


def command(folder: Path, *options: str) -> list[str]:
    """The example's smoke configuration, which writes the figures behind its table to a file."""
    smoke = [
        "--smoke",
        "--devices",
        str(RANKS),
        "--output",
        str(folder),
        "--json",
        str(folder / "result.json"),
    ]
    return [str(EXAMPLE), *smoke, *options]


def run_as_a_user(folder: Path, *options: str) -> dict:
    run = subprocess.run(
        [sys.executable, *command(folder, *options)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    # how many epochs there could be says nothing
    assert "Epoch 0 " in run.stdout and "Epoch 0/" not in run.stdout
    return json.loads((folder / "result.json").read_text())


def main(rank, world_size, folder, *options):
    sys.argv = command(folder, *options)
    spec = importlib.util.spec_from_file_location("train_gpt_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    example.main()


def run_on_ranks(folder: Path, *options: str) -> dict:
    """The same without the start of new interpreters."""
    (folder / "result.json").unlink(missing_ok=True)
    run_ranks(main, RANKS, folder, *options, timeout=150)
    return json.loads((folder / "result.json").read_text())


def test_it_learns_holds_half_the_state_and_resumes(tmp_path):
    first = run_as_a_user(tmp_path, "--steps", "60")
    assert (first["first_step"], first["last_step"], first["ranks"]) == (0, 60, RANKS)
    # It starts from the token frequencies, so anything below their figure was learned.
    assert first["last_loss"] < first["first_loss"] - 0.3
    assert first["bits_per_byte"]["model"] < first["bits_per_byte"]["unigram_tokens"] - 0.1
    # 16 bytes per parameter over the ranks. The tiny model's padding weighs more than a real one's.
    assert 1.0 <= first["state_bytes_per_rank"] / first["state_bytes_formula"] < 1.02
    assert len(first["sample"]) > 100

    resumed = run_on_ranks(tmp_path, "--steps", "90", "--resume")
    assert (resumed["first_step"], resumed["last_step"]) == (60, 90)
    # A run that lost the weights would start again from the frequencies.
    assert resumed["first_loss"] < first["first_loss"] - 0.3
    assert resumed["bits_per_byte"]["model"] < first["bits_per_byte"]["model"]


def test_it_stops_by_time(tmp_path):
    result = run_on_ranks(tmp_path, "--minutes", "0.03")
    assert result["last_step"] > 0
    assert result["seconds"] < 120
