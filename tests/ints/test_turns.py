"""Who runs which evaluation step, for all numbers of batches on one to four ranks."""

import itertools

from lightning_zero3.strategies.evaluation.uneven_plan import Turn, plan_turns

COUNTS = [counts for ranks in (1, 2, 3, 4) for counts in itertools.product(range(4), repeat=ranks)]


def test_every_step_is_run_or_assisted_by_each_rank():
    for everyone in COUNTS:
        least, most = min(everyone), max(everyone)
        for rank, mine in enumerate(everyone):
            turns = plan_turns(everyone, rank)
            # One for each batch; a rank without any has one in which it helps, if there is somebody
            # to help.
            assert len(turns) == (mine or min(most, 1)), (everyone, rank)
            # Step by step: all run it, some do and are helped, or this rank helps.
            does = []
            for turn in turns:
                does += ([] if mine == 0 else ["some" if turn.is_uneven else "all"]) + [
                    "helps"
                ] * turn.assisted_steps
            assert does == ["all"] * least + ["some"] * (mine - least) + ["helps"] * (
                most - mine
            ), (everyone, rank)


def test_what_was_logged_is_shared_once_and_by_all_in_their_last_turn():
    for everyone in COUNTS:
        for rank in range(len(everyone)):
            lacking = [turn.has_empty_rank for turn in plan_turns(everyone, rank)]
            last = [min(everyone) == 0] if max(everyone) else []
            assert lacking == [False] * (len(lacking) - len(last)) + last, (everyone, rank)


def test_examples():
    assert plan_turns([2, 2], 1) == [Turn(), Turn()]
    assert plan_turns([3, 1], 0) == [Turn(), Turn(is_uneven=True), Turn(is_uneven=True)]
    assert plan_turns([3, 1], 1) == [Turn(assisted_steps=2)]
    assert plan_turns([0, 2], 0) == [Turn(assisted_steps=2, has_empty_rank=True)]
    assert plan_turns([0, 2], 1) == [
        Turn(is_uneven=True),
        Turn(is_uneven=True, has_empty_rank=True),
    ]
