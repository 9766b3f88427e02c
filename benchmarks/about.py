"""Where and with what a benchmark ran."""

import os
import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import lightning
import torch

HERE = Path(__file__).parent


def about():
    """Date, commit, machine, versions and command of this run."""
    # what a run before this one wrote
    changed = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine = [cpu[1] if cpu else platform.machine(), f"{os.cpu_count()} cores"]
    machine += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return {
        "date": date.today().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else ""),
        "machine": ", ".join(machine),
        "load_before": os.getloadavg()[0],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def _git(*arguments):
    return subprocess.run(
        ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False
    ).stdout.strip()


def in_a_line():
    """The same, to stand above a table."""
    found = about()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['date']}, commit {found['commit']}: `{found['command']}` on {found['machine']},"
        f" {versions}"
    )
