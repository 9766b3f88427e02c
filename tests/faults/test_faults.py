"""A few of the faults of docs/FAULTS.md, which `make_table.py` generates from all of them."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from faults.harness import LIMIT_S, Fault, attempt, reference, run

# fault -> what each other rank says, after "Rank <other> " for a death; and the exit code of the rank itself
FAULTS = {
    Fault("kill", "forward", 1, 3): ("Rank 1 died without a word", "in forward, unit net.blocks.1, step 5", -9),
    Fault("kill", "backward", 0, 2): ("Rank 0 died without a word", "in backward, unit ", -9),
    Fault("kill", "writing", 0, 2): ("Rank 0 died without a word", "in saving a checkpoint", -9),
    Fault("fail", "loading", 1, 2): ("Rank 1 raised 'ValueError: sample 17 is broken'", "the loop between steps", 1),
    Fault("freeze", "forward", 1, 2): ("Rank 1 on ", "in forward, unit net.blocks.1, step 5", None),
}
# The same without a new run, in phases whose restart is no other.
AT_ONCE = {
    Fault("fail", "set-up", 1, 2): ("Rank 1 raised 'ValueError: sample 17 is broken'", "in set-up, step 0", 1),
    Fault("run out", "forward", 0, 2): ("Rank 0 raised 'MemoryError: cannot allocate 80 GiB'", "in forward, unit ", 1),
    Fault("fail", "optimizer step", 1, 2): ("Rank 1 raised 'ValueError: sample 17 is broken'", "in the optimizer step", 1),
    Fault("kill", "validation", 1, 2): ("Rank 1 died without a word", "in validation, unit ", -9),
}
ON_DEVICES = {
    Fault("fewer batches", "device", 0, 2): ("rank 0 came to end its training", "rank 1 to gather unit "),
    Fault("other order", "device", 1, 3): ("In step 5: The ranks ran different things. At exchange ", "rank 1 to gather unit "),
    Fault("lonely barrier", "device", 1, 2): ("to gather unit ", "rank 1 to wait for the others at a barrier."),
}
PAUSES = [Fault("pause", "forward", rank, 2) for rank in (0, 1)]  # rank 0 serves what the other asks


@cache
def told_by_time():
    """Outcomes of the faults that only time can tell, tried beside each other to wait together."""
    faults = [*ON_DEVICES, *PAUSES, *(fault for fault in FAULTS if fault.kind == "freeze")]
    for world_size in (2, 3):
        reference(world_size)
    with ThreadPoolExecutor(len(faults)) as pool:
        return dict(zip(faults, pool.map(run, faults), strict=True))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.phase}")
def test_the_others_end_and_say_why_and_a_new_run_goes_on(fault):
    who, where, code = FAULTS[fault]
    outcome = told_by_time()[fault] if fault.kind == "freeze" else run(fault)
    assert not outcome.hung and outcome.orphans == 0
    assert outcome.codes[fault.rank] == code
    for rank in set(range(fault.world_size)) - {fault.rank}:
        assert outcome.codes[rank] == 1
        assert who in outcome.said[rank] and where in outcome.said[rank], outcome.said[rank]
    # Five seconds without a report, and three to end; anything else is found at once.
    assert outcome.seconds < (15 if fault.kind == "freeze" else 8)
    assert outcome.resumed and outcome.difference == 0.0


@pytest.mark.parametrize("fault", AT_ONCE, ids=lambda f: f"{f.kind}-{f.phase}")
def test_the_others_end_and_say_why(fault, tmp_path):
    who, where, code = AT_ONCE[fault]
    outcome = attempt(tmp_path, fault, 2, LIMIT_S)
    other = 1 - fault.rank
    assert outcome.codes == {fault.rank: code, other: 1} and outcome.orphans == 0 and outcome.seconds < 8
    assert who in outcome.said[other] and where in outcome.said[other], outcome.said


def test_diverging_ranks_all_say_so():
    outcome = run(Fault("other order", "forward", 1, 3))
    assert outcome.codes == {0: 1, 1: 1, 2: 1} and outcome.orphans == 0
    for rank, said in outcome.said.items():
        assert "DivergenceError: In step 5" in said and f"rank {rank} is about to gather unit" in said, said
    assert outcome.difference == 0.0


def test_nobody_ends_well_where_one_rank_has_fewer_batches():
    outcome = run(Fault("fewer batches", "end", 0, 3))
    assert outcome.codes == {0: 1, 1: 1, 2: 1} and outcome.orphans == 0 and outcome.seconds < 8
    assert "DivergenceError: In step 4: " in outcome.said[0] and "rank 0 is about to end its training" in outcome.said[0]
    for rank in (1, 2):
        said = outcome.said[rank]
        assert "DivergenceError: In step 5: " in said and f"rank {rank} is about to gather unit" in said, said
        assert "rank 0 to end its training" in said and "loaders of different length" in said, said
    assert outcome.resumed and outcome.difference == 0.0


@pytest.mark.parametrize("fault", PAUSES, ids=lambda f: f"rank {f.rank} first")
def test_ranks_that_were_all_stopped_go_on(fault):
    outcome = told_by_time()[fault]
    assert outcome.codes == {0: 0, 1: 0}, outcome.said
    assert outcome.difference == 0.0


@pytest.mark.parametrize("fault", ON_DEVICES, ids=lambda f: f.kind)
def test_ranks_that_diverge_and_wait_for_their_devices_end(fault):
    outcome = told_by_time()[fault]
    assert set(outcome.codes.values()) == {1} and outcome.orphans == 0 and outcome.resumed
    for said in outcome.said.values():
        assert all(words in said for words in ON_DEVICES[fault]), said


def test_a_slow_rank_is_named_and_trains_on():
    outcome = run(Fault("doze", "loading", 1, 2))
    assert outcome.codes == {0: 0, 1: 0}
    assert "Rank 1 holds the others up" in outcome.said[0] and "in doze)" in outcome.said[0], outcome.said
    assert outcome.difference == 0.0
