"""A few of the random kills and stops; `random_kills.py` plays forty."""

import sys

import pytest

from faults import random_kills

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.mark.timeout(1200)
def test_a_run_that_was_disturbed_goes_on_to_the_same_weights():
    played = random_kills.play_rounds(len(random_kills.HOW), seed=7)
    assert [found for found in played if not found.is_well] == []
