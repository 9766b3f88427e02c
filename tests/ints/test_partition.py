"""Which modules share a unit: every parameter in exactly one unit, for the default, classes and
functions.
"""

import pytest
import torch
from torch import nn

from helpers.models import Block, NormNet, TinyLm
from lightning_zero3.strategies.engine import find_units
from lightning_zero3.strategies.engine.partition import SMALL_NUMEL


class Stage(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))


class Scaled(nn.Module):
    """A parameter of its own around a layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)


MODELS = {
    "lm": TinyLm,
    "tied": lambda: TinyLm(tied=True),
    "norm": NormNet,
    "linear": lambda: nn.Linear(3, 2),
    "sequential": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
    "stages": lambda: nn.Sequential(Stage(4, 2), Stage(4, 3)),
    "scaled": lambda: nn.ModuleDict({"a": Scaled(), "b": Scaled()}),
    "shared_block": lambda: nn.Sequential(*[Block(4)] * 2, nn.Linear(4, 4)),
}
POLICIES = {
    "default": None,
    "linear": [nn.Linear],
    "name": ["Linear"],
    "norm and linear": [nn.modules.batchnorm._BatchNorm, "Linear", nn.Embedding],
    "all in one": lambda model: [model],
    "children": lambda model: (
        [[c for c in model.children()]] if not list(model.parameters(recurse=False)) else [model]
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", MODELS)
def test_every_parameter_has_one_unit(build, policy):
    model = MODELS[build]()
    try:
        units = find_units(model, POLICIES[policy])
    except ValueError as error:
        assert "no module of that class" in str(error) and policy == "norm and linear"
        return
    owned = [name for unit in units for name in unit.parameters]
    names = [name for name, _ in model.named_parameters()]
    assert sorted(owned) == sorted(names)
    # In definition order, alike in every process; a set of modules would be in the order of their
    # addresses.
    modules = [name for name, _ in model.named_modules()]
    assert [unit.names[0] for unit in units] == sorted(
        (unit.names[0] for unit in units), key=modules.index
    )
    assert all(list(unit.parameters) == sorted(unit.parameters, key=names.index) for unit in units)
    assert len({id(p) for unit in units for p in unit.parameters.values()}) == len(owned)
    for unit in units:
        assert unit.parameters
        reachable = {id(p) for m in unit.members for p in m.parameters()}
        assert {id(p) for p in unit.parameters.values()} <= reachable, "used outside every member"
        for a in unit.members:
            assert not any(b is not a and b in list(a.modules()) for b in unit.members), (
                "a member contains another"
            )
    for unit in units:
        inside = {m for member in unit.members for m in member.modules()} - set(unit.members)
        others = [m for other in units if other is not unit for m in other.members]
        has_others = any(m in inside for m in others)
        assert unit.nested if has_others else not unit.nested or unit.members == [model]


def names(model, policy=None):
    return [unit.name for unit in find_units(model, policy)]


def test_small_neighbours_share_a_unit_and_big_ones_do_not():
    assert names(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == ["0+1"]
    big = nn.Linear(SMALL_NUMEL // 64, 64, bias=False)  # as many as may share
    assert names(nn.Sequential(big, nn.Linear(1, 1, bias=False))) == ["0", "1"]
    half = [nn.Linear(SMALL_NUMEL // 128, 64, bias=False) for _ in range(4)]
    assert names(nn.Sequential(*half)) == ["0+1", "2+3"]


def test_blocks_are_found_and_cut_by_class():
    lm = TinyLm(depth=2)
    assert names(lm) == ["(root)", "embed+blocks.0+blocks.1+norm+head"]
    assert names(lm, ["Block"]) == ["(root)", "embed", "blocks.0", "blocks.1", "norm", "head"]
    assert list(find_units(lm, ["Block"])[0].parameters) == ["position"]
    wide = nn.Module()
    wide.stack = nn.ModuleList(Block(300) for _ in range(3))
    assert names(wide) == ["stack.0", "stack.1", "stack.2"]


class Derived(Block):
    pass


@pytest.mark.parametrize("wanted", [Block, "Block", f"{Block.__module__}.Block"])
def test_classes_and_their_names_take_derived_ones(wanted):
    assert names(nn.Sequential(Derived(4), Block(4)), [wanted]) == ["0", "1"]


def test_tied_parameters_have_one_home():
    units = find_units(TinyLm(depth=2, tied=True), ["Block"])
    (home,) = [unit for unit in units if "embed.weight" in unit.parameters]
    assert home.names == ["embed", "head"]
    assert not any("head.weight" in unit.parameters for unit in units)


def test_three_ties_join_in_a_chain():
    a, b, c = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight, c.bias = a.weight, b.bias
    model = nn.ModuleList([a, c, b])
    assert [sorted(unit.names) for unit in find_units(model, ["Linear"])] == [["0", "1", "2"]]


def test_nested_blocks():
    model = nn.Sequential(Stage(4, 2), nn.Linear(4, 4))
    units = {unit.name: unit for unit in find_units(model, [Stage, Block])}
    assert list(units) == ["0", "0.blocks.0", "0.blocks.1", "1"]
    assert [unit.nested for unit in units.values()] == [True, False, False, False]
    assert list(units["0"].parameters) == ["0.entry.weight", "0.entry.bias"]


@pytest.mark.parametrize(
    "model, policy, message",
    [
        (
            nn.Linear(2, 2),
            ["Conv2d"],
            "unit_policy names 'Conv2d', but the model has no module of that class",
        ),
        (nn.Linear(2, 2), [nn.Conv2d], "unit_policy names <class 'torch.nn.modules.conv.Conv2d'>"),
        (nn.Linear(2, 2), (name for name in ["Conv2d"]), "unit_policy names 'Conv2d'"),
        (
            nn.Linear(2, 2),
            [None],
            "unit_policy names None, but the model has no module of that class",
        ),
        (nn.Linear(2, 2), [nn.Linear(2, 2)], "unit_policy names Linear("),
    ],
)
def test_bad_input(model, policy, message):
    with pytest.raises(ValueError) as caught:
        find_units(model, policy)
    assert message in str(caught.value)
