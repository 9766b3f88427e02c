"""Modules that were created on the meta device get their values when the model is sharded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine
from lightning_zero3.strategies.engine.buffers import Buffers
from lightning_zero3.strategies.initial_values import Initializer


def _engine(model, loaded=()):
    device = torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    initial_values = Initializer(model, loaded)
    initial_values.fill_buffers()
    return Zero3Engine(
        model,
        device=device,
        collectives=make_collectives(group, device),
        initialize=initial_values.fill,
    )


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
    """As on a GPU: the tensors that were moved die, and a later module's new ones may get their
    addresses.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.BatchNorm1d(4, affine=False) for _ in range(64)))
    Initializer(model).fill_buffers()
    copies = {  # made now, so that they do not take the addresses
        torch.float32: [torch.empty(4) for _ in range(2 * 64)],
        torch.int64: [torch.empty((), dtype=torch.int64) for _ in range(64)],
    }
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor, "to", lambda tensor, device: copies[tensor.dtype].pop().copy_(tensor)
        )
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


# ---- values ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embed(tokens))))


def _tied(rank, world_size):
    with torch.device("meta"):
        model = Tied()
    torch.manual_seed(5 + rank)
    engine = _engine(model)
    assert model.head.weight is model.embed.weight and not model.embed.weight.is_meta
    with engine.step(), torch.no_grad():
        out = model(torch.arange(11))
    return {
        name: value.clone() for unit in engine.units for name, value in unit.values().items()
    }, out


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_are_those_that_rank_0_draws(world_size):
    model = Tied()
    torch.manual_seed(5)
    for module in (model.embed, model.hidden, model.norm):  # the head has the embedding's
        module.reset_parameters()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for values, out in run_ranks(_tied, world_size):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        torch.testing.assert_close(out, model(torch.arange(11)).detach())


def test_without_initial_values_a_parameter_on_the_meta_device_has_none():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
        Zero3Engine(model, device=torch.device("cpu"), collectives=LocalCollectives())


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


def test_a_parameter_that_nothing_initialises_is_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Gain())
    expected = (
        r"Parameter '1\.gain' is on the meta device, and no `reset_parameters\(\)` of Gain"
        r" initialises it.*or create the module on the CPU"
    )
    with pytest.raises(ValueError, match=expected):
        _engine(model)


TORCH_S = {  # layers of torch's that have a `_reset_parameters`, or layers that do
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "widths": lambda: nn.MultiheadAttention(8, 2, bias=False, kdim=4, vdim=6),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16),
    "both": lambda: nn.Transformer(8, 2, 1, 1, 16),  # it initialises layers of its layers anew
}


@pytest.mark.parametrize("make", TORCH_S.values(), ids=TORCH_S.keys())
def test_layers_of_torch_begin_with_the_values_of_their_constructors(make):
    torch.manual_seed(5)
    expected = dict(nn.ModuleDict({"one": nn.Linear(3, 3), "two": make()}).named_parameters())
    with torch.device("meta"):
        model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": make()})
    torch.manual_seed(5)
    Initializer(model).fill(model.named_parameters())  # one unit
    values = dict(model.named_parameters())
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values[name], value), name


# ---- `_init_weights` ---------------------------------------------------------------------------


class Attention(nn.Module):
    """Initialised by the model, through its layers."""

    def __init__(self):
        super().__init__()
        self.q, self.scale = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


class Model(nn.Module):
    """As Hugging Face's: `_init_weights` knows every layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 4), nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.apply(self._init_weights)

    def _init_weights(self, layer):
        if isinstance(layer, nn.Embedding):
            layer.weight.data.fill_(0.25)
        if isinstance(layer, nn.Linear):
            layer.weight.data.fill_(0.5)
            layer.bias.data.zero_()
        if isinstance(layer, Attention):
            layer.scale.data.fill_(3.0)
            layer.q.weight.data.fill_(0.75)
            layer.angles.copy_(torch.arange(4.0))


def _hugging_face(rank, world_size):
    with torch.device("meta"):
        model = nn.ModuleDict({"net": Model(), "head": nn.Linear(4, 1)})
    engine = _engine(model)
    found = {n: v.clone() for unit in engine.units for n, v in unit.values().items()}
    return found, {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_initialises_its_layers_as_in_its_constructor(world_size):
    expected = Model()
    for values, buffers in run_ranks(_hugging_face, world_size):
        for name, value in expected.named_parameters():
            assert torch.equal(values[f"net.{name}"], value), name
        assert values["net.blocks.0.q.weight"].unique().tolist() == [0.75]
        assert torch.equal(buffers["net.blocks.1.angles"], torch.arange(4.0))
        assert 0 < values["head.weight"].abs().max() < 0.5  # its own `reset_parameters`


def test_what_init_weights_leaves_as_it_is_is_refused():
    class Other(Model):
        def _init_weights(self, layer):
            if not isinstance(layer, Attention):
                super()._init_weights(layer)

    with torch.device("meta"):
        model = Other()
    with pytest.raises(ValueError, match=r"Buffer 'blocks.0.angles' is .* `_init_weights` sets"):
        _engine(model)
    for block in model.blocks:
        block.angles = torch.zeros(4)
    with pytest.raises(ValueError, match=r"Parameter 'blocks\.0\.scale' is on the meta device"):
        _engine(model)


def test_what_is_going_to_be_loaded_is_not_initialised():
    with torch.device("meta"):
        model = nn.Sequential(Masked(), Gain())
    names = {"0.mask", "0.linear.weight", "0.linear.bias", "1.gain"}
    engine = _engine(model, names)
    values = {n: v.clone() for unit in engine.units for n, v in unit.values().items()}
    assert values.keys() == names - {"0.mask"}
    assert not any(value.any() for value in values.values()) and not model[0].mask.any()
