"""Every row is promised, will be right, or is not promised; what is promised is right."""

from itertools import chain

from behaviours import load_cases
from behaviours.harness import CASES
from behaviours.in_the_trainer import MODULES
from behaviours.promised import NOT_PROMISED, PROMISED, WILL_BE_RIGHT

load_cases()


def names(rows):
    return list(chain.from_iterable(rows.values()))


def test_every_row_stands_in_one_list():
    listed = [name for rows in (PROMISED, WILL_BE_RIGHT, NOT_PROMISED) for name in names(rows)]
    assert len(listed) == len(set(listed))
    assert set(listed) == {*CASES, *MODULES}


def test_what_is_promised_is_right_and_what_will_be_is_refused():
    for rows, refused in ((PROMISED, False), (WILL_BE_RIGHT, True)):
        for name in names(rows):
            if name in CASES:
                found = CASES[name].expected(max(CASES[name].worlds)) == "refused"
            else:
                found = bool(MODULES[name].refused)
            assert found == refused, name
