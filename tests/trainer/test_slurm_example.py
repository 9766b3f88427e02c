"""examples/slurm.sbatch, with an `srun` that starts processes on this machine with the variables of
SLURM's.
"""

import os
import subprocess
import sys
from pathlib import Path

from helpers.ranks import free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/slurm.sbatch"

SRUN = """#!/bin/bash
export SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2
status=0
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids[$rank]=$!; done
for pid in "${pids[@]}"; do wait $pid || status=$?; done
exit $status
"""


def test_the_job_script_shows_all_ranks_and_runs_the_command(tmp_path):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    port = free_port()
    dropped = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    environ = {name: value for name, value in os.environ.items() if name not in dropped}
    environ["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "2", "MASTER_PORT": str(port)}
    command = ["bash", EXAMPLE, "touch", tmp_path / "trained"]
    done = subprocess.run(
        command, env={**environ, **job}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (
        "number of ranks: 2" in done.stdout
        and "SLURM_PROCID=1" in done.stdout
        and "differs" not in done.stdout
    )
    assert (tmp_path / "trained").exists()
