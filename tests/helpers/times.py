"""How long the tests take, from a run of all of them, to docs/TEST_TIMES.md.

bash tests/run --all --junitxml=times.xml
python tests/helpers/times.py times.xml
"""

import os
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# How long the tests take

Written by `python tests/helpers/times.py` from `bash tests/run --all`, on {date}: {machine}, Python {python}, torch {torch}.
{total} tests ran in {minutes:.0f} minutes, {gate} of them ({gate_minutes:.0f} minutes) in the gate. Set-up and teardown are
counted; what tests of a file share is counted for the first of them. Skipped tests are left out.

## Files

| file | tests | seconds | in the gate |
|---|---|---|---|
"""


def read(report: Path) -> dict[str, float]:
    """{"trainer/test_fit.py::test_it[1]": seconds} of the tests that ran."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            found[f"{file}.py::{case.get('name')}"] = float(case.get("time", 0))
    return found


def gate_names() -> set[str]:
    """The tests that the gate collects at this commit."""
    import pytest

    class Collected:
        names: set[str] = set()

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            self.names = {item.nodeid.removeprefix("tests/") for item in session.items}

    collected = Collected()
    os.chdir(ROOT)
    pytest.main(["tests", "--collect-only", "--tier=gate", "-p", "no:terminal"], [collected])
    return collected.names


def main(report: Path) -> None:
    """Write the document."""
    import torch

    times, gate = read(report), gate_names()
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for name, seconds in times.items():
        row = files[name.partition("::")[0]]
        row[0] += 1
        row[1] += seconds
        row[2] += seconds if name in gate else 0
    lines = [
        HEAD.format(
            date=date.today().isoformat(),
            machine=f"{os.cpu_count()} cores of {platform.machine()}, {platform.system()}",
            python=platform.python_version(),
            torch=torch.__version__,
            total=len(times),
            minutes=sum(times.values()) / 60,
            gate=len(gate & times.keys()),
            gate_minutes=sum(times[name] for name in gate & times.keys()) / 60,
        ).rstrip("\n")
    ]
    for file, (count, seconds, gated) in sorted(files.items(), key=lambda row: -row[1][1]):
        lines.append(f"| {file} | {count:.0f} | {seconds:.1f} | {gated:.1f} |")
    lines += ["", "## Tests of a second and more", "", "| test | seconds | gate |", "|---|---|---|"]
    for name, seconds in sorted(times.items(), key=lambda row: -row[1]):
        if seconds >= 1:
            lines.append(f"| `{name}` | {seconds:.1f} | {'yes' if name in gate else ''} |")
    (ROOT / "docs" / "TEST_TIMES.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
