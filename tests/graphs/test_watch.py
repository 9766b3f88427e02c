"""What a watch sees of a step, and what it does not take for the user's."""

import re
from threading import Thread
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint

from lightning_zero3.callbacks.graph_watch import Watch


def watched(program, x):
    watch = Watch(x.device, x)
    with watch.watching(None, forward=True):
        program(x)
    return watch


def test_values_that_the_watch_reads_itself_are_no_problem(monkeypatch):
    state = torch.zeros(16, dtype=torch.uint8)  # of a CUDA generator: the seed and the offset
    monkeypatch.setattr(torch, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch, "set_rng_state", lambda _: None)
    x = torch.ones(2, requires_grad=True)
    assert watched(lambda x: checkpoint(torch.tanh, x * torch.tensor(2.0), use_reentrant=False), x).problems == []


def splits(x):
    return x * len(re.compile("a+").findall("aab"))


def test_the_standard_library_is_not_taken_for_the_users():
    tables = [table["__name__"] for table, _ in watched(splits, torch.ones(2)).globals.values()]
    assert not [name for name in tables if name.partition(".")[0] in ("re", "enum")]


ALPHA, SETTINGS = 1.0, SimpleNamespace(beta=1.0)


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ALPHA


def test_functions_of_a_backward_in_another_thread_are_seen():
    """As on CUDA, where autograd has a thread for each device."""
    x = torch.ones(2, requires_grad=True)
    loss = Scales.apply(x).sum()
    x.register_hook(lambda gradient: gradient * SETTINGS.beta)
    watch = Watch(x.device, x)

    def backward():
        with watch:
            loss.backward()

    with watch.watching(None, forward=False):
        thread = Thread(target=backward)
        thread.start()
        thread.join()
    assert {name for table, name in watch.globals.values() if table is globals()} == {"ALPHA", "SETTINGS"}
    assert "beta" in watch.names
