"""TorchScript: features of the language in small models that train sharded and are exported, each
against plain torch; scripted parts inside of a model.
"""

from enum import Enum
from typing import Dict, Final, List, NamedTuple, Optional, Tuple  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

from export.models import Model, features, fit
from helpers.ranks import run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.callbacks import ModelExport

FEATURES = {}


def feature(cls):
    """A module of six features; its docstring names what of the language it uses."""
    FEATURES[cls.__name__] = cls
    return cls


@feature
class Types(nn.Module):
    """Numbers, strings, lists, dicts and tuples, annotated, as locals and attributes."""

    sizes: List[int]  # noqa: UP006
    names: Dict[str, float]  # noqa: UP006

    def __init__(self):
        super().__init__()
        self.layer, self.sizes, self.names = nn.Linear(6, 6), [], {"scale": 2.0}
        self.rate, self.mode = 0.5, "on"

    def forward(self, x: Tensor) -> Tensor:
        found: List[Tensor] = []  # noqa: UP006
        for k in range(3):
            found.append(self.layer(x) * float(k))
        pair: Tuple[Tensor, int] = (torch.stack(found).sum(0), len(self.sizes) + 1)  # noqa: UP006
        if self.mode == "on" and "scale" in self.names:
            return pair[0] * pair[1] * self.rate * self.names["scale"]
        return x


@feature
class Refinement(nn.Module):
    """`Optional` refined by `is not None` and `assert`."""

    bias: Optional[Tensor]  # noqa: UP045

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(6, 6), None

    def shift(self, x: Tensor, by: Optional[float] = None) -> Tensor:  # noqa: UP045
        if by is not None:
            x = x + by
        bias = self.bias
        return x if bias is None else x + bias

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        y = self.shift(self.layer(x), 0.25)
        if mask is None:
            mask = torch.ones_like(y)
        assert mask is not None
        return y * mask


@feature
class Constants(nn.Module):
    """`Final` attributes, which are constants in the program."""

    depth: Final[int]
    kind: Final = "tanh"

    def __init__(self):
        super().__init__()
        self.layer, self.depth = nn.Linear(6, 6), 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.depth):
            x = self.layer(x)
            if self.kind == "tanh":
                x = x.tanh()
        return x


class Pair(NamedTuple):
    mean: Tensor
    count: int


@feature
class NamedTuples(nn.Module):
    """A `NamedTuple` between methods."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def measure(self, x: Tensor) -> Pair:
        return Pair(x.mean(1, keepdim=True), x.size(1))

    def forward(self, x: Tensor) -> Tensor:
        pair = self.measure(self.layer(x))
        return pair.mean * pair.count + x


@feature
class Outputs(nn.Module):
    """A `NamedTuple` as output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.layer(x), x.size(0))


class Kind(Enum):
    PLAIN = 1
    DOUBLE = 2


@feature
class Enums(nn.Module):
    """An `Enum` as attribute and in comparisons."""

    def __init__(self):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 6), Kind.DOUBLE

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == Kind.DOUBLE:
            return 2 * self.layer(x)
        return self.layer(x)


@feature
class Exported(nn.Module):
    """`torch.jit.export`: a second method of the program."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@feature
class Unused(nn.Module):
    """`torch.jit.unused`: Python that the program has as an error."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    @torch.jit.unused
    def look(self, x: Tensor) -> Tensor:
        return {key: value for key, value in [("x", x)] if key}["x"]

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 2:
            x = self.look(x)
        return self.layer(x)


@feature
class Ignored(nn.Module):
    """`torch.jit.ignore(drop=True)`: a call of Python that the program leaves out."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    @torch.jit.ignore(drop=True)
    def count(self) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count()
        return self.layer(x)


@torch.jit.interface
class Layer(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        pass


@feature
class Interfaces(nn.Module):
    """An interface: modules of a list chosen by a number that the input decides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        layer: Layer = self.layers[x.size(0) % 2]
        return layer.forward(x)


@feature
class Iteration(nn.Module):
    """`ModuleList`, `ModuleDict` and `Sequential`: loops, `enumerate`, `zip`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(3)])
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
        self.tail = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for k, (block, norm) in enumerate(zip(self.blocks, self.norms)):  # noqa: B905
            x = norm(block(x)) * float(k + 1)
        for _, head in self.heads.items():
            x = x + head(x)
        return self.tail(x)


@torch.jit.script
def smooth(x: Tensor, rate: float) -> Tensor:
    return torch.where(x > 0, x, x * rate)


@feature
class Functions(nn.Module):
    """A scripted function with a branch on values, which `torch.export` refuses."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = smooth(self.layer(x), 0.1)
        if bool(y.sum() > 100):
            y = -y
        return y


@feature
class Loops(nn.Module):
    """`while`; beside it a shared layer, and a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 6), nn.Linear(6, 6)
        self.again = self.head
        self.register_buffer("shift", torch.arange(6.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        state, k = torch.zeros_like(x), 0
        while k < 3:
            state = self.cell(x, state)
            k += 1
        return self.again(self.head(state)) + self.shift


@feature
class Scripted(nn.Module):
    """A part that is scripted when the model is made, and trains so."""

    def __init__(self):
        super().__init__()
        self.part = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.part(x))


class Lit(Model):
    """Trains a feature, and exports it as a part, so that it is the program itself."""

    def __init__(self, name):
        self.name = name
        super().__init__()
        self.save_hyperparameters()

    def build(self):
        self.net = FEATURES[self.name]()
        self.example_input_array = features(1, 4, 6)

    def forward(self, x):
        y = self.net(x)
        return y[0] if isinstance(y, tuple) else y


def train(rank, world_size, folder, names):
    """Train each feature sharded; "net.pt" and "it.ckpt" in its folder."""
    from lightning_zero3 import Zero3Strategy

    for name in names:
        export = ModelExport("torchscript", modules=["net"], every="end")
        fit(Lit(name), folder / name, Zero3Strategy(), world_size, [export])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    run_ranks(train, 2, folder, list(FEATURES), timeout=200)
    return folder


@pytest.mark.parametrize("name", FEATURES)
def test_trained_sharded_and_scripted(name, trained):
    module = Lit.load_from_checkpoint(trained / name / "it.ckpt", weights_only=True)
    alone = Lit(name)
    fit(alone, trained / name / "alone")  # plain torch, on the joined batch
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=2e-5, atol=2e-6)
    program, net = torch.jit.load(trained / name / "net.pt"), module.net.eval()
    x = features(2, 3, 6)
    with torch.no_grad():
        found, expected = program(x), net(x)
        if name == "Outputs":
            assert found._fields == expected._fields and found.count == expected.count
            found, expected = found.mean, expected.mean
        assert expected.abs().max() > 0.01 and torch.equal(found, expected)
        if name == "Exported":
            assert torch.equal(program.encode(x), net.encode(x))
    if name == "Unused":
        with pytest.raises(torch.jit.Error):
            program(x[None])
    for key, value in net.state_dict().items():
        assert torch.equal(program.state_dict()[key], value), key


def test_the_command_makes_the_same_file(trained):
    for name in ("Loops", "Types"):
        folder = trained / name
        skeleton = ["--skeleton", str(folder / "net.pt.skeleton")]
        assert main(["export", str(folder / "it.ckpt"), str(folder / "out.pt"), *skeleton]) == 0
        assert (folder / "out.pt").read_bytes() == (folder / "net.pt").read_bytes()


class Other(nn.Module):
    """Its program computes something else."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return 2 * y if torch.jit.is_scripting() else y


def whole(rank, world_size, folder, net):
    from lightning_zero3 import Zero3Strategy

    module = Lit("Loops")
    if net is not None:
        module.net = net()
    export = ModelExport("torchscript", every="end", verify=True)
    fit(module, folder, Zero3Strategy(), world_size, [export])


def test_a_program_of_something_else_is_found_by_verify(tmp_path):
    with pytest.raises(AssertionError, match="model.pt is not the model"):
        run_ranks(whole, 2, tmp_path, Other)


def test_a_lightning_module_itself(tmp_path):
    run_ranks(whole, 2, tmp_path, None)
    module = Lit.load_from_checkpoint(tmp_path / "it.ckpt", weights_only=True).eval()
    program = torch.jit.load(tmp_path / "model.pt")
    x = features(2, 3, 6)
    with torch.no_grad():
        assert torch.equal(program(x), module(x))
    state = program.state_dict()
    assert state["net.head.weight"].data_ptr() == state["net.again.weight"].data_ptr()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("tmp")] == []
