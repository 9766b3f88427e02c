"""What runs next, and how ranks that skip different units walk the same way through backward."""

from collections import deque
from itertools import product
from types import SimpleNamespace

from lightning_zero3.strategies.engine.backward import Backward
from lightning_zero3.strategies.engine.forward_order import ForwardOrder


def test_forward_learns_the_order_and_follows_changes():
    order = ForwardOrder()
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
    order = ForwardOrder()
    order.begin()
    assert [order.enter(u) for u in (0, 0, 1)] == [None, None, None]
    assert order.enter(0) == 1
    order.begin()
    assert order.enter(0) == 1


def visits_to(unit, coming):
    """What a backward visits when the gradient of an output of `unit` is there, and what is to come
    then, each time.
    """
    units, visits = [SimpleNamespace(index=index) for index in range(3)], []
    passes = SimpleNamespace(coming=coming, _current=None, _units=units, begin=lambda: None)
    passes._visit = lambda visited: visits.append((visited.index, [*coming][:1]))
    Backward.enter(passes, units[unit], None)
    return visits


def test_a_visit_that_is_not_expected_is_of_that_unit_alone():
    coming = deque([1, 0])
    assert visits_to(1, coming) == [(1, [0])] and [*coming] == [0]
    # once more: what other ranks expect next stays
    assert visits_to(1, coming) == [(1, [0])] and [*coming] == [0]


def test_visits_are_taken_one_by_one():
    """Each gathers the one after it ahead."""
    assert visits_to(2, deque([1, 0, 1, 2])) == [(1, [0]), (0, [1]), (1, [2]), (2, [])]


def test_every_rank_takes_every_visit_whatever_it_skips():
    """All tapes of 3 units and length 5, all subsets that a rank may use: each rank's visits are
    the tape reversed.
    """
    for tape in product(range(3), repeat=5):
        for used in product([False, True], repeat=5):
            coming, visits = deque(reversed(tape)), []
            for unit in (u for u, mine in zip(reversed(tape), used, strict=True) if mine):
                visits += [visited for visited, _ in visits_to(unit, coming)]
                assert visits[-1] == unit
            assert [*visits, *coming] == [*reversed(tape)]
