"""The behaviours on CUDA: streams and events of one rank, and of two that share the device, with
gloo between them.

`pytest -m gpu tests/behaviours` runs them. Cells that should be right share processes, a group of
them in each test.
"""

import pytest

from behaviours import load_cases
from behaviours.harness import BATCH, CASES, run_case, run_cases
from helpers.tracking import needs_cuda

load_cases()
pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(900)]
CELLS = [
    (name, world_size)
    for name, case in CASES.items()
    for world_size in case.worlds
    if not case.on_host
]
# under a default device torch 2.11 asks the mode first, and `all_reduce` can be followed
FOLLOWED = "reduced-outside-its-unit"
RIGHT = [cell for cell in CELLS if CASES[cell[0]].expected(cell[1]) == "right"]


def groups():
    for world_size in (1, 2):
        names = [name for name, size in RIGHT if size == world_size]
        for start in range(0, len(names), BATCH):
            yield pytest.param(
                world_size, names[start : start + BATCH], id=f"{names[start]}-and-next-{world_size}"
            )


@pytest.mark.parametrize(("world_size", "names"), groups())
def test_right(world_size, names):
    outcomes = run_cases("zero3", names, world_size, names, "cuda")
    wrong = {name: outcome.detail for name, outcome in outcomes.items() if outcome.kind != "right"}
    assert not wrong, "\n".join(f"{name}: {detail}" for name, detail in wrong.items())


@pytest.mark.parametrize(("name", "world_size"), [cell for cell in CELLS if cell not in RIGHT])
def test_refused_or_known(name, world_size):
    outcome = run_case("zero3", name, world_size, "cuda")
    expected = CASES[name].expected(world_size)
    assert outcome.kind == expected or (outcome.kind, name) == ("right", FOLLOWED), outcome.detail
