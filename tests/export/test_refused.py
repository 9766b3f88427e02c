"""Models that cannot be exported are errors before the first step: where, what, what instead."""

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Optional

import numpy as np
import pytest
import torch
from torch import nn

from export.models import Model, features, fit
from helpers.ranks import run_ranks
from lightning_zero3.callbacks import ModelExport


class Base(Model):
    dynamic_shapes = parts = None
    format, samples = "pt2", 4

    def build(self):
        self.inner = self.Inner()
        self.example_input_array = features(1, self.samples, 6)

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, batch_idx):
        raise AssertionError("a step has begun")


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.sizes, self.plain, self.none = [], [nn.Linear(6, 6)], None
        self.activation = lambda x: x


@dataclass
class Output:
    y: torch.Tensor


CASES = {}


def case(construct, remedy, script=False, where="inner", **attributes):
    """A model whose inner module has this `forward`, and what its error must name."""

    def add(forward):
        name = forward.__name__
        inner = type("Inner", (Inner,), {"forward": forward})
        attributes.update(Inner=inner, format="torchscript" if script else "pt2")
        CASES[name] = type(name, (Base,), attributes), construct, remedy, where
        return forward

    return add


@case("if self.layer(x).sum() > 0:", "torch.where")
def branch_on_values(self, x):
    if self.layer(x).sum() > 0:
        return x
    return -x


@case("for _ in range(int(x[0, 0])):", "mask")
def loop_over_values(self, x):
    for _ in range(int(x[0, 0])):
        x = self.layer(x)
    return x


@case("y.numel() > 3", "mask")
def size_of_values(self, x):
    y = x[x > 0]
    return y if y.numel() > 3 else 2 * y


@case("assert (x == x).all()", "move assertions")
def assertion(self, x):
    assert (x == x).all(), "nan"
    return self.layer(x)


@case("np.tanh", "with torch")
def numpy(self, x):
    return torch.from_numpy(np.tanh(self.layer(x).detach().numpy()))


@case("print(f", "print and format")
def formatted_value(self, x):
    print(f"{x.mean().item():.3f}")
    return self.layer(x)


@case("copy.deepcopy(self.layer)", "custom_op")
def deep_copy(self, x):
    return copy.deepcopy(self.layer)(x)


@case("def forward", "lists, tuples and dicts", where="the module itself")
def class_of_its_own(self, x):
    return Output(self.layer(x))


@case("self.layer(x.t())", "shapes that `forward` takes")
def other_shape(self, x):
    return self.layer(x.t())


@case("def forward", "one size", where="the module itself", dynamic_shapes={"x": {0: "batch"}})
def fixed_batch(self, x):
    return self.layer(x).reshape(2, 2, 6)


@case("self.layr(x)", "`forward` itself fails")
def misspelt(self, x):
    return self.layr(x)


@case("if self.layer(x).sum() > 0:", "torch.where", parts=["inner.blocks.0"])
def branch_before_a_part(self, x):
    if self.layer(x).sum() > 0:
        return self.blocks[0](x)
    return x


@case(
    *("def forward", "two samples"),
    where="the module itself",
    dynamic_shapes={"x": {0: "batch"}},
    samples=1,
)
def one_sample(self, x):
    return self.layer(x)


@case("*xs", "name each argument", script=True)
def arguments(self, *xs):
    return self.layer(xs[0])


@case("x + y", "if y is not None", script=True)
def unrefined(self, x, y: Optional[torch.Tensor] = None):  # noqa: UP045
    return x + y


@case("self.sizes", "elements of one type", script=True)
def untyped_list(self, x):
    for size in self.sizes:
        x = x[:size]
    return x


@case("self.blocks[len(x)]", "enumerate(self.blocks)", script=True)
def indexed_modules(self, x):
    return self.blocks[len(x)](x)


@case("try:", "by `if`", script=True)
def exception(self, x):
    try:
        return self.layer(x)
    except ValueError:
        return x


@case("lambda", "top of the file", script=True)
def anonymous(self, x):
    double = lambda y: 2 * y  # noqa: E731
    return double(x)


@case("self.last = x", "since `__init__`", script=True)
def late_attribute(self, x):
    self.last = x
    return self.layer(x)


@case("out.append(k)", "`sizes: List[int] = []`", script=True)
def list_of_numbers(self, x):
    out = []
    for k in range(3):
        out.append(k)
    return x[out[0]]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """By name, of one process; no file is left behind."""
    folder = tmp_path_factory.mktemp("refused")
    found = {}
    for name, (model, *_) in CASES.items():
        options = {"modules": model.parts, "dynamic_shapes": model.dynamic_shapes}
        export = ModelExport(model.format, every="end", **options)
        with pytest.raises(RuntimeError) as raised:
            fit(model(), folder, callbacks=[export])
        found[name] = str(raised.value)
    assert list(folder.iterdir()) == []
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_error_at_the_start_says_where_and_what_instead(name, errors):
    _, construct, remedy, where = CASES[name]
    problem, advice = errors[name].split("\n")
    lines, first = inspect.getsourcelines(globals()[name])
    head = next(k for k, text in enumerate(lines) if text.startswith("def "))
    assert f"in {where}" in problem, problem
    if where == "inner":
        line = next(k for k, text in enumerate(lines) if k >= head and construct in text)
        assert f"{__file__}:{first + line}: `{lines[line].strip()}`" in problem, problem
    assert remedy in advice, advice


class Held(Model):
    """What `forward` runs holds the model itself; `hold` makes it."""

    def build(self):
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.hold(self.layer)
        self.example_input_array = features(1, 4, 6)

    def forward(self, x):
        return self.head(self.layer(x))


class Lambda(Held):
    def hold(self, layer):
        self.run = lambda x: layer(x)

    def forward(self, x):
        return self.run(x)


class Hook(Held):
    def hold(self, layer):
        self.scale = nn.Parameter(torch.ones(6))
        layer.register_forward_hook(lambda module, args, y: y * self.scale)


class Wrapped(Held):
    def hold(self, layer):
        forward = layer.forward
        layer.forward = lambda x: forward(x)


class Compiled(Held):
    def hold(self, layer):
        self.run = torch.compile(layer.forward, backend="eager")

    def forward(self, x):
        return self.run(x)


class Other(Held):
    """Its head, exported alone, uses the other layer."""

    def hold(self, layer):
        self.head = Head()
        self.head.others = [layer]


class Head(nn.Module):
    def forward(self, x):
        return x @ self.others[0].weight


@pytest.mark.parametrize(
    "model, name, line",
    [
        (Lambda, "layer", "lambda x: layer(x)"),
        (Hook, "scale", "lambda module, args, y"),
        (Wrapped, "layer.weight", "lambda x: forward(x)"),
        (Compiled, "layer.weight", "return self.run(x)"),
        (Other, "layer.weight", "self.others[0]"),
    ],
)
def test_what_holds_the_model_itself_would_export_its_start(model, name, line, tmp_path):
    export = ModelExport(every="end", modules=["head"] if model is Other else None)
    with pytest.raises(RuntimeError) as raised:
        fit(model(), tmp_path, callbacks=[export])
    problem, advice = str(raised.value).split("\n")
    assert f"'{name}' is reached" in problem and line in problem and "a method" in advice, problem


def start(rank, world_size, folder):
    from lightning_zero3 import Zero3Strategy

    errors = []
    for model in (CASES["branch_on_values"][0], Lambda):
        with pytest.raises(RuntimeError) as raised:
            fit(model(), folder, Zero3Strategy(), world_size, [ModelExport(every="end")])
        errors.append(str(raised.value))
    return errors


def test_all_ranks_raise_the_error_of_rank_0(tmp_path):
    first, second = run_ranks(start, 2, tmp_path)
    assert first == second and all("failed on rank 0" in error for error in first)
    assert "torch.where" in first[0] and "'layer' is reached" in first[1]


def test_without_check_it_is_a_warning_and_nothing_is_exported(tmp_path):
    model = CASES["branch_on_values"][0]()
    model.training_step = lambda batch, batch_idx: model.inner.layer(batch[0]).sum()
    with pytest.warns(UserWarning, match="torch.where"):
        fit(model, tmp_path, callbacks=[ModelExport(check=False)])
    assert [file.name for file in tmp_path.iterdir()] == ["it.ckpt"]


def test_a_library_beside_torch_is_named(tmp_path):
    """Its path begins as torch's does."""
    source = "def forward(self, x):\n    return x if x.sum() > 0 else -x\n"
    found = {}
    exec(compile(source, f"{torch.__path__[0]}vision/net.py", "exec"), found)
    model = type("Found", (Base,), {"Inner": type("Inner", (Inner,), found)})
    with pytest.raises(RuntimeError, match=r"in inner \(Inner\), .*torchvision/net.py:2"):
        fit(model(), tmp_path, callbacks=[ModelExport(every="end")])


def test_onnx_needs_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(RuntimeError, match=r"\n.*pip install lightning-zero3\[onnx\]"):
        fit(CASES["one_sample"][0](), tmp_path, callbacks=[ModelExport("onnx")])


def test_an_input_must_be_known(tmp_path):
    model = CASES["branch_on_values"][0]()
    batch, model.example_input_array = model.example_input_array, None
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch))
    model.train_dataloader = lambda: data
    with pytest.raises(RuntimeError, match="no example input.*\n.*`example_input_array`"):
        fit(model, tmp_path, callbacks=[ModelExport()])


@pytest.mark.parametrize(
    "options",
    [
        {"format": "caffe2"},
        {"every": "epoch"},
        {"verify": True},
        {"every": "end", "average": False},
    ],
)
def test_options_that_are_not_offered(options):
    with pytest.raises(ValueError, match="ModelExport.*\n.*every"):
        ModelExport(**options)
