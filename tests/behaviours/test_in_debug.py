"""The behaviours with ``debug=True``, on two ranks: poisoned memory is never read, and what is right stays right."""

import pytest

from behaviours import load_cases
from behaviours.harness import BATCH, CASES, run_cases

load_cases()
pytestmark = pytest.mark.timeout(600)
NAMES = [name for name, case in CASES.items() if 2 in case.worlds and case.expected(2) == "right" and case.timeout <= 15]


@pytest.mark.parametrize("names", [pytest.param(NAMES[i : i + BATCH], id=NAMES[i]) for i in range(0, len(NAMES), BATCH)])
def test_right(names):
    outcomes = run_cases("zero3 debug", names, 2, names)
    wrong = {name: outcome.detail for name, outcome in outcomes.items() if outcome.kind != "right"}
    assert not wrong, "\n".join(f"{name}: {detail}" for name, detail in wrong.items())
