"""docs/BEHAVIOURS.md is what `make_table.py` writes: nobody edited it, and no case is missing or out of date."""

import re

import pytest

from behaviours import load_cases
from behaviours.harness import CASES, Outcome
from behaviours.make_table import ENGINES, ROOT, TABLE, TITLES, read_refusals, read_table, render

load_cases()
KINDS = ("right", "refused", "wrong", "error", "hang")


def test_it_is_what_the_generator_writes():
    """Row names, their order and sections, summary counts, the head: all of them from the kinds and refusals in it."""
    rows, told = read_table(), read_refusals()
    names = {case.__doc__: name for name, case in CASES.items()}
    assert sorted(rows) == sorted(names), set(rows) ^ set(names)
    cells = {name: {engine: Outcome(rows[row][engine]) for engine in ENGINES} for row, name in names.items()}
    for row, outcome in told.items():
        cells[names[row]]["zero3"] = outcome
    assert TABLE.read_text() == render(CASES, {name: cells[name] for name in CASES})


def test_its_counts_are_those_of_its_rows():
    rows = list(read_table().values())
    text = TABLE.read_text()
    assert f"| of {len(rows)} |" in text
    for kind in KINDS:
        counts = [sum(row[engine] == kind for row in rows) for engine in ENGINES]
        assert f"| {kind}: | {' | '.join(map(str, counts))} |" in text
    assert all(kind in KINDS for row in rows for kind in row.values())


def test_row_names_are_unique():
    assert len({case.__doc__ for case in CASES.values()}) == len(CASES)
    assert {type(case).__module__.rpartition("_")[2] for case in CASES.values()} == set(TITLES)


@pytest.mark.parametrize("name", CASES)
def test_the_row_says_what_the_case_expects(name):
    case, told = CASES[name], read_refusals()
    assert read_table()[case.__doc__]["zero3"] == ("refused" if case.refused else "right")
    assert bool(case.refused) == (case.__doc__ in told)
    if case.refused:
        assert re.search(case.refused, told[case.__doc__].detail, re.DOTALL)


def test_the_readme_counts_the_same():
    assert f"says of {len(CASES)} things that a model may do" in " ".join((ROOT / "README.md").read_text().split())
