"""The helper that every multi-process test stands on must itself fail in the right way."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks

TESTS = Path(__file__).resolve().parents[1]


class Result:
    """A class of the test's own module must survive the way back."""

    def __init__(self, value):
        self.value = value


def gather_everything(rank, world_size, offset):
    mine = torch.tensor([float(rank)])
    total = mine.clone()
    dist.all_reduce(total)
    return {"mine": mine, "total": total, "offset": offset, "object": Result(rank)}


def report_setting(rank, world_size):
    import multiprocessing as mp

    names = ("RANK", "WORLD_SIZE", "RANKS_HELPER_TEST")
    return torch.get_num_threads(), {k: os.environ.get(k) for k in names}, mp.get_start_method()


def fail_on_one_rank(rank, world_size, failing):
    if rank == failing:
        print("last words")
        time.sleep(0.2)
        raise KeyError("the real reason")
    dist.barrier()


def die_on_one_rank(rank, world_size, failing):
    if rank == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_unpicklable(rank, world_size):
    return lambda: None


def hang_with_child(rank, world_size, pid_folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_folder, str(rank)).write_text(f"{os.getpid()} {child.pid}")
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def leave_child_behind(rank, world_size, pid_folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_folder, str(rank)).write_text(f"{os.getpid()} {child.pid}")


def assert_all_gone(pid_folder):
    pids = [int(pid) for file in Path(pid_folder).iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # A zombie is dead: who reaps orphans is not up to us (in a container perhaps nobody).
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(world_size):
    results = run_ranks(gather_everything, world_size, 7)
    assert [r["mine"].item() for r in results] == list(range(world_size))
    assert [r["total"].item() for r in results] == [sum(range(world_size))] * world_size
    assert [r["offset"] for r in results] == [7] * world_size
    assert [r["object"].value for r in results] == list(range(world_size))


def test_ranks_see_the_callers_environment_and_one_thread(monkeypatch):
    run_ranks(report_setting, 1)  # from here on the server runs, without the variable
    monkeypatch.setenv("RANKS_HELPER_TEST", "new")
    for rank, (threads, environ, _) in enumerate(run_ranks(report_setting, 2)):
        assert threads == 1
        assert environ == {"RANK": str(rank), "WORLD_SIZE": "2", "RANKS_HELPER_TEST": "new"}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failure_shows_the_first_ranks_traceback_and_output(failing):
    with pytest.raises(AssertionError) as failure:
        run_ranks(fail_on_one_rank, 3, failing)
    text = str(failure.value)
    assert f"rank {failing} of 3 failed first" in text
    assert "KeyError: 'the real reason'" in text
    assert 'raise KeyError("the real reason")' in text
    assert "last words" in text


@pytest.mark.parametrize("failing", [0, 1])
def test_a_killed_rank_is_named_before_the_ones_it_broke(failing):
    with pytest.raises(AssertionError, match=f"rank {failing} of 2 failed first") as failure:
        run_ranks(die_on_one_rank, 2, failing)
    assert f"exit code -{signal.SIGKILL.value}" in str(failure.value)


def test_unpicklable_result_is_a_failure():
    with pytest.raises(AssertionError, match="(?i)pickle"):
        run_ranks(return_unpicklable, 1)


def test_timeout_kills_everything_and_shows_every_stack(tmp_path):
    start = time.monotonic()
    with pytest.raises(AssertionError, match="not finished after 3 s on 2 ranks") as failure:
        run_ranks(hang_with_child, 2, tmp_path, timeout=3)
    assert time.monotonic() - start < 30
    text = str(failure.value)
    first, _, second = text.partition("--- rank 1")
    assert "in hang_with_child" in first and "barrier" not in first
    assert "in hang_with_child" in second and "barrier" in second
    assert_all_gone(tmp_path)


def test_nothing_is_left_behind_after_success(tmp_path):
    run_ranks(leave_child_behind, 2, tmp_path)
    assert_all_gone(tmp_path)


def test_ranks_die_with_the_process_that_called(tmp_path):
    program = textwrap.dedent(f"""
        import importlib.util, sys
        sys.path.insert(0, {str(TESTS)!r})
        spec = importlib.util.spec_from_file_location("caller", {__file__!r})
        module = sys.modules["caller"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.run_ranks(module.hang_with_child, 2, {str(tmp_path)!r})
    """)
    caller = subprocess.Popen([sys.executable, "-c", program])
    try:
        deadline = time.monotonic() + 240
        while len([f for f in tmp_path.iterdir() if f.read_text()]) < 2:
            assert caller.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    assert_all_gone(tmp_path)


def test_a_function_that_ranks_cannot_import_is_refused():
    def local(rank, world_size):
        return rank

    with pytest.raises(ValueError, match="top level of an imported module"):
        run_ranks(local, 1)
