"""Behaviours under `torch.set_default_device`: a mode then looks at every function of torch, beside
what zero3 looks at.
"""

import pytest

from behaviours import load_cases
from behaviours.harness import BATCH, CASES, run_cases

load_cases()
pytestmark = pytest.mark.timeout(300)
RIGHT = [
    name
    for name, case in CASES.items()
    if 2 in case.worlds and case.expected(2) == "right" and not case.on_host
]
COMPILED = [name for name in RIGHT if "compiled" in name]
OTHERS = [name for name in RIGHT if name not in COMPILED and CASES[name].timeout <= 15]


@pytest.mark.parametrize(
    "names", [COMPILED, OTHERS[:: len(OTHERS) // (2 * BATCH)]], ids=["compiled", "others"]
)
def test_right(names):
    outcomes = run_cases("zero3", names, 2, names, "cpu:0")
    wrong = {name: outcome.detail for name, outcome in outcomes.items() if outcome.kind != "right"}
    assert not wrong, "\n".join(f"{name}: {detail}" for name, detail in wrong.items())
