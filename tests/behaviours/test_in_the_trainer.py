"""Behaviours that callbacks of Lightning and hooks of the module bring in: zero3 on two ranks against one process.

The one process trains on the joined batches. What it sees is the mean of what the ranks see, each of its own batches; norms,
clipped gradients, masks and the like are the same on every rank.
"""

import re

import pytest
import torch
from torch import nn

from behaviours import trainer_modules
from behaviours.harness import DIM
from behaviours.trainer_modules import sync_batch_norm
from behaviours.trainer_optimizers import OPTIMIZERS
from behaviours.trainer_states import STATES
from helpers.parity import full_state, trainer
from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import partition

MODULES = {**trainer_modules.MODULES, **OPTIMIZERS, **STATES}


def fit(module, strategy, world_size):
    validated = {"limit_val_batches": 1.0, "num_sanity_val_steps": 2}
    options = {"max_epochs": 3, "callbacks": module.callbacks(), **validated, **getattr(module, "options", {})}
    fitter = trainer(strategy, world_size, **options)
    fitter.fit(module)
    return fitter


def run_all(rank, world_size, names, strategy):
    """By name: what the module saw, and the weights that came out."""
    partition.SMALL_NUMEL = 0  # every block and every other layer is a unit of its own: units are given up and gathered again
    found = {}
    for name in names:
        module = MODULES[name]()
        fitter = fit(module, strategy, world_size)
        assert strategy != "zero3" or len(fitter.strategy.engine.units) > 4, name
        state = full_state(fitter)
        found[name] = module.seen, module.shared, {k: v.clone() for k, v in state.items()}
    return found


def normed(rank, world_size):
    """The stand-in for SyncBatchNorm on this rank's part, and what torch computes of the whole batch in one process."""
    whole, weights = (torch.randn(8, DIM, generator=torch.Generator().manual_seed(k)) for k in range(2))
    found = []
    for function, x, w in (
        (lambda norm, x: sync_batch_norm(norm, x), *(t.chunk(world_size)[rank].clone() for t in (whole, weights))),
        (lambda norm, x: nn.BatchNorm1d.forward(norm, x), whole, weights),
    ):
        norm = nn.SyncBatchNorm(DIM)
        for _ in range(2):
            out = function(norm, x.requires_grad_())
        out.mul(w).sum().backward()
        rows = [t.detach().chunk(world_size)[rank] if len(t) == len(whole) else t.detach() for t in (out, x.grad)]
        found.append([*rows, *norm.buffers()])
    return found


def test_the_stand_in_for_sync_batch_norm_computes_what_batch_norm_does_of_the_whole_batch():
    for mine, expected in run_ranks(normed, 2):
        torch.testing.assert_close(mine, expected)


SHARING = {"Summarized", "NormOfStateAddedUp", "GradientNorms", "ClippedByNorm", "ManualAccumulation", "PrunedAfterValidation"}
RIGHT = [name for name, cls in MODULES.items() if not cls.refused]
REFUSED = [name for name, cls in MODULES.items() if cls.refused]


@pytest.fixture(scope="module")
def runs(request):
    """What every rank found, of zero3 and of its references."""
    names = [name for name in RIGHT if any(f"[{name}]" in item.name for item in request.session.items)]
    like_ddp = [name for name in names if MODULES[name].reference == "ddp"]
    alone = [name for name in names if name not in like_ddp]
    timeout = 30 + 10 * len(names)
    return {
        "zero3": run_ranks(run_all, 2, names, "zero3", timeout=timeout),
        "ddp": run_ranks(run_all, 2, like_ddp, "ddp", timeout=timeout),
        "one process": run_ranks(run_all, 1, alone, "auto", timeout=timeout),
    }


def check(name, ranks, reference):
    """What every rank found of module ``name``, against every rank of the reference."""
    if MODULES[name].reference == "ddp":
        for (seen, *_), (expected, *_) in zip(ranks, reference, strict=True):
            torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))
    else:
        torch.testing.assert_close(sum(torch.tensor(seen) for seen, *_ in ranks) / 2, torch.tensor(reference[0][0]))
    assert len(reference[0][0]) >= 9
    for _, shared, _ in ranks:
        assert bool(shared) == (name in SHARING)
        torch.testing.assert_close(torch.tensor(shared), torch.tensor(reference[0][1]))
    torch.testing.assert_close(ranks[0][2], reference[0][2])


@pytest.mark.parametrize("name", RIGHT)
def test_as_the_reference(name, runs):
    kind = "ddp" if MODULES[name].reference == "ddp" else "one process"
    check(name, *([found[name] for found in runs[each]] for each in ("zero3", kind)))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(AssertionError) as failure:
        run_ranks(run_all, 2, [name], "zero3", timeout=60)
    assert re.search(MODULES[name].refused, str(failure.value), re.DOTALL), failure.value
