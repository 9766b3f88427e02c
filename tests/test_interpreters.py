"""The two commands set themselves up with the versions of Python that README.md tells, and no
other.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ROOT / ".ci" / "environment").read_text().partition("\nif ! z3_ready")[0]


def python(path, minor):
    """An interpreter that takes itself for version 3.``minor``."""
    run = f"import sys, venv, ensurepip; sys.version_info = (3, {minor}, 0); exec(sys.argv[1])"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$2"\n')
    path.chmod(0o755)


def test_interpreters_of_other_versions_are_passed_over(tmp_path):
    told = re.search(r"need only Python 3\.(\d+) to 3\.(\d+)", (ROOT / "README.md").read_text())
    versions = range(int(told[1]), int(told[2]) + 1)
    for minor in range(8, versions[-1] + 4):
        python(tmp_path / "python3", minor)
        command = ["bash", "-c", FUNCTIONS + "\nPATH=$0; z3_find_python", str(tmp_path)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.stdout.strip() == (str(tmp_path / "python3") if minor in versions else "")
        assert minor in versions or f"Python 3.{versions[0]} to 3.{versions[-1]} " in found.stderr
