"""Functions of torch that take a tensor's memory without a look at its class."""

import copy
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import PairwiseCollectives, make_collectives
from lightning_zero3.strategies.engine import ResidencyError, Zero3Engine, gathered

CPU = torch.device("cpu")


def build(model, communicator=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    communicator = communicator or make_collectives(dist.group.WORLD, CPU)
    return optimizer, Zero3Engine(
        model,
        [optimizer],
        device=CPU,
        collectives=communicator,
        unit_policy=lambda m: list(m),
        **options,
    )


def function(weight):
    return weight.square().sum()


TRANSFORMS = {
    "grad": lambda p: torch.func.grad(function)(p),
    "grad_and_value": lambda p: torch.func.grad_and_value(function)(p),
    "vjp": lambda p: torch.func.vjp(function, p),
    "jacrev": lambda p: torch.func.jacrev(function)(p),
    "jacfwd": lambda p: torch.func.jacfwd(function)(p),
    "hessian": lambda p: torch.func.hessian(function)(p),
    "jvp": lambda p: torch.func.jvp(function, (p,), (torch.ones(p.shape),)),
    "in a dict": lambda p: torch.func.grad(lambda weights: function(weights["p"]))({"p": p}),
    "by name": lambda p: torch.func.grad(lambda x, weight: (x * weight).sum())(
        torch.ones(p.shape), weight=p
    ),
}


def transformed(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    build(model)
    for name, transform in TRANSFORMS.items():
        with pytest.raises(
            ResidencyError, match="'0.weight' is sharded over the ranks and was read outside a step"
        ):
            transform(model[0].weight)
            print(name)  # pytest does not say it


def test_transforms_that_differentiate_are_told_what_rests():
    run_ranks(transformed, 2)


def moved_weights(rank, world_size):
    """Two recurrent layers whose `flatten_parameters` does what it does on CUDA: it moves the
    weights to new memory.
    """

    def flatten(self):
        moved.append(self)
        with torch.no_grad():
            for weight in self._flat_weights:
                weight.set_(weight.clone())

    moved, nn.RNNBase.flatten_parameters = [], flatten

    class Layer(nn.GRU):
        def forward(self, x):
            self.flatten_parameters()
            return super().forward(x)[0]

    def train(sharded):
        torch.manual_seed(0)
        model = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 4))
        optimizer, engine = (
            build(model) if sharded else (torch.optim.SGD(model.parameters(), lr=0.1), None)
        )
        moved.clear()
        losses = []
        for step in range(3):
            # the same on all ranks
            batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            if sharded:
                model[1].flatten_parameters()
                with engine.step():
                    loss = model(batch).square().mean()
                with engine.backward():
                    loss.backward()
            else:
                loss = model(batch).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert bool(moved) != sharded
        if sharded:  # what the engine no longer has moves again
            engine.unshard()
            model[1].flatten_parameters()
            assert moved == [model[1]]
        return losses

    expected = train(False)
    torch.testing.assert_close(train(True), expected)
    assert expected[0] != expected[-1]


def test_recurrent_layers_stay_in_their_slots():
    run_ranks(moved_weights, 2)


def sizes(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    build(model, slot_dtype=lambda name, parameter: torch.bfloat16)
    p = model[1].weight
    return p.dtype, p.element_size(), p.itemsize, p.nbytes, p.storage_offset()


def test_sizes_are_those_of_the_users_dtype():
    assert run_ranks(sizes, 2) == [(torch.float32, 4, 4, 64, 0)] * 2


def scripted_norm(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    x = nn.functional.batch_norm(x, mean, variance, training=True)
    return x + torch.tensor(0.5) + torch.as_tensor(2)


def constructed(x):
    values = torch.tensor([1.0, 2.0]).sum() + torch.as_tensor(3.0) + torch.asarray([4.0]).sum()
    return nn.functional.batch_norm(x, None, None, training=True) * values + torch.tensor(
        x.shape[0], dtype=x.dtype
    )


def wrapped(rank, world_size, compiled_before):
    """What goes by the identity of a function of torch does so, whether it was asked before
    functions are wrapped or after.
    """
    x = torch.linspace(-1, 1, 8).view(4, 2)
    zeros, ones = torch.zeros(2), torch.ones(2)
    expected = constructed(x), scripted_norm(x, zeros.clone(), ones.clone())
    if compiled_before:
        torch.compile(lambda x: x + torch.tensor(1.0), backend="eager", fullgraph=True)(x)
        torch.jit.script(scripted_norm)
        torch._dynamo.reset()
    before = torch.tensor
    build(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert torch.tensor is not before
    compiled, scripted = (
        torch.compile(constructed, backend="aot_eager", fullgraph=True),
        torch.jit.script(scripted_norm),
    )
    torch.testing.assert_close((compiled(x), scripted(x, zeros, ones)), expected)
    assert not torch.equal(ones, torch.ones(2)), "running statistics stayed as they were"
    mode = torch.device("meta")
    with mode:
        made = torch.tensor(1.0), torch.as_tensor([1.0]), torch.asarray([1.0])
    assert all(tensor.device == mode for tensor in made)
    assert torch.tensor([1, 2]).tolist() == [1, 2] and torch.equal(
        torch.tensor(data=1.0), torch.ones(())
    )


@pytest.mark.parametrize("compiled_before", [True, False])
def test_compilers_and_contexts_know_the_functions_that_are_wrapped(compiled_before):
    run_ranks(wrapped, 2, compiled_before, timeout=120)


def own_exchanges(rank, world_size):
    """Who watches the group's methods is asked in no exchange of the engine's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    _, engine = build(model, PairwiseCollectives(dist.group.WORLD))
    asked = []
    for name in ("send", "recv"):
        method = getattr(dist.ProcessGroup, name)
        setattr(
            dist.ProcessGroup,
            name,
            lambda *args, method=method, name=name: asked.append(name) or method(*args),
        )
    with engine.step():
        loss = model(torch.ones(2, 4)).sum()
    with engine.backward():
        loss.backward()
    return asked


def test_the_engine_does_not_pay():
    assert run_ranks(own_exchanges, 2) == [[], []]


class Noted:
    def __init__(self, *args):
        super().__init__()
        self.noted = args


class Mixed(torch.Tensor, Noted):
    """`torch.Tensor` has no `__init__`, so Python comes to the next class that has one."""


class Scaled(torch.Tensor):
    """Takes a tensor and copies it: nothing is shared."""

    def __new__(cls, tensor, scale):
        return (tensor * scale).detach().as_subclass(cls)


def constructors(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = model[0].weight.detach().clone()
    _, engine = build(model)
    assert Mixed([1.0, 2.0]).noted == ([1.0, 2.0],) and torch.Tensor(2, 3).shape == (2, 3)
    with engine.step():
        scaled = Scaled(model[0].weight, 2.0)
        assert type(scaled) is Scaled and torch.equal(torch.stack(scaled.unbind()), 2 * weight)
        with pytest.raises(
            ResidencyError, match=r"`torch\.Tensor` would touch the memory of parameter '0\.weight'"
        ):
            torch.Tensor(model[0].weight)
        model(torch.ones(1, 4))


def test_constructors_of_users_are_what_they_were():
    run_ranks(constructors, 2)


def named():
    tensor = torch.Tensor
    functions = (
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        torch.batch_norm,
        torch.sparse_coo_tensor,
    )
    return (
        *functions,
        tensor.new,
        tensor.new_tensor,
        tensor.numpy,
        tensor.set_,
        nn.RNNBase.flatten_parameters,
    )


TABLE = dict(
    zip(
        named(),
        "tensor as_tensor asarray norm sparse new new_tensor numpy set_ flatten".split(),
        strict=True,
    )
)
TABLE |= {torch.Tensor.data.__get__: "data", torch.Tensor.data.__set__: "data ="}


class Tabled(torch.Tensor):
    """Decides by a table of functions, which was made at import."""

    asked = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Tabled.asked += (TABLE.get(func),)
        return super().__torch_function__(func, types, args, kwargs or {})


def ask():
    Tabled.asked, x = (), torch.ones(2, 3).as_subclass(Tabled)
    x.data, x.numpy(), x.new_tensor([1.0]), x.new(2)
    x.data = torch.ones(2, 3)
    torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
    return Tabled.asked


def keep_names(rank, world_size):
    asked, before, pickled = ask(), named(), pickle.dumps(named())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    build(model)
    now = named()
    assert asked == ask() == ("data", "numpy", "new_tensor", "new", "data =", "norm")
    assert {function.__module__ for function in now} == {"torch", "torch.nn.modules.rnn"}
    assert (
        all(map(operator.is_, pickle.loads(pickle.dumps(now)), now))
        and pickle.loads(pickled) == now
    )
    assert dict.fromkeys(now) == dict.fromkeys(before) and len({*now, *before}) == len(now)
    with pytest.raises(
        ResidencyError,
        match=r"`parameter\.data = \.\.\.` would touch the memory of parameter '0\.weight'",
    ):
        torch.ones(4, 4).data = model[0].weight


def test_functions_that_are_wrapped_keep_their_names_and_their_places_in_tables():
    run_ranks(keep_names, 2)


SHARED = {
    "storage": lambda tensor: tensor.storage(),
    "untyped_storage": (
        lambda tensor: tensor.untyped_storage().copy_(tensor.clone().untyped_storage())
    ),
    "__dlpack__": np.from_dlpack,
    "to_dlpack": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),  # by what it is now
    "set_": lambda tensor: torch.empty(0).set_(tensor),
    "new": lambda tensor: torch.empty(0).new(tensor),
    "torch.Tensor": torch.Tensor,
}


def shared(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _, engine = build(model)
    with engine.step():
        loss, value = model(torch.ones(2, 4)).sum(), model[0].weight.detach()
        for name, way in SHARED.items():
            told = (
                rf"`{name}` would share the memory of a copy of the value of parameter"
                r" '0\.weight'.*`\.clone\(\)`"
            )
            with pytest.raises(ResidencyError, match=told):
                way(value)
            way(value.clone())
            print(name)
        assert value.untyped_storage().nbytes() == 64 == len(value.untyped_storage().clone())
        assert not hasattr(value, "__cuda_array_interface__") and value.is_shared() is False
        with pytest.raises(
            ResidencyError, match="`mul_` would change a copy of the value of parameter '0.weight'"
        ):
            copy.copy(value).mul_(2)
        with pytest.raises(TypeError):
            torch.empty(0).set_(value.untyped_storage())
        for way in (torch.to_dlpack, torch.Tensor.__dlpack__):
            with pytest.raises(
                ResidencyError, match="dlpack.*would touch the memory of parameter '0.weight'"
            ):
                way(model[0].weight)
    with engine.backward():
        loss.backward()
    grad = model[0].weight.grad
    for name, way in SHARED.items():
        with pytest.raises(
            ResidencyError,
            match=rf"`{name}` would share .* gradient of parameter '0\.weight'.*parameter\.grad = ",
        ):
            way(grad)


def test_copies_are_not_shared_with_what_writes_unseen():
    run_ranks(shared, 2)


def use_types_of_old(rank, world_size):
    own = [torch.FloatTensor]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _, engine = build(model)
    kind = torch.FloatTensor
    assert (
        kind is not own[0]
        and kind == own[0]
        and own[0] == kind
        and {kind, own[0]} == {kind} <= torch._tensor_classes
    )
    assert (repr(kind), torch.typename(kind), kind.__name__) == (
        repr(own[0]),
        "torch.FloatTensor",
        "FloatTensor",
    )
    assert (
        kind.dtype is torch.float32
        and kind.mul is own[0].mul
        and pickle.loads(pickle.dumps(kind)) is kind
    )
    x = kind([1, 2])
    assert x.tolist() == [1, 2] and kind(2, 3).shape == (2, 3) and not kind().numel()
    assert (
        isinstance(x, kind)
        and isinstance(x, (torch.HalfTensor, kind))
        and not isinstance(x, torch.LongTensor)
    )
    assert (
        issubclass(own[0], kind)
        and issubclass(kind, kind)
        and not issubclass(kind, torch.HalfTensor)
        and not issubclass(kind, torch.Tensor)
    )
    assert (
        x.type() == "torch.FloatTensor"
        and x.type(torch.HalfTensor).dtype is nn.Linear(1, 1).type(torch.HalfTensor).bias.dtype
    )
    torch.set_default_tensor_type(torch.DoubleTensor)
    assert torch.tensor(1.0).dtype is torch.float64
    torch.set_default_tensor_type(kind)
    assert torch.tensor(1.0).dtype is torch.float32
    compiled = torch.compile(
        lambda x: x.type(torch.DoubleTensor) if isinstance(x, torch.FloatTensor) else x,
        backend="aot_eager",
    )
    assert compiled(x).dtype is torch.float64
    with (
        engine.step(),
        pytest.raises(
            ResidencyError, match=r"`FloatTensor` would touch the memory of parameter '0\.weight'"
        ),
    ):
        kind(model[0].weight)


@pytest.mark.filterwarnings("ignore")
def test_types_of_old_are_those_of_torch_but_for_parameters_that_rest():
    run_ranks(use_types_of_old, 2)


def changed_number(rank, world_size):
    """What torch reads of a number that it asked for, before and after it was changed beside
    another parameter of its unit.
    """
    model, x, found = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)),
        torch.arange(8.0).view(2, 4),
        [],
    )
    model[0].count = nn.Parameter(torch.tensor(1), requires_grad=False)
    _, engine = build(model)
    for count in (2, 3):
        with engine.step():
            model(x)
            found.append(x.roll(model[0].count, 1)[0].tolist())
        with gathered([model[0].count], modify=True), torch.no_grad():
            model[0].load_state_dict({"bias": torch.full((4,), float(count))}, strict=False)
            model[0].count.fill_(count)
    with engine.step():
        assert (model[0].bias == 3).all()
        return [*found, x.roll(model[0].count, 1)[0].tolist()]


def test_a_number_that_torch_has_asked_for_is_read_as_it_is_now():
    expected = [torch.arange(4.0).roll(count).tolist() for count in (1, 2, 3)]
    assert run_ranks(changed_number, 2) == [expected, expected]
