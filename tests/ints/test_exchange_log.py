"""What optimizers stepped with, as ranks compare it."""

import pytest
import torch

from lightning_zero3.strategies.collectives import ExchangeLog, digest, first_difference


def stepped(rates, times=1):
    """The exchange_log of a rank with one optimizer of the same class for each of ``rates``."""
    exchange_log = ExchangeLog()
    exchange_log.settings = lambda: [f"'lr' = {rate} in Adam" for rate in rates]
    for _ in range(times):
        exchange_log.record_step(["4 gradients in Adam"])
    return exchange_log


@pytest.mark.parametrize("other", [(0.1, 0.3), (0.3, 0.2)])
def test_optimizers_of_one_class_are_told_apart(other):
    ranks = [stepped((0.1, 0.2)).records(), stepped(other).records()]
    mine, theirs = next((a, b) for a, b in zip((0.1, 0.2), other, strict=True) if a != b)
    told = f"rank 0 came to 'lr' = {mine} in Adam, rank 1 to 'lr' = {theirs} in Adam"
    assert told in first_difference(ranks, str)
    assert not first_difference([ranks[0], stepped((0.1, 0.2)).records()], str)


def test_every_value_counts():
    """-1 and -2 have one hash in Python."""
    rates = (-2.0, -1.0, 0.0, 0.1)
    assert len({digest(stepped((rate,)).records()) for rate in rates}) == len(rates)
    assert digest(stepped((0.1,)).records()) == digest(stepped((0.1,)).records())


def test_steps_without_a_backward_are_bounded_and_compared():
    """One of 6000 has another rate."""
    mine, theirs = stepped((-1.0,), 6000), stepped((-1.0,), 3000)
    assert len(mine.step_settings) <= 10_000
    theirs.settings = lambda: ["'lr' = -2.0 in Adam"]
    theirs.record_step(["4 gradients in Adam"])
    theirs.settings = lambda: ["'lr' = -1.0 in Adam"]
    for _ in range(2999):
        theirs.record_step(["4 gradients in Adam"])
    assert digest(mine.records()) != digest(theirs.records())
    told = "rank 0 came to 'lr' = -1.0 in Adam, rank 1 to 'lr' = -2.0 in Adam"
    assert told in first_difference([mine.records(), theirs.records()], str)


@pytest.mark.parametrize("note", [("w", "stored", 1), ("v", "written", 1), ("w", "written", 2)])
def test_what_a_value_is_of_counts(note):
    def written(name, kind, value):
        exchange_log = ExchangeLog()
        exchange_log.record_write(name, kind, torch.tensor(value))
        return exchange_log.records()

    assert digest(written("w", "written", 1)) == digest(written("w", "written", 1))
    assert digest(written("w", "written", 1)) != digest(written(*note))


def test_more_on_one_rank_is_a_difference():
    told = "rank 0 came to nothing more, rank 1 to 'lr' = 0.1 in Adam"
    assert told in first_difference([ExchangeLog().records(), stepped((0.1,)).records()], str)


def test_what_was_stored_is_not_forgotten_by_what_is_written():
    """Values of a rank's own, then an exchange: what is stored after it may be made of them."""
    ranks = [ExchangeLog(), ExchangeLog()]
    for rank, exchange_log in enumerate(ranks):
        exchange_log.record_write("w", "stored", torch.tensor(float(rank)))
        exchange_log.progress[1] += 1
        exchange_log.record_write("w", "written", torch.tensor(5.0))
        exchange_log.record_write("w", "stored", torch.tensor(5.0))
    difference = first_difference([exchange_log.records() for exchange_log in ranks], str)
    assert "a value stored to parameter 'w'" in difference


@pytest.mark.parametrize("suspended", [False, True])
def test_the_same_value_again_counts_once_in_an_evaluation(suspended):
    """A forward that clamps a weight runs more often on a rank with more batches."""
    ranks = [ExchangeLog(), ExchangeLog()]
    for times, exchange_log in enumerate(ranks, start=1):
        if suspended:
            exchange_log.suspend_trace()
        for _ in range(times):
            exchange_log.record_write("w", "written", torch.tensor(5.0))
    assert (ranks[0].records() == ranks[1].records()) is suspended
