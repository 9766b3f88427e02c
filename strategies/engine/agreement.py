"""What the ranks tell each other on the host at the end of a backward pass."""

from __future__ import annotations

import torch

from ..collectives import (
    DivergenceError,
    LocalCollectives,
    Meeting,
    Setting,
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
    "read an optimizer's state of unit {} (`optimizer.state`, which all ranks read together)",
)


def compare_notes(collectives: LocalCollectives) -> None:
    """What ranks have written and stepped with since the last agreement, where no backward will
    compare it; collective.

    Raises:
        DivergenceError: naming a parameter or an option.
    """
    exchange_log = collectives.exchange_log
    _agree(collectives, Meeting.NOTES, [], list(exchange_log.step_settings))
    exchange_log.clear_records()


def _agree(
    collectives: LocalCollectives,
    meeting: Meeting,
    trace: list[int],
    settings: list[Setting],
    flags: bytes = b"",
) -> bytes:
    """The ``flags`` of any rank. Raises a DivergenceError that names the first difference in what
    ranks have exchanged, written and stepped with.
    """
    exchange_log = collectives.exchange_log
    mine = [*trace, meeting], exchange_log.checksums(), settings
    number = digest(*mine)
    votes = torch.tensor([number, -number, *flags], dtype=torch.int64, device="cpu")
    most, least, *agreed = collectives.agree(votes, meeting).tolist()
    if most != -least:
        traces, written, stepped = zip(*collectives.all_gather_object(mine), strict=True)
        if difference := first_difference(traces, exchange_log.describe):
            raise DivergenceError(difference)
        require_same_values(written)
        require_same_settings(stepped)
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
    exchange_log = collectives.exchange_log
    own = exchange_log.trace[1:], exchange_log.all_settings(), late + changed + used
    flags = _agree(collectives, Meeting.AGREEMENT, *own)
    exchange_log.start_trace()
    units, modules = len(late), len(late) + len(changed)
    return flags[:units], flags[units:modules], flags[modules:]


def describe_exchange(units: list[Unit], label: int) -> str:
    """What the label of an exchange stands for."""
    if label < 0:
        return Meeting(label).description  # type: ignore[call-arg]  # two values each
    index, exchange = divmod(label, len(Exchange))
    return _VERBS[exchange].format(units[index].name)
