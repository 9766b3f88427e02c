"""The behaviours on one rank that exchanges with itself through a process group: gloo's, and over
NCCL on a GPU.

Slots, gathers, reductions and, on a GPU, streams are those of several ranks. And of two ranks that
part, through the communicator that they have with gloo and CUDA tensors.
"""

import re

import pytest

from behaviours import load_cases
from behaviours.harness import BATCH, CASES, run_case, run_cases
from helpers.tracking import on_cuda

load_cases()
pytestmark = pytest.mark.timeout(600)
NAMES = [
    name
    for name, case in CASES.items()
    if {1, 2} <= set(case.worlds)
    and case.expected(1) == case.expected(2) == "right"
    and case.timeout <= 15
]


ON_A_GPU = [name for name in NAMES if not CASES[name].on_host]


def batches(names, device, *marks):
    found = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
    return [pytest.param(batch, device, id=f"{batch[0]}-{device}", marks=marks) for batch in found]


@pytest.mark.parametrize(
    ("names", "device"), [*batches(NAMES, "cpu"), *batches(ON_A_GPU, "cuda", *on_cuda.marks)]
)
def test_right(names, device):
    outcomes = run_cases("zero3 group", names, 1, names, device)
    wrong = {name: outcome.detail for name, outcome in outcomes.items() if outcome.kind != "right"}
    assert not wrong, "\n".join(f"{name}: {detail}" for name, detail in wrong.items())


REFUSED = [
    name for name, case in CASES.items() if 2 in case.worlds and case.expected(2) == "refused"
]
PART = [
    name
    for name in REFUSED
    if re.search("ranks? run|for all ranks|on all ranks|on each", str(CASES[name].refused))
]
assert len(PART) >= 9  # the words of errors are what finds them


@pytest.mark.parametrize("name", PART)
def test_ranks_that_part(name):
    outcome = run_case("zero3 compared", name, 2)
    assert outcome.kind == "refused", outcome.detail


def test_right_on_two_ranks():
    names = NAMES[:: len(NAMES) // BATCH + 1]
    outcomes = run_cases("zero3 compared", names, 2, names)
    assert {name: outcome.kind for name, outcome in outcomes.items()} == dict.fromkeys(
        names, "right"
    )
