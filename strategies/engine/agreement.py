"""What the ranks tell each other on the host at the end of a backward pass."""

from __future__ import annotations

import torch

from ..collectives import DivergenceError, LocalCollectives, Meeting, digest, first_difference
from .unit import Exchange, Unit

# By `Exchange`.
_VERBS = (
    "unshard unit {}",
    "read or save weights of unit {} (one rank alone: in `strategy.gathered`)",
    "read gradients of unit {}",
    "reduce the gradients of unit {}",
    "read an optimizer's state of unit {} (`optimizer.state`, which all ranks read together)",
)


def compare_notes(collectives: LocalCollectives) -> None:
    """What ranks have written and stepped with since the last agreement, where no backward will
    compare it; collective.

    Raises:
        DivergenceError: naming a parameter or an option.
    """
    _agree(collectives, Meeting.NOTES, [])


def _agree(
    collectives: LocalCollectives, meeting: Meeting, trace: list[int], flags: bytes = b""
) -> bytes:
    """The ``flags`` of any rank. Raises a DivergenceError that names the first difference in what
    ranks have exchanged, written and stepped with.
    """
    exchange_log = collectives.exchange_log
    mine = [*trace, meeting], exchange_log.records()
    number = digest(*mine)
    votes = torch.tensor([number, -number, *flags], dtype=torch.int64, device="cpu")
    most, least, *agreed = collectives.agree(votes, meeting).tolist()
    if most != -least:
        traces, records = zip(*collectives.all_gather_object(mine), strict=True)
        for everyone, describe in (traces, exchange_log.describe), (records, str):
            if difference := first_difference(everyone, describe):
                raise DivergenceError(difference)
    exchange_log.clear_records()
    return bytes(agreed)


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
    trace = collectives.exchange_log.trace[1:]
    flags = _agree(collectives, Meeting.AGREEMENT, trace, late + changed + used)
    collectives.exchange_log.start_trace()
    units, modules = len(late), len(late) + len(changed)
    return flags[:units], flags[units:modules], flags[modules:]


def describe_exchange(units: list[Unit], label: int) -> str:
    """What the label of an exchange stands for."""
    if label < 0:
        return Meeting(label).description  # type: ignore[call-arg]  # two values each
    index, exchange = divmod(label, len(Exchange))
    return _VERBS[exchange].format(units[index].name)
