"""The behaviours where linear layers are gathered in bfloat16, as ``precision="bf16-mixed"`` does it: on two ranks.

The reference is plain torch under the same autocast: its weights are fp32, and autocast rounds them. All cases share one
process group, those that are refused too: every rank raises there, at the same place.
"""

import re
import warnings

import pytest
import torch

from behaviours import load_cases
from behaviours.harness import CASES, Case, Run, Zero3Run, differences, execute
from helpers.ranks import run_ranks
from lightning_zero3.strategies.precision import gather_dtypes

load_cases()

IN_PLACE = r"was changed in place while it is gathered in torch\.bfloat16.*strategy\.gathered\(module, modify=True\)"
# Error of the case in slots of bfloat16.
REFUSED: dict[str, str] = {}
# Reads a weight in the forward of its own unit, where it is rounded: other numbers than the reference, which has it in fp32.
ROUNDED: set[str] = set()
# The reference itself raises under autocast.
NOT_UNDER_AUTOCAST: set[str] = set()
# Compiling takes seconds, and what is compiled is another function; the others have the same parameters read.
COMPILED = {name for name, case in CASES.items() if case.timeout > 15}
NAMES = [
    name
    for name, case in CASES.items()
    if 2 in case.worlds and not case.refused and type(case).optimizers is Case.optimizers and name not in COMPILED
]


class Autocast(Run):
    """The reference: each step under autocast, as Lightning runs a ``training_step``."""

    def step(self, function):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return super().step(function)


class InBfloat16(Autocast, Zero3Run):
    def slot_dtype(self, name, parameter):
        return gather_dtypes(self.model, "bf16-mixed", ()).get(name, parameter.dtype)


def sgd(case, model):
    """Powers of two: whether a product is rounded before it is added depends on an element's place in memory.

    One bit of an fp32 value is now and then that between two of bfloat16.
    """
    return [torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.0625)]


def compare(rank, world_size, names):
    """By name: what differs from the reference, or the error, and who raised it."""
    Case.optimizers = sgd
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        print(f"--- {name}", flush=True)
        case, who = CASES[name], "the reference"
        try:
            expected, who = execute(case, Autocast, rank, world_size), "zero3"
            found[name] = differences(expected, execute(case, InBfloat16, rank, world_size), case.rtol)
        except Exception as error:
            found[name] = f"{who} raised {type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def outcomes(request):
    names = [item.callspec.params["name"] for item in request.session.items if getattr(item, "function", None) is test_outcome]
    return run_ranks(compare, 2, names, timeout=240)


@pytest.mark.parametrize("name", NAMES)
def test_outcome(name, outcomes):
    ranks = [found[name] for found in outcomes]
    if name in NOT_UNDER_AUTOCAST:
        assert all(str(found).startswith("the reference raised RuntimeError") for found in ranks), ranks
    elif name in REFUSED:
        assert all(re.search(f"zero3 raised ResidencyError.*{REFUSED[name]}", str(found), re.DOTALL) for found in ranks), ranks
    elif name in ROUNDED:
        assert all(isinstance(found, list) and found for found in ranks), ranks
    else:
        assert ranks == [[], []]
