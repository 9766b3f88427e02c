"""The watch's thread by itself: whom it takes for a neighbour, and what must not stop it."""

import errno
import json
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_zero3.callbacks.memory import ranks
from lightning_zero3.strategies.liveness.diagnosis import ELSEWHERE, ENGINE, Beat, Straggler
from lightning_zero3.strategies.liveness.heartbeats import Reports
from lightning_zero3.strategies.liveness.position import Activity, Neighbour, Place, machine
from lightning_zero3.strategies.liveness.watchdog import Watch, WatchOptions

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes look at each other by /proc and pidfd_open"
)

PLACE = Place(Activity.FORWARD, step=3, unit=1, exchanges=40)
BEAT = Beat(1, "host", 1, -1, PLACE, 0.0, ENGINE, "train.py:7 in step")
BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def watching(store):
    """Rank 0 of two, in this process."""
    watch = Watch(WatchOptions(), store, 0, 2)
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


@pytest.mark.parametrize("same", [True, False])
def test_a_host_is_not_known_by_its_name(same):
    here, boot = machine(), BOOT.read_text().strip()
    there = here if same else here.replace(boot, "5e0f3a3c-0000-4000-8000-000000000000")
    assert here.startswith(os.uname().nodename) and (there == here) == same
    store = dist.HashStore()
    store.set("1", replace(BEAT, machine=there, pid=ended_process()).pack())
    with watching(store) as watch:
        until = time.monotonic() + 20
        while (
            not (1 in watch._unexplained if same else 1 in watch._neighbours)
            and time.monotonic() < until
        ):
            time.sleep(0.01)
        time.sleep(0.05)
        # Its number is nobody's here: only of a process of this machine does that say that it has
        # ended.
        assert watch._neighbours == {1: None} and list(watch._unexplained) == [1] * same


def test_another_file_in_the_place_of_a_position_tells_nothing():
    before = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryFile() as file:
        file.write(b"short")
        file.flush()
        neighbour = Neighbour(os.getpid(), file.fileno(), PLACE)
    assert neighbour.message is None and neighbour.place() == PLACE and not neighbour.has_ended
    neighbour.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("is_here", [True, False])
def test_the_place_of_a_lost_rank_is_as_old_as_it_is(is_here, monkeypatch):
    store = dist.HashStore()
    store.set("1", replace(BEAT, machine=machine() if is_here else "host", pid=os.getpid()).pack())
    with watching(store) as watch:
        wait_for(lambda: watch._neighbours.get(1) if is_here else 1 in watch._neighbours)
        if is_here:  # its memory says where it is now
            monkeypatch.setattr(watch._neighbours[1], "place", lambda: replace(PLACE, step=20))
        report = watch._reports.newest[1]
        report = replace(report, since=report.since - 60)
        watch._report_silence(1, report, "has not been heard of for 60 s", "its")
        text = watch._verdict["text"]
    where = (
        "it is in forward, unit 1, step 20"
        if is_here
        else (r"it last said, 6[01] s ago, that it was in forward, unit 1, step 3")
    )
    assert re.search(f"; {where}\\.$", text), text


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
        store.set("1", BEAT.pack())
        store.set(
            "verdict", json.dumps({"rank": 1, "text": "Rank 1 waits for ever.", "stuck": True})
        )
        assert ended.wait(20)


def placed(**items):
    beat = json.loads(BEAT.pack())
    return json.dumps({**beat, "place": {**beat["place"], **items}})


NO_BEATS = [
    "junk",
    "[]",
    "[" * 100_000,
    "{}",
    json.dumps({**json.loads(BEAT.pack()), "more": 1}),
    replace(BEAT, number="1").pack(),
    replace(BEAT, machine="").pack(),
    replace(BEAT, machine=["host"]).pack(),
    replace(BEAT, pid=2**31).pack(),
    replace(BEAT, busy="all").pack(),
    replace(BEAT, trace=[{}]).pack(),
    placed(activity=99),
    placed(step=1.5),
    placed(unit=-5),
]
NO_VERDICTS = [
    "junk",
    "[]",
    "[" * 100_000,
    json.dumps({"rank": 1}),
    json.dumps({"rank": 2, "text": "no such rank"}),
    json.dumps({"rank": [0], "text": "x"}),
    json.dumps({"rank": 1, "text": {}, "stuck": False}),
    json.dumps({"rank": 1, "text": "x", "stuck": 1}),
]


@pytest.mark.parametrize("key", ["1", "verdict"])
def test_what_is_no_message_of_the_watch_is_dropped_and_told_once(key, capsys):
    store = dist.HashStore()
    for value in NO_BEATS if key == "1" else NO_VERDICTS:
        store.set("1", replace(BEAT, machine=machine(), pid=os.getpid()).pack())
        store.set(key, value)
        with watching(store) as watch:
            for number in (2, 4):  # more than one look
                watch._reports.request_all()
                wait_for(lambda: watch._number > number)  # noqa: B023
            assert watch._thread.is_alive() and watch._reports._thread.is_alive(), value
            assert watch._verdict is None
            if key == "1":
                assert 1 not in watch._reports.newest
            else:  # a verdict of this rank's own takes the place
                watch.report_error(ValueError("mine\x1b[2J"), should_stop=False)
                wait_for(lambda: b"mine" in store.get("verdict"))
                assert "\x1b" not in watch._verdict["text"]
        said = capsys.readouterr().err
        assert said.count("is dropped") == 1 and said.count("\n") == 1, (value, said)


def wait_for(is_done):
    until = time.monotonic() + 20
    while not is_done() and time.monotonic() < until:
        time.sleep(0.01)
    assert is_done()


def test_a_watch_that_fails_says_so(monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(Watch, "_open_neighbours", lambda self: [][1])
    store = dist.HashStore()
    with watching(store) as watch:
        wait_for(lambda: store.check(["verdict"]))
        verdict = json.loads(store.get("verdict"))
        assert verdict["rank"] == 0
        assert "Rank 0 has stopped watching: its watch (not its model) raised" in verdict["text"]
        watch._deadline = 0
        assert ended.wait(20)
    assert "test_watch.py" in capsys.readouterr().err  # the traceback


def test_a_warning_that_is_an_error_does_not_end_the_watch():
    store, asked = dist.HashStore(), []
    store.set("1", replace(BEAT, machine=machine(), pid=os.getpid()).pack())
    with watching(store) as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        watch._straggler.find = lambda beats, name: asked.append(1) or "Rank 1 holds the others up."
        until = time.monotonic() + 20
        while len(asked) < 2 and time.monotonic() < until:
            watch._wake()
            time.sleep(0.02)
        assert len(asked) >= 2


def test_a_verdict_says_on_its_second_line_what_to_do(capsys):
    with watching(dist.HashStore()) as watch:
        watch._accept_verdict({"rank": 1, "text": "They\x1b[2J part.\nLook\nfor\r it."})
        words = watch._describe_verdict(watch._verdict).splitlines()
    assert words == capsys.readouterr().err.splitlines()
    assert words[0].startswith(r"They\x1b[2J part. Rank 0 ends too; it is in set-up")
    assert words[1:] == [r"Look\nfor\r it."]


def test_a_warning_about_another_rank_does_not_write_to_the_terminal():
    store, line = dist.HashStore(), "train\x1b[2J.py:7\r in step"
    store.set("1", replace(BEAT, machine=machine(), pid=os.getpid(), code=line).pack())
    with watching(store) as watch, pytest.warns(UserWarning, match=r"\(train\\x1b\[2J.py:7\\r in"):
        watch._straggler = Straggler(2)
        mine, other = watch._reports._make_beat(), replace(BEAT, code=line)
        for _ in range(2):
            watch._diagnose([replace(mine, place=PLACE, busy=0.0), replace(other, busy=1.0)])


def test_a_rank_that_stood_still_counts_silence_from_then_on(monkeypatch):
    now = [100.0]
    reports = Reports.__new__(Reports)
    reports.newest = {}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    silences = []
    for later in (0, 1, 1, 70, 1, 1):  # seconds since the last look; nothing new is there
        now[0] += later
        reports._keep(1, BEAT)
        silences.append(reports.newest[1].read - reports.newest[1].since)
    assert silences == [0, 1, 2, 0, 1, 2]


def test_an_error_in_the_making_of_a_beat_is_none_of_the_stores(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    beats = iter([BEAT])
    Reports(dist.HashStore(), 0, 1, lambda: next(beats, None) or int("not a number"))._thread.join(
        20
    )
    assert [args.exc_type for args in told] == [ValueError]


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
