"""What the reports of all ranks say, and what a process leaves behind when it is killed."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_zero3.strategies.collectives import (
    GroupCollectives,
    LocalCollectives,
    first_difference,
)
from lightning_zero3.strategies.liveness.diagnosis import (
    ELSEWHERE,
    ENGINE,
    Beat,
    Standstill,
    Straggler,
    align_traces,
)
from lightning_zero3.strategies.liveness.position import (
    Activity,
    Card,
    Neighbour,
    Place,
    Position,
)
from lightning_zero3.strategies.liveness.watchdog import Watch, WatchOptions

PLACE = Place(Activity.FORWARD, step=3, unit=1, exchanges=40)


def beat(number, exchanges=40, busy=0.0, waits=ENGINE, activity=Activity.FORWARD):
    place = replace(PLACE, exchanges=exchanges, activity=activity)
    return Beat(number, place, busy, waits, "train.py:7 in step")


def test_a_report_survives_its_way():
    told = replace(beat(3), trace=[4, 1])
    assert Beat.unpack(told.pack()) == told


def test_a_place_in_words():
    assert PLACE.describe(["embed", "blocks.0"].__getitem__) == "forward, unit blocks.0, step 3"
    assert replace(PLACE, activity=Activity.OPTIMIZER).describe(str) == "the optimizer step, step 3"


def test_exchanges_of_one_window_are_compared():
    rounds = [
        replace(beat(1), trace=trace)
        for trace in ([7, 3, 5, 9], [7, 3, 5], [7, 3, 6, 9], [8, 4], [])
    ]
    assert align_traces(rounds) == [[3, 5, 9], [3, 5], [3, 6, 9], [], []]
    said = first_difference(align_traces(rounds), "exchange {}".format)
    assert "At entry 1 of this step rank 0 came to exchange 5, rank 2 to exchange 6." in said
    assert not first_difference(align_traces(rounds[:2] + rounds[3:]), str)
    # nobody knows since when
    assert align_traces([replace(beat(1), trace=[-1, 3])] * 2) == [
        [],
        [],
    ]


def test_a_rank_that_waits_for_an_agreement_waits_in_the_engine(monkeypatch):
    gate, of_torch = threading.Event(), {}
    exec(
        compile(
            "def all_reduce(*args, **options): gate.wait(30)", distributed_c10d.__file__, "exec"
        ),
        {"gate": gate},
        of_torch,
    )
    monkeypatch.setattr(dist, "all_reduce", of_torch["all_reduce"])
    communicator = GroupCollectives.__new__(GroupCollectives)
    LocalCollectives.__init__(communicator)
    communicator._control = None
    thread = threading.Thread(target=communicator.agree, args=(None,))
    thread.start()
    watch = Watch.__new__(Watch)
    watch._training_thread = thread.ident
    while thread.is_alive() and not any(waits := watch._read_training_thread()):
        time.sleep(0.01)
    assert waits[0] == ENGINE
    gate.set()
    thread.join()


def find(*rounds):
    standstill = Standstill(30)
    return [standstill.find(beats, str) for beats in rounds][-1]


def test_a_rank_in_the_engine_and_one_elsewhere_never_meet():
    rounds = [[beat(n, exchanges=41), beat(n, waits=ELSEWHERE)] for n in range(5)]
    assert find(*rounds) == (0, 1)
    assert find(*rounds[:3]) is None  # too soon to say


def test_a_rank_that_has_ended_never_comes():
    rounds = [
        [beat(n, exchanges=41), beat(9, activity=Activity.ENDED, waits="", busy=1.0)]
        for n in range(5)
    ]
    assert find(*rounds) == (0, 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda n: beat(n, exchanges=41),  # both in one exchange: it takes its time
        lambda n: beat(
            n, exchanges=41, waits=ELSEWHERE
        ),  # has sent its part of what the other waits for
        lambda n: beat(n, busy=0.1, waits=ELSEWHERE),  # moves
        lambda n: beat(n, exchanges=n, waits=ELSEWHERE),  # moves
        lambda n: beat(0, waits=ELSEWHERE),  # an old report
    ],
)
def test_no_deadlock(other):
    assert find(*[[beat(n, exchanges=41), other(n)] for n in range(9)]) is None


def outside(number, line, **fields):
    return replace(beat(number, waits=ELSEWHERE, **fields), code=f"train.py:{line} in step")


def test_ranks_that_all_wait_at_different_places_are_told_once():
    standstill = Standstill(4)
    rounds = [[outside(n, 7), outside(n, 9), outside(n, 9)] for n in range(9)]
    # it looks more often than ranks report
    said = [standstill.find(beats, str) for beats in rounds for _ in range(2)]
    assert [number for number, words in enumerate(said) if words] == [8]
    place = "in forward, unit 1, step 3"
    assert (
        f"for 4 s. All ranks wait for others, and at different places: rank 0 {place} (train.py:7"
        " in step); " in said[8]
    )
    assert f"ranks 1, 2 {place} (train.py:9 in step). " in said[8]
    later = [
        [outside(n, 7, exchanges=50), outside(n, 9, exchanges=50), outside(n, 9, exchanges=50)]
        for n in range(9, 18)
    ]
    assert [bool(standstill.find(beats, str)) for beats in later] == [False] * 4 + [True] + [
        False
    ] * 4


@pytest.mark.parametrize(
    "other",
    [
        lambda n: outside(n, 7),  # all in one exchange: it takes its time
        lambda n: outside(n, 9, busy=0.1),  # works
        lambda n: outside(n, 9, exchanges=40 + n),  # moves
        lambda n: outside(n, n),  # moves
        lambda n: outside(0, 9),  # an old report
        lambda n: replace(outside(n, 9), waits=ENGINE),  # in an exchange that the engine compares
    ],
)
def test_no_standstill(other):
    standstill = Standstill(4)
    assert not any(standstill.find([outside(n, 7), other(n)], str) for n in range(20))


def test_the_rank_that_works_while_others_wait_is_slow_and_named_once():
    straggler = Straggler(4)
    said = [straggler.find([beat(n), beat(n, busy=0.9), beat(n, busy=0.2)], str) for n in range(9)]
    assert said[:3] == [None] * 3 and said[4:] == [None] * 5
    assert (
        "Rank 1 holds the others up: in the last 4 s it worked 90% of the time, the others 20%"
        in said[3]
    )
    assert "in forward, unit 1 (train.py:7 in step)" in said[3]


def test_the_rank_that_is_slow_is_where_it_worked_while_the_others_waited():
    straggler = Straggler(4)
    rounds = [
        [beat(n, busy=1.0), replace(beat(n, busy=1.0), code="train.py:1 in both")] for n in range(4)
    ]
    rounds += [[beat(n), replace(beat(n, busy=0.9), code="train.py:2 in one")] for n in range(4, 6)]
    said = [found for beats in rounds if (found := straggler.find(beats, str))]
    assert (
        len(said) == 1
        and "While they waited it was most often in forward, unit 1 (train.py:2 in one); it is at"
        in said[0]
    )


def test_ranks_that_all_work_are_not_slow():
    straggler = Straggler(3)
    assert not any(straggler.find([beat(n, busy=0.9), beat(n, busy=0.8)], str) for n in range(9))


def test_set_up_does_not_count():
    straggler = Straggler(2)
    assert not any(
        straggler.find([beat(n, activity=Activity.SETUP), beat(n, busy=1.0)], str) for n in range(9)
    )
    assert [bool(straggler.find([beat(n), beat(n, busy=1.0)], str)) for n in range(3)] == [
        False,
        True,
        False,
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create and pidfd_open are Linux's")
def test_the_place_of_a_killed_process_can_be_read():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        position = Position()
        os.write(writer, str(position.descriptor).encode())
        time.sleep(0.2)  # the parent has it open by now
        position.begin_step(7)
        position.activity = Activity.BACKWARD
        position.progress[0], position.progress[1] = 2, 99
        position.leave_message("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    neighbour = Neighbour(Card("", "host", child, int(os.read(reader, 9))))
    assert not neighbour.has_ended
    os.waitpid(child, 0)
    assert neighbour.has_ended
    assert neighbour.place() == Place(Activity.BACKWARD, step=7, unit=2, exchanges=99)
    assert neighbour.message == "last words"
    neighbour.close()


def test_a_roll_call_has_one_answer_and_numbers_of_its_own(monkeypatch):
    store, error = dist.HashStore(), ValueError()
    positions = [Position() for _ in range(2)]
    cards = [Card("", "host", -1, -1), Card("", "another", -1, -1)]
    watches = [Watch(WatchOptions(), store, r, cards, positions[r]) for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        try:

            def answers(late):
                def answer(rank):
                    time.sleep(late * (1 - rank))
                    return watches[rank].all_end_with(error)

                return list(pool.map(answer, range(2)))

            assert answers(late=0.0) == [True, True]
            monkeypatch.setattr("lightning_zero3.strategies.liveness.watchdog.BEAT_S", 0.05)
            assert answers(late=1.0) == [False, False]  # rank 0 finds that rank 1 came, and went
        finally:
            for watch in watches:
                watch.stop()
