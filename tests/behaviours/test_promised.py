"""Every row is promised, or is not; what is promised is right."""

from itertools import chain

from behaviours import load_cases
from behaviours.harness import CASES
from behaviours.in_the_trainer import MODULES
from behaviours.promised import NOT_PROMISED, PROMISED

load_cases()


def names(rows):
    return list(chain.from_iterable(rows.values()))


def test_every_row_stands_in_one_list():
    listed = [name for rows in (PROMISED, NOT_PROMISED) for name in names(rows)]
    assert len(listed) == len(set(listed))
    assert set(listed) == {*CASES, *MODULES}


def test_what_is_promised_is_right():
    for name in names(PROMISED):
        if name in CASES:
            assert CASES[name].expected(max(CASES[name].worlds)) == "right", name
        else:
            assert not MODULES[name].refused, name
