"""Which tests a tier runs, and that each test finds the process as it would find a new one."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from helpers import tiers

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("fast", "gate", "all"), default="all")


def _commit() -> str:
    command = ["git", "-C", str(_HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def pytest_report_header(config: pytest.Config) -> str:
    return f"tier: {config.getoption('tier')}, variants drawn by commit {_commit() or 'none'}"


def _name(item: pytest.Item) -> str:
    """As in helpers/tiers.py."""
    return item.path.relative_to(_HERE).as_posix() + item.nodeid[item.nodeid.index("::") :]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier, commit = config.getoption("tier"), _commit()

    def belongs(item: pytest.Item) -> bool:
        is_variant = item.get_closest_marker("variant") is not None
        return tiers.belongs(_name(item), is_variant, tier, commit)

    kept = [item for item in items if belongs(item)]
    if tier == "all" and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        names = [_name(item) for item in items]
        for glob in (*tiers.FAST, *tiers.LONG, *tiers.VARIANTS):
            if not any(tiers.matches([glob], name) for name in names):
                raise pytest.UsageError(f"tests/helpers/tiers.py: {glob} is no test")
    gone = set(items) - set(kept)
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = kept


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
