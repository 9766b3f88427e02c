"""Each test, and each file, finds the process as it would find a new one: what trainers leave
behind is taken away.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# where tests run as a background job, all processes would ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _put_back() -> Iterator[None]:
    """Lightning's cluster environments write variables and a rank; its trainers keep a process
    group and signal handlers.
    """
    environ, grouped, rank = (
        dict(os.environ),
        dist.is_initialized(),
        getattr(rank_zero_only, "rank", None),
    )
    handlers = {number: signal.getsignal(number) for number in _HEEDED}
    yield
    os.environ.clear()
    os.environ.update(environ)
    rank_zero_only.rank = rank
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if dist.is_initialized() and not grouped:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def test_isolation() -> Iterator[None]:
    with _put_back():
        yield


@pytest.fixture(autouse=True, scope="module")
def file_isolation() -> Iterator[None]:
    """What the fixtures of a file leave."""
    with _put_back():
        yield
