"""Evaluation steps that only some ranks run: the others take part in what is exchanged.

Ranks that run announce which units they unshard and read; ranks that assist listen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ..collectives import LocalCollectives
from ..engine import Exchange, Unit, Zero3Engine
from ..support.torch_internals import DisableFuncTorch


@contextmanager
def uneven_step(engine: Zero3Engine, step: AbstractContextManager[None]) -> Iterator[None]:
    """Be around a ``step`` of this rank in which others :func:`assist`."""

    def announce(unit: Unit, exchange: Exchange) -> None:
        _tell(engine.collectives, 1 + unit.labels[exchange])

    _release_all(engine)
    engine.pool.announce = announce
    try:
        with step:
            yield
        _tell(engine.collectives, 0)
    finally:
        engine.pool.announce = None
        _release_all(engine)


def assist(engine: Zero3Engine, steps: int) -> None:
    """Take part in what the others exchange in ``steps`` steps that this rank does not run."""
    for _ in range(steps):
        _release_all(engine)
        while code := _tell(engine.collectives, 0):
            index, exchange = divmod(code - 1, len(Exchange))
            unit = engine.units[index]
            if exchange == Exchange.UNSHARD:
                unit.reshard()
                unit.unshard()
                unit.wait()  # the rank that runs waits until this one has read
            else:
                unit.values()
        _release_all(engine)


def _tell(collectives: LocalCollectives, code: int) -> int:
    """Tell the others ``code``, and return what a rank that runs tells: the largest."""
    with DisableFuncTorch():  # a transform that runs would not let it be written to
        return int(collectives.agree(torch.tensor([code], dtype=torch.int64, device="cpu")))


def _release_all(engine: Zero3Engine) -> None:
    # From here on ranks that run and ranks that assist have the same units in their buffers
    # (none), and the same trace.
    for unit in engine.units:
        unit.reshard()
    engine.collectives.exchange_log.suspend_trace()
