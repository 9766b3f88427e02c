"""What the ranks tell each other on the host at the end of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives import (
    DivergenceError,
    LocalCollectives,
    Meeting,
    digest,
    first_difference,
    require_same_settings,
    require_same_values,
)
from .unit import Exchange, Unit

# By `Exchange`.
_VERBS = (
    "unshard unit {}",
    "read or save weights of unit {} (one rank alone: in `strategy.gathered`)",
    "read gradients of unit {}",
    "reduce the gradients of unit {}",
)


def compare_notes(collectives: LocalCollectives) -> None:
    """What ranks have written and stepped with since the last agreement, where no backward will
    compare it; collective.

    Raises:
        DivergenceError: naming a parameter or an option.
    """
    exchange_log = collectives.exchange_log
    written = exchange_log.checksums()
    stepped = list(exchange_log.step_settings)
    is_same, _ = _agree(collectives, Meeting.NOTES, digest(written, stepped))
    if not is_same:
        _require_same(collectives.all_gather_object((written, stepped)))
    exchange_log.clear_records()


def _agree(
    collectives: LocalCollectives, meeting: Meeting, number: int, flags: bytes = b""
) -> tuple[bool, bytes]:
    """Whether all ranks come with the same ``number``, and the ``flags`` of any."""
    votes = torch.tensor([number, -number, *flags], dtype=torch.int64, device="cpu")
    most, least, *agreed = collectives.agree(votes, meeting).tolist()
    return most == -least, bytes(agreed)


def _require_same(everyone: Sequence[Any]) -> None:
    """Raise the error that names the first difference in what ranks wrote and stepped with."""
    require_same_values([written for written, _ in everyone])
    require_same_settings([settings for _, settings in everyone])


def reach_agreement(
    collectives: LocalCollectives, late: bytes, changed: bytes, used: bytes
) -> tuple[bytes, bytes, bytes]:
    """One small message of every rank at the end of a backward: did all run the same, what has
    gradients, what is late, whose buffers changed. Returns the same of all ranks together;
    collective.

    Args:
        collectives: the communicator, with this rank's log.
        late: for each unit, whether gradients came after their reduction.
        changed: what :meth:`.Buffers.changed` says.
        used: for each trained parameter, whether it has a gradient.

    Raises:
        DivergenceError: the ranks did not exchange the same things in the same order since the
            last time, wrote other values, or have other options in their optimizers.
    """
    if collectives.alone:
        return late, changed, used
    exchange_log = collectives.exchange_log
    written = exchange_log.checksums()
    number, flags = exchange_log.digest(written), late + changed + used
    is_same, flags = _agree(collectives, Meeting.AGREEMENT, number, flags)
    if not is_same:
        trace = [*exchange_log.trace[1:], Meeting.AGREEMENT]
        everyone = collectives.all_gather_object((trace, written, exchange_log.all_settings()))
        if difference := first_difference([each[0] for each in everyone], exchange_log.describe):
            raise DivergenceError(difference)
        _require_same([others for _, *others in everyone])
    exchange_log.start_trace()
    units, modules = len(late), len(late) + len(changed)
    return flags[:units], flags[units:modules], flags[modules:]


def describe_exchange(units: list[Unit], label: int) -> str:
    """What the label of an exchange stands for."""
    if label < 0:
        return Meeting(label).description  # type: ignore[call-arg]  # two values each
    index, exchange = divmod(label, len(Exchange))
    return _VERBS[exchange].format(units[index].name)
