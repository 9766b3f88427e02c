"""The behaviours with ``debug=True``, on two ranks: poisoned memory is never read, and what is
right stays right.
"""

import pytest

from behaviours import load_cases
from behaviours.harness import CASES, run_cases

load_cases()
pytestmark = pytest.mark.timeout(1500)  # the first test waits for all
NAMES = [
    name
    for name, case in CASES.items()
    if 2 in case.worlds and case.expected(2) == "right" and case.timeout <= 15
]


@pytest.fixture(scope="module")
def outcomes(request):
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "function", None) is test_right
    ]
    return run_cases("zero3 debug", names, 2, names)


@pytest.mark.parametrize("name", NAMES)
def test_right(name, outcomes):
    assert outcomes[name].kind == "right", outcomes[name].detail
