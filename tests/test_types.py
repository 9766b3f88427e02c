"""The package type-checks.

The checker is mypy: mypy 2.4 found 372 errors and basedpyright 1.40 (basic) found 400 on the same
tree, and mypy needs fewer suppressions.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run mypy in a folder with the package in it; a second run takes a few seconds."""
    arguments = ["--config-file", str(ROOT / "pyproject.toml"), "-p", "lightning_zero3", "-n", "2"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *arguments, "--cache-dir", str(ROOT / ".mypy_cache")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )


def link_package(folder: Path) -> Path:
    """Lay the sources out below ``folder`` as they are imported; return the package."""
    package = folder / "lightning_zero3"
    shutil.copytree(ROOT / "strategies" / "lightning_zero3", package)
    for name in ("strategies", "callbacks"):
        (package / name).symlink_to(ROOT / name)
    return package


def test_types(tmp_path):
    link_package(tmp_path)
    result = check(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_error_is_found(tmp_path):
    wrong = link_package(tmp_path) / "wrong.py"
    wrong.write_text(
        "from .strategies import Zero3Strategy\n\ndebug: str = Zero3Strategy()._debug\n"
    )
    result = check(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert 'wrong.py:3: error: Incompatible types in assignment (expression has type "bool"' in (
        result.stdout
    )
