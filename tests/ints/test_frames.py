"""Frames of threads may be read at any moment, whatever the garbage collector does then."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from textwrap import dedent

import pytest

from lightning_zero3.strategies.support import gc_pause
from lightning_zero3.strategies.support.gc_pause import without_collection
from lightning_zero3.strategies.support.thread_stacks import read_frames

DEPTH = 50


@pytest.fixture
def deep():
    """A thread that waits below ``DEPTH`` calls of ``descend``."""
    is_there, done = threading.Event(), threading.Event()

    def descend(depth: int) -> None:
        if depth > 1:
            return descend(depth - 1)
        is_there.set()
        done.wait()

    thread = threading.Thread(target=descend, args=(DEPTH,), daemon=True)
    thread.start()
    is_there.wait()
    yield thread
    done.set()
    thread.join()


@pytest.fixture
def collections():
    """Which collections began, where each new object begins one. They are counted as long as the
    test runs.
    """
    threshold, began = gc.get_threshold(), []

    def count(phase: str, info: dict) -> None:
        began.append((phase, info))

    gc.callbacks.append(count)
    gc.set_threshold(1)
    yield began
    gc.set_threshold(*threshold)
    gc.callbacks.remove(count)
    gc.enable()


def names_of(frame) -> list[str]:
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
        [[] for _ in range(4)]  # up to CPython 3.11 the frame itself is enough
    return names


def test_nothing_is_collected_while_frames_are_read(deep, collections):
    """A finalizer would let their threads leave them."""
    names_of(None), [[] for _ in range(4)]
    assert collections  # where nobody reads, it is

    def read(frames):
        collections.clear()
        return names_of(frames[deep.ident]), list(collections)

    names, meanwhile = read_frames(read)
    assert names.count("descend") == DEPTH and names[-1] == "_bootstrap"
    assert not meanwhile
    assert gc.isenabled()


def test_the_callers_own_frames_are_whole():
    names = read_frames(lambda frames: names_of(frames[threading.get_ident()]))
    assert "test_the_callers_own_frames_are_whole" in names


def test_nothing_of_what_was_read_is_kept(collections):
    """By cycles of frames, of which a thread that asks ten times a second would make as many. Since
    CPython 3.12 some do.
    """

    class Activation:
        pass

    def read_in_a_step():
        activation = Activation()
        read_frames(lambda frames: names_of(frames[threading.get_ident()]))
        return weakref.ref(activation)

    gc.disable()
    assert read_in_a_step()() is None


@pytest.mark.parametrize("collects", [True, False])
def test_who_collected_before_collects_afterwards(deep, collections, collects):
    (gc.enable if collects else gc.disable)()
    with pytest.raises(KeyError):
        read_frames(lambda frames: frames[-1] if not gc.isenabled() else None)
    assert gc.isenabled() == collects


@pytest.mark.parametrize("collects", [True, False])
def test_others_who_want_no_collection_keep_it_off(collections, collects):
    """A graph is captured, say, while the watch reads frames: whoever came first may leave last."""
    (gc.enable if collects else gc.disable)()
    reading, capturing = without_collection(), without_collection()
    reading.__enter__()
    with capturing:
        reading.__exit__(None, None, None)
        assert not gc.isenabled()
    assert gc.isenabled() == collects


def test_collection_that_others_let_go_on_stops_for_who_reads(collections):
    """A user's step, say, that `CUDAGraphStep` looks at."""
    with without_collection():
        gc.enable()
        assert not read_frames(lambda frames: gc.isenabled())
    assert gc.isenabled()


@pytest.mark.parametrize("collects", [True, False])
def test_a_signals_handler_may_come_anywhere(collections, collects):
    """One that reads frames, between any two instructions."""
    (gc.enable if collects else gc.disable)()
    places = comes = found = 0

    def trace(frame, event, arg):
        nonlocal places
        if frame.f_code.co_filename != gc_pause.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            places += 1
            if places == comes:
                read_frames(lambda frames: None)
        return trace

    for comes in range(120):  # more than there are; CPython 3.12 tells of none at first
        places = 0
        sys.settrace(trace)
        try:
            with without_collection():
                pass
        finally:
            sys.settrace(None)
        assert gc.isenabled() == collects, comes
        found = max(found, places)
    assert 30 < found < 120


def test_a_forked_process_collects_garbage():
    """A worker of a loader, forked while the watch reads."""
    inside, over = threading.Event(), threading.Event()

    def read():
        with without_collection():
            inside.set()
            over.wait()

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    if not (child := os.fork()):
        os._exit(not gc.isenabled())
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()


# The finalizers give the interpreter's lock away, and the other thread takes the lock of the list
# of threads all the time.
PROGRAM = dedent("""
    import gc, random, threading, time
    from lightning_zero3.strategies.support.thread_stacks import read_frames

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            time.sleep(1e-5)

    here, end = threading.get_ident(), time.monotonic() + 1

    def look():
        while time.monotonic() < end:
            gc.set_threshold(random.randint(5, 20))  # a collection may begin anywhere
            cycles = [Cycle() for _ in range(random.randint(0, 20))]
            del cycles
            assert read_frames(lambda frames: here in frames)
        print("to the end")

    looking = threading.Thread(target=look)
    looking.start()
    while time.monotonic() < end:
        other = threading.Thread(target=int)
        other.start()
        other.join()
    looking.join()
    assert gc.isenabled()
""")


def test_frames_can_be_listed_while_threads_start_and_garbage_is_collected():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "to the end\n", done.stderr
