"""The example of checkpoints runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoints.py"


def test_it_goes_on_with_one_process_and_ends_in_one_file(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "last.ckpt: complete\n" in done.stdout
    # 8 + 8 steps on two processes, 16 + 16 on one
    assert "epoch 3, step 48\n" in done.stdout
    found = re.search(r"epoch 3, error of the model: (\d.\d+)", done.stdout)
    assert found is not None and float(found[1]) < 1
