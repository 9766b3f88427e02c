"""The two commands set themselves up with the versions of Python that README.md tells, and no
other.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUNCTIONS = (ROOT / ".ci" / "environment").read_text().partition("\nif ! z3_ready")[0]


@pytest.mark.parametrize("sees", ["cpu builds", "PyTorch's index", "PyPI alone", "nothing"])
def test_torch_comes_from_where_it_can_be_found(sees, tmp_path):
    fake = tmp_path / "python"
    fails = {
        "cpu builds": "false",
        "PyTorch's index": '[[ "$*" = *+cpu && "$*" != *download.pytorch.org* ]]',
        "PyPI alone": '[[ "$*" = *+cpu ]]',
        "nothing": '[[ "$*" = *install* ]]',
    }
    fake.write_text(f'#!/bin/bash\necho "$*" >> {tmp_path}/log\n! {fails[sees]}\n')
    fake.chmod(0o755)
    script = (
        f"{FUNCTIONS}\nroot={ROOT}; python={fake}; uname() {{ echo Linux; }}; z3_install_torch cpu"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode == 0) == (sees != "nothing")
    tried = [line for line in (tmp_path / "log").read_text().splitlines() if "install" in line]
    last = tried[-1]
    assert len(tried) == {"cpu builds": 1, "PyTorch's index": 2}.get(sees, 3)
    assert re.search(r"torch==[\d.]+(\+cpu)?$", last)[1] == (None if len(tried) == 3 else "+cpu")
    assert ("gigabytes" in done.stderr and "--quiet" not in last) == (len(tried) == 3)


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
