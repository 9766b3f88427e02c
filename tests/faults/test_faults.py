"""A few of the faults of docs/FAULTS.md, which `make_table.py` generates from all of them."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from faults import program
from faults.harness import LIMIT_S, Fault, attempt, reference, run

# fault -> what each other rank says; the exit code of the rank itself; the step of the last
# complete checkpoint, or the first
FAULTS = {
    Fault("kill", "first step", 1, 2): ("Rank 1 died without a word", "step 0", -9, 0),
    Fault("kill", "forward", 1, 3): (
        "Rank 1 died without a word",
        "in forward, unit net.blocks.1, step 5",
        -9,
        4,
    ),
    Fault("kill", "backward", 0, 2): ("Rank 0 died without a word", "in backward, unit ", -9, 4),
    Fault("kill", "checkpoint", 1, 2): (
        "Rank 1 died without a word",
        "in saving a checkpoint",
        -9,
        2,
    ),
    Fault("kill", "writing", 0, 2): ("Rank 0 died without a word", "in saving a checkpoint", -9, 2),
    Fault("fail", "loading", 1, 2): (
        "Rank 1 raised 'ValueError: sample 17 is broken'",
        "the loop between steps",
        1,
        4,
    ),
    Fault("skipped step", "forward", 1, 2): (
        "Rank 1 raised 'RuntimeError: Skipping the `training_step`",
        "step 5",
        1,
        4,
    ),
    Fault("freeze", "forward", 1, 2): (
        "Rank 1 on ",
        "in forward, unit net.blocks.1, step 5",
        None,
        4,
    ),
}
# The same without a new run, in phases whose restart is no other.
AT_ONCE = {
    Fault("fail", "set-up", 1, 2): (
        "Rank 1 raised 'ValueError: sample 17 is broken'",
        "in set-up",
        1,
    ),
    Fault("run out", "forward", 0, 2): (
        "Rank 0 raised 'MemoryError: cannot allocate 80 GiB'",
        "in forward, unit ",
        1,
    ),
    Fault("fail", "optimizer step", 1, 2): (
        "Rank 1 raised 'ValueError: sample 17 is broken'",
        "in the optimizer step",
        1,
    ),
    Fault("kill", "validation", 1, 2): ("Rank 1 died without a word", "in validation, unit ", -9),
    Fault("fail", "checkpoint", 0, 2): (
        "Rank 0 raised 'ValueError: sample 17 is broken'",
        "in saving a checkpoint",
        1,
    ),
    Fault("crash", "backward", 0, 2): ("Rank 0 died without a word", "in backward, unit ", -11),
    Fault("leave", "callback", 1, 2): (
        "Rank 1 died without a word",
        "in the loop between steps",
        7,
    ),
}
AT_ONCE |= {
    Fault("mute", "callback", rank, 2): (
        f"Rank {rank} has stopped watching: its watch .* raised .TypeError",
        "says where.",
        1,
    )
    for rank in (0, 1)  # rank 0 serves what the other asks
}
ALONE = "Look for what one rank does alone"
DIVERGENCES = [Fault("other order", "forward", 1, 3), Fault("skipped unit", "forward", 0, 2)]
ON_DEVICES = {
    Fault("fewer batches", "device", 0, 2): (
        "rank 0 came to end its training",
        "rank 1 to unshard unit ",
    ),
    Fault("other order", "device", 1, 3): (
        "In step 5: The ranks ran different things. At entry ",
        "rank 1 to unshard unit ",
    ),
    Fault("lonely barrier", "device", 1, 2): (
        "to unshard unit ",
        "rank 1 to wait for the others at a barrier.",
        ALONE,
    ),
}
# rank 0 serves what the other asks
PAUSES = [Fault("pause", "forward", rank, 2) for rank in (0, 1)]
HOLDS = [Fault("hold", "callback", rank, 2) for rank in (0, 1)]
APART = Fault("wait apart", "callback", 1, 3)
SLOW = Fault("doze", "loading", 1, 2)


@cache
def told_by_time():
    """Outcomes of the faults that only time can tell, tried beside each other to wait together."""
    faults = [
        *ON_DEVICES,
        *PAUSES,
        *HOLDS,
        APART,
        *(fault for fault in FAULTS if fault.kind == "freeze"),
    ]
    for world_size in (2, 3):
        reference(world_size)
    with ThreadPoolExecutor(len(faults)) as pool:
        return dict(zip(faults, pool.map(run, faults), strict=True))


def says(text, who, where):
    """Of the rank that failed, not of the one that says so."""
    theirs = re.split(r" Rank \d+ ends too;", text)[0]
    return re.search(who, theirs) is not None and where in theirs


def goes_on(outcome, fault, step):
    """All ranks of the second run began at ``step``, and took the same steps as without a fault."""
    assert outcome.resumed and outcome.begun == dict.fromkeys(range(fault.world_size), [0, step])
    return outcome.difference


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.phase}")
def test_the_others_end_and_say_why_and_a_new_run_goes_on(fault):
    who, where, code, step = FAULTS[fault]
    outcome = told_by_time()[fault] if fault.kind == "freeze" else run(fault)
    assert not outcome.hung and outcome.codes[fault.rank] == code
    assert outcome.orphans == 0 and outcome.workers == fault.world_size * (
        fault.phase in program.WITH_WORKERS
    )
    for rank in set(range(fault.world_size)) - {fault.rank}:
        assert outcome.codes[rank] == 1
        assert says(outcome.said[rank], who, where), outcome.said[rank]
    # Five seconds without a report, and three to end; anything else is found at once.
    assert outcome.seconds < (15 if fault.kind == "freeze" else 8)
    assert goes_on(outcome, fault, step) == 0.0


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda f: f"{f.kind}-{f.phase}")
def test_the_others_end_and_say_why(fault, tmp_path):
    who, where, code = AT_ONCE[fault]
    outcome = attempt(tmp_path, fault, 2, LIMIT_S)
    other = 1 - fault.rank
    assert (
        outcome.codes == {fault.rank: code, other: 1}
        and outcome.orphans == 0
        and outcome.seconds < 8
    )
    assert outcome.workers == 2 * (fault.phase in program.WITH_WORKERS)
    assert says(outcome.said[other], who, where), outcome.said


@pytest.mark.parametrize("fault", DIVERGENCES, ids=lambda f: f.kind)
def test_diverging_ranks_all_say_so(fault):
    outcome = run(fault)
    assert (
        outcome.codes == dict.fromkeys(range(fault.world_size), 1)
        and outcome.orphans == 0
        and outcome.seconds < 8
    )
    for rank, said in outcome.said.items():
        assert re.search(f"DivergenceError: In step 5.* rank {rank} is about to .*unit", said), said
    assert goes_on(outcome, fault, 4) == 0.0


@pytest.mark.parametrize("kind", ["lonely forward", "lonely save"])
def test_what_one_rank_does_alone_is_what_to_look_for(kind, tmp_path):
    outcome = attempt(tmp_path, Fault(kind, "end", 0, 2), 2, LIMIT_S)
    assert outcome.codes == {0: 1, 1: 1} and outcome.orphans == 0 and outcome.seconds < 8
    assert all(
        "DivergenceError: In step 4" in said and ALONE in said for said in outcome.said.values()
    ), outcome.said


def test_nobody_ends_well_where_one_rank_has_fewer_batches():
    fault = Fault("fewer batches", "end", 0, 3)
    outcome = run(fault)
    assert outcome.codes == {0: 1, 1: 1, 2: 1} and outcome.orphans == 0 and outcome.seconds < 8
    assert (
        "DivergenceError: In step 4: " in outcome.said[0]
        and "rank 0 is about to end its training" in outcome.said[0]
    )
    for rank in (1, 2):
        said = outcome.said[rank]
        assert (
            "DivergenceError: In step 5: " in said
            and f"rank {rank} is about to unshard unit" in said
        ), said
        assert "rank 0 to end its training" in said and "loaders of different length" in said, said
    assert goes_on(outcome, fault, 4) == 0.0


@pytest.mark.parametrize("fault", PAUSES, ids=lambda f: f"rank {f.rank} first")
def test_ranks_that_were_all_stopped_go_on(fault):
    outcome = told_by_time()[fault]
    assert outcome.codes == {0: 0, 1: 0}, outcome.said
    assert goes_on(outcome, fault, program.STEPS) == 0.0


@pytest.mark.parametrize("fault", HOLDS, ids=lambda f: f"rank {f.rank}")
def test_a_rank_that_keeps_pythons_lock_is_named_and_trains_on(fault):
    outcome = told_by_time()[fault]
    assert outcome.codes == {0: 0, 1: 0}, outcome.said
    assert goes_on(outcome, fault, program.STEPS) == 0.0
    said = outcome.said[1 - fault.rank]
    assert re.search(rf"Rank {fault.rank} has not reported for [5-9] s, but its process runs", said)


@pytest.mark.parametrize("fault", ON_DEVICES, ids=lambda f: f.kind)
def test_ranks_that_diverge_and_wait_for_their_devices_end(fault):
    outcome = told_by_time()[fault]
    assert (
        set(outcome.codes.values()) == {1} and outcome.orphans == 0 and outcome.seconds is not None
    )
    assert goes_on(outcome, fault, 4) < 1e-6  # sums before the fault are in another order
    for said in outcome.said.values():
        assert all(words in said for words in ON_DEVICES[fault]), said


def test_a_slow_rank_is_named_and_trains_on():
    outcome = run(SLOW)  # by itself: who gets less of a busy machine is slow, too
    assert outcome.codes == {0: 0, 1: 0}, outcome.said
    assert re.search(r"Rank 1 holds the others up.*in doze\)", outcome.said[0]), outcome.said
    assert goes_on(outcome, SLOW, program.STEPS) == 0.0


def test_ranks_that_wait_in_different_collectives_of_their_own_are_told_where():
    outcome = told_by_time()[APART]
    assert outcome.codes == {0: 0, 1: 0, 2: 0}, outcome.said
    assert goes_on(outcome, APART, program.STEPS) == 0.0
    where = (
        r"in the loop between steps \(loading data, callbacks\), step 4 \(\S+program.py:(\d+) in"
        r" wait_apart\)"
    )
    found = re.search(
        f"Nobody has moved for 3 s.*: ranks 0, 2 {where}; rank 1 {where}. If", outcome.said[0]
    )
    assert found, outcome.said
    source = Path(program.__file__).read_text().splitlines()
    lines = [source[int(number) - 1].strip() for number in found.groups()]
    assert lines[0] == "torch.distributed.barrier()" and lines[1].startswith(
        "torch.distributed.recv("
    ), lines
