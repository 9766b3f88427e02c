"""Behaviours that callbacks of Lightning and hooks of the module bring in: zero3 on two ranks; see
`in_the_trainer.py`.
"""

import re

import pytest
import torch
from torch import nn

from behaviours.harness import DIM
from behaviours.in_the_trainer import MODULES, check, refusal, run_all
from behaviours.promised import DROPPABLE
from behaviours.trainer_modules import sync_batch_norm
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda


def normed(rank, world_size):
    """The stand-in for SyncBatchNorm on this rank's part, and what torch computes of the whole
    batch in one process.
    """
    whole, weights = (
        torch.randn(8, DIM, generator=torch.Generator().manual_seed(k)) for k in range(2)
    )
    found = []
    for function, x, w in (
        (
            lambda norm, x: sync_batch_norm(norm, x),
            *(t.chunk(world_size)[rank].clone() for t in (whole, weights)),
        ),
        (lambda norm, x: nn.BatchNorm1d.forward(norm, x), whole, weights),
    ):
        norm = nn.SyncBatchNorm(DIM)
        for _ in range(2):
            out = function(norm, x.requires_grad_())
        out.mul(w).sum().backward()
        rows = [
            t.detach().chunk(world_size)[rank] if len(t) == len(whole) else t.detach()
            for t in (out, x.grad)
        ]
        found.append([*rows, *norm.buffers()])
    return found


def test_the_stand_in_for_sync_batch_norm_computes_what_batch_norm_does_of_the_whole_batch():
    for mine, expected in run_ranks(normed, 2):
        torch.testing.assert_close(mine, expected)


def marked(names):
    """The gate runs a sample of what nobody is promised."""
    return [
        pytest.param(name, marks=[pytest.mark.variant] if name in DROPPABLE else [])
        for name in names
    ]


RIGHT = [name for name, cls in MODULES.items() if not cls.refused]
REFUSED = [name for name, cls in MODULES.items() if cls.refused]


def chosen(request, test):
    """Those that are to be tested."""
    items = {
        item.callspec.params["name"] for item in request.session.items if item.originalname == test
    }
    return [name for name in RIGHT if name in items]


@pytest.fixture(scope="module")
def runs(request):
    """What every rank found, of zero3 and of its references."""
    names = chosen(request, "test_as_the_reference")
    like_ddp = [name for name in names if MODULES[name].reference == "ddp"]
    alone = [name for name in names if name not in like_ddp]
    timeout = 30 + 10 * len(names)
    return {
        "zero3": run_ranks(run_all, 2, names, "zero3", timeout=timeout),
        "ddp": run_ranks(run_all, 2, like_ddp, "ddp", timeout=timeout),
        "one process": run_ranks(run_all, 1, alone, "one", timeout=timeout),
    }


@pytest.mark.parametrize("name", marked(RIGHT))
def test_as_the_reference(name, runs):
    kind = "ddp" if MODULES[name].reference == "ddp" else "one process"
    check(name, *([found[name] for found in runs[each]] for each in ("zero3", kind)))


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, needs_cuda])]
)
def alone(request):
    """What one rank finds, on a CPU or GPU, and what it would without zero3."""
    names, found = chosen(request, "test_one_rank"), {}
    for engine in ("zero3", "ddp", "one"):
        mine = [name for name in names if engine in ("zero3", MODULES[name].reference)]
        (found[engine],) = run_ranks(
            run_all, 1, mine, engine, request.param, timeout=30 + 10 * len(mine)
        )
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_one_rank(name, alone):
    check(name, *([alone[engine][name]] for engine in ("zero3", MODULES[name].reference)))


@pytest.mark.parametrize("name", marked(REFUSED))
def test_refused(name):
    """On each rank, with the same reason."""
    for told in run_ranks(refusal, 2, name, timeout=60):
        assert re.search(MODULES[name].refused, told, re.DOTALL), told
