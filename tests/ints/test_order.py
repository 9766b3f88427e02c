"""What runs next, and how ranks that skip different units walk the same way through backward."""

from itertools import product

from lightning_zero3.strategies.engine.order import BackwardSchedule, ForwardOrder


def test_forward_learns_the_order_and_follows_changes():
    order = ForwardOrder(foresees=True)
    order.begin()
    assert [order.enter(u) for u in (0, 1, 2)] == [None, None, None]
    order.begin()
    assert [order.enter(u) for u in (0, 1, 2)] == [1, 2, None]
    order.begin()
    assert [order.enter(u) for u in (0, 2, 1)] == [1, None, 2]  # wrong once
    order.begin()
    assert [order.enter(u) for u in (0, 2, 1)] == [2, 1, 2]
    order.begin()
    assert order.enter(1) == 2, "the end of a pass does not lead to the start of the next"


def test_forward_of_a_unit_twice_in_a_row():
    order = ForwardOrder(foresees=True)
    order.begin()
    assert [order.enter(u) for u in (0, 0, 1)] == [None, None, None]
    assert order.enter(0) == 1
    order.begin()
    assert order.enter(0) == 1


def test_backward_is_the_reverse():
    schedule = BackwardSchedule()
    for unit in (0, 1, 2, 1):
        schedule.record(unit)
    for expected, following, once_more in ((1, [2], True), (2, [1], True), (1, [0], False), (0, [], False)):
        assert schedule.advance() == expected
        assert schedule.coming[-1:] == following
        assert bool(schedule.left[1]) == once_more
    assert not schedule.left[0]  # one more visit of it would be outside the schedule


def test_a_cleared_schedule_has_no_visits():
    schedule = BackwardSchedule()
    for unit in (0, 1):
        schedule.record(unit)
    schedule.clear()
    assert (schedule.coming, schedule.left[0], schedule.left[1]) == ([], 0, 0)
    schedule.record(1)
    assert (schedule.advance(), schedule.coming, schedule.left[1]) == (1, [], 0)


def test_forwards_after_a_backward_are_what_the_next_one_visits():
    """Two backwards in one step, the second of a loss that runs fewer units: a critic on real samples after made ones."""
    schedule = BackwardSchedule()
    for unit in (0, 1):
        schedule.record(unit)
    assert [schedule.advance(), schedule.advance(), schedule.coming] == [1, 0, []]
    for again in (1, 2):
        for _ in range(again):
            schedule.record(1)
        assert not schedule.left[0]
        assert [schedule.advance() for _ in range(again)] == [1] * again
        assert (schedule.coming, schedule.left[1]) == ([], 0)


def test_every_rank_takes_every_visit_whatever_it_skips():
    """All tapes of 3 units and length 5, all subsets that a rank may use: each rank's visits are the tape reversed."""
    for tape in product(range(3), repeat=5):
        for used in product([False, True], repeat=5):
            schedule = BackwardSchedule()
            for unit in tape:
                schedule.record(unit)
            visits = []
            for unit in (u for u, mine in zip(reversed(tape), used, strict=True) if mine):
                while schedule.left[unit]:
                    visits.append(schedule.advance())
                    if visits[-1] == unit:
                        break
            assert visits == [*reversed(tape)][: len(visits)]
            assert schedule.coming == list(tape[: len(tape) - len(visits)])
            while schedule.coming:
                visits.append(schedule.advance())
            assert visits == [*reversed(tape)]
            assert not any(schedule.left.values())
