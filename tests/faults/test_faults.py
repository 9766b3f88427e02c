"""A few of the faults of docs/FAULTS.md, which `make_table.py` generates from all of them."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from faults.harness import Fault, reference, run

# fault -> what each other rank says, after "Rank <other> " for a death; and the exit code of the rank itself
FAULTS = {
    Fault("kill", "forward", 1, 3): ("Rank 1 died without a word", "in forward, unit net.blocks.1, step 5", -9),
    Fault("kill", "backward", 0, 2): ("Rank 0 died without a word", "in backward, unit ", -9),
    Fault("kill", "writing", 0, 2): ("Rank 0 died without a word", "in saving a checkpoint", -9),
    Fault("fail", "loading", 1, 2): ("Rank 1 raised 'ValueError: sample 17 is broken'", "the loop between steps", 1),
    Fault("freeze", "forward", 1, 2): ("Rank 1 on ", "in forward, unit net.blocks.1, step 5", None),
    Fault("fewer batches", "end", 1, 2): ("Rank 1 has ended its run before the others", "loaders of different length", 0),
}
ON_DEVICES = {
    Fault("other order", "device", 1, 3): ("In step 5: The ranks ran different things. At exchange ", "rank 1 to gather unit "),
    Fault("lonely barrier", "device", 1, 2): ("to gather unit ", "rank 1 to wait for the others at a barrier."),
}


@cache
def told_by_time():
    """Outcomes of the faults that only time can tell, tried beside each other to wait together."""
    faults = [*ON_DEVICES, *(fault for fault in FAULTS if fault.kind == "freeze")]
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


def test_diverging_ranks_all_say_so():
    outcome = run(Fault("other order", "forward", 1, 3))
    assert outcome.codes == {0: 1, 1: 1, 2: 1} and outcome.orphans == 0
    for rank, said in outcome.said.items():
        assert "DivergenceError: In step 5" in said and f"rank {rank} is about to gather unit" in said, said
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
