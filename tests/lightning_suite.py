"""Runs Lightning's own tests with this strategy, on one rank or more; not part of the gate.

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python tests/lightning_suite.py pytorch-lightning [--ranks 2] [--beside ddp] [FOLDER ...]

Lightning reads ``PL_TRAINER_STRATEGY`` and its like where a test leaves an argument of the Trainer out.
On several ranks each file's tests run in all ranks at once, as `torchrun` starts them, and each rank
waits for the others after a test; a test counts as passed if it passes on every rank. Trainers that
name another number of devices get these, so tests that count batches fail, under `ddp`, too. A test
that hangs ends the processes, and the rest goes on without it. Printed is, for each folder, passed of
total and the reason of each test that fails, and how it goes with another strategy beside;
docs/LIGHTNING_SUITE.md says what is behind them.

This file is also the plugin that writes down what each rank's pytest does.
"""

import argparse
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
from lightning.pytorch import Trainer, strategies

from lightning_zero3 import Zero3Strategy

FOLDERS = ["loops", "core", "trainer", "callbacks", "checkpointing", "models/test_hooks.py"]
# Needs checkpoints of old releases, which the repository does not have.
WITHOUT_FILES = "test_legacy_checkpoints.py"
TIMEOUT_S = 60  # of a test
HANGS = "hangs, or ends its process"


# ---- in pytest


def pytest_configure():
    strategies.StrategyRegistry.register(
        "zero3_sharded", Zero3Strategy, checkpoint={"kind": "sharded"}
    )
    if RANKS > 1:  # most tests name one device
        original = Trainer.__init__

        @functools.wraps(original)  # Lightning reads the names of arguments off the signature
        def with_all_ranks(self, **options):
            original(self, **options | {"devices": RANKS})

        Trainer.__init__ = with_all_ranks


RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


_NUMBERS = itertools.count()


def _events(rank):
    return Path(f"{os.environ['SUITE_EVENTS']}.{rank}")


def _write(**event):
    with _events(RANK).open("a") as file:
        print(json.dumps(event), file=file)


def pytest_runtest_logstart(nodeid):
    if RANKS > 1:  # Lightning's tests end the group, which meets anew at a store of its own
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        os.environ["MASTER_PORT"] = str(20_000 + next(_NUMBERS))
    _write(test=nodeid, outcome=HANGS)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message.splitlines()[0] if crash is not None else report.outcome
        outcome = "skipped" if report.skipped else "passed" if report.passed else reason
        _write(test=report.nodeid, outcome=outcome)


@pytest.fixture
def tmp_path(request):
    """A folder that the ranks share, as a run's ranks do."""
    name = re.sub(r"\W", "_", request.node.name)[:60]
    path = Path(os.environ["SUITE_EVENTS"]).parent / f"{name}-{crc32(request.node.nodeid.encode())}"
    path.mkdir(exist_ok=True)
    return path


def pytest_sessionfinish():
    _write(finished=True)


def pytest_runtest_logfinish(nodeid):
    """Begin the next test when all ranks have ended this one."""
    if RANKS == 1:
        return
    end = json.dumps({"ended": nodeid})
    with _events(RANK).open("a") as file:
        print(end, file=file)
    deadline = time.monotonic() + TIMEOUT_S
    files = [_events(r) for r in range(RANKS)]
    while not all(file.exists() and end in file.read_text() for file in files):
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.01)


# ---- in the command


def run(targets, folder, checkout, ranks, strategy, left_out):
    """Outcome by test of ``targets`` (files, tests), and whether all have run.

    What each rank writes of them is in ``folder``.
    """
    events = Path(folder) / "events"
    for old in Path(folder).glob("events.*"):
        old.unlink()
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environ = {
        **os.environ,
        "SUITE_EVENTS": str(events),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(checkout / "tests")]),
        "PL_TRAINER_STRATEGY": strategy,
        "PL_TRAINER_ACCELERATOR": "cpu",
        "PL_TRAINER_DEVICES": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, "-m", "pytest", "-q"]
    command += ["-p", "lightning_suite", "-p", "no:cacheprovider"]
    command += [f"--timeout={TIMEOUT_S}", "--timeout-method=thread", *targets]
    command += [f"--deselect={test}" for test in left_out]
    done = subprocess.run(
        command, cwd=checkout / "tests", env=environ, capture_output=True, text=True
    )
    outcomes, is_finished = {}, False
    for path in Path(folder).glob("events.*"):
        mine = {}
        for line in path.read_text().splitlines():
            event = json.loads(line)
            is_finished |= "finished" in event
            if "test" in event and mine.get(event["test"]) in (None, "passed", HANGS):
                mine[event["test"]] = event["outcome"]
        for test, outcome in mine.items():
            if outcomes.get(test, "passed") in ("passed", "skipped"):
                outcomes[test] = outcome
    if not outcomes and not left_out and (lost := re.search(r"\w+Error: .*", done.stdout)):
        outcomes[targets[0]] = f"is not imported: {lost[0]}"
    return outcomes, is_finished or not outcomes


def run_to_the_end(targets, checkout, ranks, strategy):
    """Outcome by test of files or tests, though a test may end the processes."""
    outcomes = {}
    with TemporaryDirectory() as folder:
        while True:
            found, is_finished = run(targets, folder, checkout, ranks, strategy, outcomes)
            outcomes |= found
            if is_finished:
                return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--strategy",
        default="zero3",
        help='"zero3_sharded" for checkpoints that are folders; "auto" or "ddp" to compare',
    )
    parser.add_argument("--beside", help="a strategy with which the tests that fail run again")
    options = parser.parse_intermixed_args()
    checkout = options.checkout.resolve()
    for folder in options.folders:
        outcomes, beside = {}, {}
        path = checkout / "tests" / "tests_pytorch" / folder
        for file in [path] if path.is_file() else sorted(path.rglob("test_*.py")):
            if file.name == WITHOUT_FILES:
                continue
            found = run_to_the_end([str(file)], checkout, options.ranks, options.strategy)
            outcomes |= found
            failed = [
                str(checkout / test)
                for test, outcome in found.items()
                if "::" in test and outcome not in ("passed", "skipped")
            ]
            if failed and options.beside:
                beside |= run_to_the_end(failed, checkout, options.ranks, options.beside)
        counts = Counter(outcomes.values())
        total = len(outcomes) - counts["skipped"]
        print(f"\n{folder}: {counts['passed']} of {total} passed, {counts['skipped']} skipped")
        for test, outcome in outcomes.items():
            if outcome not in ("passed", "skipped"):
                print(f"  {test.partition('tests_pytorch/')[2] or test}\n      {outcome}")
                if other := beside.get(test):
                    same = "the same" if other == outcome else other
                    print(f"      {options.beside}: {same}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
