"""Modules that were created on the meta device get their values when the model is sharded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import LocalCollectives, make_collectives
from lightning_zero3.strategies.engine import Zero3Engine
from lightning_zero3.strategies.engine.buffers import Buffers


def _engine(model):
    device = torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    return Zero3Engine(model, device=device, collectives=make_collectives(group, device))


def _initialise(rank, world_size):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False))
    engine = _engine(model)
    for norm in (model[1], model[2]):
        assert torch.equal(norm.running_mean, torch.zeros(4))
        assert torch.equal(norm.running_var, torch.ones(4))
    with engine.step():
        assert model(torch.randn(8, 4)).isfinite().all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_norm_layers_start_from_meta(world_size):
    run_ranks(_initialise, world_size)


def test_buffers_stay_each_module_s_own_where_moving_them_makes_copies(monkeypatch):
    """As on a GPU: the tensors that were moved die, and a later module's new ones may get their addresses."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.BatchNorm1d(4, affine=False) for _ in range(64)))
    copies = {  # made now, so that they do not take the addresses
        torch.float32: [torch.empty(4) for _ in range(2 * 64)],
        torch.int64: [torch.empty((), dtype=torch.int64) for _ in range(64)],
    }
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", lambda tensor, device: copies[tensor.dtype].pop().copy_(tensor))
        Buffers(model, LocalCollectives(), torch.device("cpu"))
    assert len({id(buffer) for norm in model for buffer in norm._buffers.values()}) == 3 * 64
    for norm in model:
        assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([0.0] * 4, [1.0] * 4)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())


def test_a_buffer_whose_value_is_lost_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(Masked(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Buffer '0\.mask' is on the meta device"):
        _engine(model)
