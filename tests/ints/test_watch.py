"""The watch's thread by itself: whom it takes for a neighbour, and what must not stop it."""

import errno
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks.memory import ranks
from lightning_zero3.strategies.liveness.diagnosis import ELSEWHERE, ENGINE, Beat, Straggler
from lightning_zero3.strategies.liveness.heartbeats import Report, Verdict
from lightning_zero3.strategies.liveness.position import (
    Activity,
    Card,
    Neighbour,
    Place,
    Position,
)
from lightning_zero3.strategies.liveness.watchdog import Watch, WatchOptions

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes look at each other by /proc and pidfd_open"
)

PLACE = Place(Activity.FORWARD, step=3, unit=1, exchanges=40)
BEAT = Beat(1, PLACE, 0.0, ENGINE, "train.py:7 in step")
ELSEWHERE_CARD = Card("", "host", 1, -1)
BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def watching(store, other=ELSEWHERE_CARD, **limits):
    """Rank 0 of two, in this process."""
    position = Position()
    cards = [Card.of(position), other]
    watch = Watch(WatchOptions(**limits), store, 0, cards, position)
    try:
        yield watch
    finally:
        watch.stop()


def ended_process():
    """An id that no process has."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@contextmanager
def sleeping():
    """The card of a process that runs until the block ends."""
    position = Position()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        yield Card.of(position)._replace(pid=child)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        position.close()


@pytest.mark.parametrize("same", [True, False])
def test_a_host_is_not_known_by_its_name(same):
    with sleeping() as card:
        boot = BOOT.read_text().strip()
        there = card.machine.replace(boot, "5e0f3a3c-0000-4000-8000-000000000000")
        assert card.machine.startswith(os.uname().nodename)
        if not same:
            card = card._replace(machine=there)
        with watching(dist.HashStore(), card) as watch:
            assert list(watch._neighbours) == [1] * same
            os.kill(card.pid, signal.SIGKILL)
            # Its number is nobody's here: only of a process of this machine does that say that it
            # has ended.
            assert watch._verdict_event.wait(20 if same else 2) == same
            assert not same or watch._verdict.text.startswith("Rank 1 died without a word")


def test_two_runs_of_one_process_have_names_of_their_own():
    position = Position()
    assert Card.of(position).run != Card.of(position).run
    position.close()


def test_a_process_that_nobody_could_look_into_is_told_by_its_silence_alone():
    position = Position()
    gone = Card.of(position)._replace(pid=ended_process())
    with watching(dist.HashStore(), gone) as watch:
        assert watch._neighbours == {}
        assert not watch._verdict_event.wait(1)
    position.close()


def test_another_file_in_the_place_of_a_position_tells_nothing():
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as file:
        file.write(b"short")
        file.flush()
        with pytest.raises(ValueError):
            Neighbour(Card("", "host", os.getpid(), file.fileno()))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_here", [True, False])
def test_the_place_of_a_lost_rank_is_as_old_as_it_is(is_here, monkeypatch):
    store = dist.HashStore()
    store.set("1", BEAT.pack())
    with sleeping() as card, watching(store, card if is_here else ELSEWHERE_CARD) as watch:
        os.kill(card.pid, signal.SIGSTOP)
        wait_for(lambda: 1 in watch._reports.newest)
        if is_here:  # its memory says where it is now
            monkeypatch.setattr(watch._neighbours[1], "place", lambda: replace(PLACE, step=20))
        report = watch._reports.newest[1]
        watch._find_silent_ranks({1: report._replace(since=report.since - 61)})
        text = watch._verdict.text
    where = "it is in forward, unit 1, step 20"
    if not is_here:
        where = "it last said that it was in forward, unit 1, step 3"
    assert re.search(rf"heard of for 6\d s .*; {where}\.$", text), text


def silences(watch, place, seconds):
    """Rank 1 has been silent for so long, after a report of its own; looked at twice."""
    report = Report(replace(BEAT, place=place), time.monotonic() - seconds)
    watch._last_check = time.monotonic()
    for _ in range(2):
        watch._find_silent_ranks({1: report})


@pytest.mark.parametrize("lost", [5.0, 60.0])
def test_a_rank_that_runs_and_does_not_report_is_warned_of_once_for_each_silence(lost):
    with sleeping() as card, watching(dist.HashStore(), card, lost=lost) as watch:
        for after in (PLACE, replace(PLACE, step=4)):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                silences(watch, after, lost + 1)
            assert len(seen) == 1 and watch._verdict is None
            assert re.match(
                r"Rank 1 has not reported for \d+ s, but its process runs", str(seen[0].message)
            )
        # it is no cause of what another rank's error asks for
        watch._needs_verdict = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            silences(watch, PLACE, 4)
        assert watch._verdict is None


def test_a_rank_that_is_stopped_is_lost_and_its_end_is_no_silence():
    with sleeping() as card, watching(dist.HashStore(), card) as watch:
        os.kill(card.pid, signal.SIGSTOP)
        wait_for(lambda: not watch._neighbours[1].can_run)
        silences(watch, PLACE, 50)
        assert watch._verdict is None
        silences(watch, PLACE, 61)
        assert watch._verdict.text.startswith("Rank 1 on ")


class Unwritable:
    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        pass


ERRORS = [
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("I/O operation on closed file."),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_rank_ends_though_nothing_can_be_said(error, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(sys, "stderr", Unwritable(error))
    store = dist.HashStore()
    with watching(store):
        store.set("verdict", json.dumps([1, "Rank 1 waits for ever.", True]))
        assert ended.wait(20)


ENDS = [RuntimeError("Connection closed by peer"), ValueError("sample 17 is broken")]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_a_rank_that_has_raised_has_longer_than_the_grace_to_end(error, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with watching(dist.HashStore(), lost=5.0, grace=0.5) as watch:
        watch._give_verdict(1, "Rank 1 died without a word.")
        watch.report_error(error)
        assert not ended.wait(3)  # a logger uploads
        assert ended.wait(10)  # but not for ever


def test_a_rank_that_does_not_raise_is_ended_after_the_grace(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with watching(dist.HashStore(), grace=0.5) as watch:
        watch._give_verdict(1, "Rank 1 died without a word.")
        assert ended.wait(3)


def wait_for(is_done):
    until = time.monotonic() + 20
    while not is_done() and time.monotonic() < until:
        time.sleep(0.01)
    assert is_done()


def test_a_watch_that_fails_says_so(monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(Watch, "_find_ended_processes", lambda self: [][1])
    store = dist.HashStore()
    with watching(store) as watch:
        wait_for(lambda: store.check(["verdict"]))
        rank, text, stuck = json.loads(store.get("verdict"))
        assert (rank, stuck) == (0, False)
        assert "Rank 0 has stopped watching: its watch (not its model) raised" in text
        watch._deadline = 0
        assert ended.wait(20)
    assert "test_watch.py" in capsys.readouterr().err  # the traceback


def test_a_warning_that_is_an_error_does_not_end_the_watch():
    store, asked = dist.HashStore(), []
    store.set("1", BEAT.pack())
    with watching(store) as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        watch._straggler.find = lambda beats, name: asked.append(1) or "Rank 1 holds the others up."
        until = time.monotonic() + 20
        while len(asked) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(asked) >= 2


def test_a_verdict_says_on_its_second_line_what_to_do(capsys):
    with watching(dist.HashStore()) as watch:
        watch._accept_verdict(Verdict(1, "They\x1b[2J part.\nLook\nfor\r it."))
        words = watch._describe_verdict(watch._verdict).splitlines()
    assert words == capsys.readouterr().err.splitlines()
    assert words[0].startswith(r"They\x1b[2J part. Rank 0 ends too; it is in set-up")
    assert words[1:] == [r"Look\nfor\r it."]


def test_a_warning_about_another_rank_does_not_write_to_the_terminal():
    line = "train\x1b[2J.py:7\r in step"
    with (
        watching(dist.HashStore()) as watch,
        pytest.warns(UserWarning, match=r"\(train\\x1b\[2J.py:7\\r in"),
    ):
        watch._straggler = Straggler(2)
        mine, other = watch._make_beat(), replace(BEAT, code=line)
        for _ in range(2):
            watch._diagnose([replace(mine, place=PLACE, busy=0.0), replace(other, busy=1.0)])


def timed(method):
    @wraps(method)
    def call(*args):
        return method(*args)

    return call


def test_methods_of_a_users_strategy_write_what_they_do_once():
    class Own(Zero3Strategy):
        @timed
        def backward(self):
            return self.watch.position.activity

    class Again(Own):
        optimizer_step = timed(Own.optimizer_step)

    with watching(dist.HashStore()) as watch:
        assert Own.backward(SimpleNamespace(watch=watch)) == Activity.BACKWARD
    assert Again.backward is Own.backward
    assert Again.optimizer_step.__wrapped__ is Own.optimizer_step  # not wrapped again


@pytest.mark.parametrize("stopped_s", [0, 70])
def test_a_rank_that_was_stopped_counts_silence_from_then_on(stopped_s):
    with watching(dist.HashStore()) as watch:
        watch._is_stopping = True  # its thread ends
        watch._thread.join()
        watch._reports._keep(1, BEAT)
        now = time.monotonic()
        watch._reports.newest[1] = Report(BEAT, now - 70)
        watch._last_check = now - stopped_s
        watch._check_reports()
        assert (watch._verdict is None) == (stopped_s == 70)


def test_the_users_line_is_none_of_this_package(monkeypatch):
    wait = compile(
        "def wait(look, *args, **kwargs):\n    raise Seen(look())",
        distributed_c10d.__file__,
        "exec",
    )
    names = {"Seen": type("Seen", (Exception,), {})}
    exec(wait, names)
    with watching(dist.HashStore()) as watch:
        monkeypatch.setattr(
            ranks, "_all_gather", partial(names["wait"], watch._read_training_thread)
        )
        gatherer = ranks.RankGatherer()
        gatherer._group = object()
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        with pytest.raises(names["Seen"]) as seen:
            gatherer.gather([1.0])
    waits, code = seen.value.args[0]
    assert waits == ELSEWHERE and code.startswith(f"{__file__}:"), code
