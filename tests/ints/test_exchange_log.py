"""What optimizers stepped with, as ranks compare it."""

import re

import pytest
import torch

from lightning_zero3.strategies.collectives import (
    DivergenceError,
    ExchangeLog,
    digest,
    require_same_settings,
    require_same_values,
)


def stepped(rates, times=1):
    """The exchange_log of a rank with one optimizer of the same class for each of ``rates``."""
    exchange_log = ExchangeLog()
    exchange_log.settings = lambda: [("Adam", 0, "lr", rate) for rate in rates]
    for _ in range(times):
        exchange_log.record_step([("Adam", 0, "gradients", 4)])
    return exchange_log


@pytest.mark.parametrize("other", [(0.1, 0.3), (0.3, 0.2)])
def test_optimizers_of_one_class_are_told_apart(other):
    ranks = [stepped((0.1, 0.2)).all_settings(), stepped(other).all_settings()]
    mine, theirs = next((a, b) for a, b in zip((0.1, 0.2), other, strict=True) if a != b)
    with pytest.raises(
        DivergenceError,
        match=re.escape(f"of param group 0 of Adam is {mine} on rank 0 and {theirs} on rank 1"),
    ):
        require_same_settings(ranks)
    require_same_settings([ranks[0], stepped((0.1, 0.2)).all_settings()])


def test_every_value_counts():
    """-1 and -2 have one hash in Python."""
    rates = (-2.0, -1.0, 0.0, 0.1)
    assert len({digest(stepped((rate,)).all_settings()) for rate in rates}) == len(rates)
    assert digest(stepped((0.1,)).all_settings()) == digest(stepped((0.1,)).all_settings())


def test_steps_without_a_backward_are_bounded_and_compared():
    """One of 6000 has another rate."""
    mine, theirs = stepped((-1.0,), 6000), stepped((-1.0,), 3000)
    assert len(mine.step_settings) <= 10_000
    theirs.settings = lambda: [("Adam", 0, "lr", -2.0)]
    theirs.record_step([("Adam", 0, "gradients", 4)])
    theirs.settings = lambda: [("Adam", 0, "lr", -1.0)]
    for _ in range(2999):
        theirs.record_step([("Adam", 0, "gradients", 4)])
    assert digest(mine.all_settings()) != digest(theirs.all_settings())
    with pytest.raises(DivergenceError, match="is -1.0 on rank 0 and -2.0 on rank 1"):
        require_same_settings([mine.all_settings(), theirs.all_settings()])


@pytest.mark.parametrize("note", [("w", "stored", 1), ("v", "written", 1), ("w", "written", 2)])
def test_what_a_value_is_of_counts(note):
    assert digest([("w", "written", 1)]) != digest([note])
    mine, theirs = ExchangeLog(), ExchangeLog()
    mine.record_step([("Adam", 0, "gradients, without that of parameter 'v'", 0)])
    theirs.record_step([("Adam", 0, "gradients, without that of parameter 'w'", 0)])
    assert digest(mine.all_settings()) != digest(theirs.all_settings())


def test_what_was_stored_is_not_forgotten_by_what_is_written():
    """Values of a rank's own, then an exchange: what is stored after it may be made of them."""
    ranks = [ExchangeLog(), ExchangeLog()]
    for rank, exchange_log in enumerate(ranks):
        exchange_log.record_write("w", "stored", torch.tensor(float(rank)))
        exchange_log.progress[1] += 1
        exchange_log.record_write("w", "written", torch.tensor(5.0))
        exchange_log.record_write("w", "stored", torch.tensor(5.0))
    with pytest.raises(DivergenceError, match="'w' was stored between steps"):
        require_same_values([exchange_log.checksums() for exchange_log in ranks])
