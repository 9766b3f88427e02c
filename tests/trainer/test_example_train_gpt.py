"""The example trains, sharded over two processes, and a resumed run goes on where the first ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
RANKS = 2


def run_example(folder: Path, *options: str) -> dict:
    """Run the example's smoke configuration and return the figures behind its table."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, str(EXAMPLE), "--smoke", "--devices", str(RANKS), "--output", str(folder)]
    run = subprocess.run(
        [*command, "--json", str(result), *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return json.loads(result.read_text())


def test_it_learns_holds_half_the_state_and_resumes(tmp_path):
    first = run_example(tmp_path, "--strategy", "zero3", "--steps", "60")
    assert (first["first_step"], first["last_step"], first["ranks"]) == (0, 60, RANKS)
    # It starts from the token frequencies, so anything below their figure was learned.
    assert first["last_loss"] < first["first_loss"] - 0.3
    assert first["bits_per_byte"]["model"] < first["bits_per_byte"]["unigram_tokens"] - 0.1
    # 16 bytes per parameter over the ranks. The tiny model's padding weighs more than a real one's.
    assert 1.0 <= first["state_bytes_per_rank"] / first["state_bytes_formula"] < 1.02
    assert len(first["sample"]) > 100

    resumed = run_example(tmp_path, "--strategy", "zero3", "--steps", "90", "--resume")
    assert (resumed["first_step"], resumed["last_step"]) == (60, 90)
    # A run that lost the weights would start again from the frequencies.
    assert resumed["first_loss"] < first["first_loss"] - 0.3
    assert resumed["bits_per_byte"]["model"] < first["bits_per_byte"]["model"]


def test_it_stops_by_time(tmp_path):
    result = run_example(tmp_path, "--strategy", "zero3", "--minutes", "0.03")
    assert result["last_step"] > 0
    assert result["seconds"] < 120
