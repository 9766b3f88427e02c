"""docs/BEHAVIOURS.md and BEHAVIOURS_ALL.md are what `make_table.py` writes: nobody edited them, and
no case is missing or out of date.
"""

import re

import pytest
import torch

from behaviours import THEMES
from behaviours.harness import CASES, run_cases
from behaviours.in_the_trainer import FEATURES, run_feature
from behaviours.make_table import (
    ALL,
    ASKED,
    ENGINES,
    KINDS,
    README,
    TABLE,
    TITLES,
    all_rows,
    asked_rows,
    counted,
    read_cells,
    read_run,
    read_table,
    read_told,
    render,
    render_all,
    rows_in,
)

ROWS = all_rows()
FEATURES_OF_OTHERS = [
    ("ddp", "ema", "right"),
    ("ddp", "unfreezing", "wrong"),
    ("fsdp2", "ema", "error"),
    ("fsdp2", "unfreezing", "right"),
]
# Of the engines that no other test runs: rows of every kind but those that take a time-out.
SAMPLE = {
    "ddp": [
        "plain",
        "backward-inside-step",
        "root-grad-accumulated-in-step",
        "retain-graph",
        "checkpoint-reentrant",
        "two-optimizers-one-graph",
        "unused-in-some-steps",
        "plain-backward-twice",
        "parameter-replaced",
        "backward-create-graph",
        "read-when-gathered",
    ],
    "fsdp2": [
        "plain",
        "tied-blocks",
        "tied-inside-blocks",
        "method-other-than-forward",
        "mixture-of-experts",
        "grad-clipped-by-user",
        "exception-in-backward",
        "parameter-replaced",
        "scalar-parameter",
        "complex-model",
        "read-when-gathered",
    ],
}


def test_they_are_what_the_generator_writes():
    """Row names, their order and sections, summary counts, the heads: all of them from the kinds
    and texts in them.
    """
    rows, cells = read_table(), read_cells(ROWS)
    names = [case.__doc__ for case in ROWS.values()]
    assert sorted(rows) == sorted(names), set(rows) ^ set(names)
    assert TABLE.read_text() == render(ROWS, cells)
    assert ALL.read_text() == render_all(ROWS, cells, read_run())
    assert README.read_text() == counted(README.read_text(), cells)


def test_a_row_stands_in_one_document():
    """In that which is read first, the few that people ask about."""
    asked = [name for names in asked_rows().values() for name in names]
    assert len(asked) == len(ASKED) <= 120
    assert list(rows_in(TABLE)) == [ROWS[name].__doc__ for name in asked]
    assert not rows_in(TABLE).keys() & rows_in(ALL).keys()
    assert all(row["zero3"] == "right" for row in rows_in(TABLE).values())


def test_a_row_that_begins_with_the_same_follows_that_which_it_is_like():
    before = dict(zip(list(ROWS)[1:], ROWS, strict=False))
    for document in (TABLE, ALL):
        rows = list(rows_in(document))
        for row, above in zip(rows[1:], rows, strict=False):
            if row.startswith("The same"):
                (name,) = (name for name, case in ROWS.items() if case.__doc__ == row)
                assert above == ROWS[before[name]].__doc__, row


def test_it_says_what_was_run():
    assert re.search(
        r"commit [0-9a-f]{8}( with changes)? \(torch \d+\.\d+\.\d+, Lightning \d+\.\d+\.\d+,"
        r" Python ",
        read_run(),
    )


def test_its_counts_are_those_of_its_rows():
    rows = list(read_table().values())
    text = TABLE.read_text()
    assert f"| of {len(rows)} |" in text
    for kind in KINDS:
        counts = [sum(row[engine] == kind for row in rows) for engine in ENGINES]
        assert f"| {kind}: | {' | '.join(map(str, counts))} |" in text
    assert all(kind in KINDS for row in rows for kind in row.values())


def test_row_names_are_unique():
    assert len({case.__doc__ for case in ROWS.values()}) == len(ROWS) == len(CASES) + len(FEATURES)
    assert {type(case).__module__.rpartition("_")[2] for case in ROWS.values()} == set(TITLES)
    assert [*THEMES, "trainer"] == list(TITLES)


@pytest.mark.parametrize("name", ROWS)
def test_the_row_says_what_the_case_expects(name):
    case, told = ROWS[name], read_told()
    assert read_table()[case.__doc__]["zero3"] == case.expected(2)
    assert (case.expected(2) == "refused") == (case.__doc__ in told)
    if case.__doc__ in told:
        assert re.search(case.refused, told[case.__doc__].detail, re.DOTALL)


# A unit, or a parameter, buffer or module of one of the models.
WHOSE = (
    r"\bunits? \w+[.+]\w+|\bunit (stem|head|whole)\b|'(\w+\.)+\w+'|([Pp]arameters?|[Bb]uffer)"
    r" '\w+'|^'\w+' (and|was|is)\b"
)
# Refusals that are of no parameter more than of the others, and what they name in its place.
OF_NONE = {
    "not-elementwise": "WeightAveraging",
    "optimizer-of-global-norms": "GloballyNormalizedSgd",
    "optimizer-of-finite-steps": "FiniteSgd",
    "foreign-tensor": r"SGD holds a tensor of shape \(8,\)",
    "add-param-group-after-backward": "param group 1 of SGD",
    "skipped-steps": "`training_step`",
}
WHAT_TO_DO = re.compile(
    r"\b([Ii]nside (a step|`with)|[Cc]reate|[Uu]se|[Rr]ead (it|`)|To"
    r" (store|tie)|Copy|Make|[Gg]ive|Run|Keep|Call|Set|Register|"
    r"Pass|Add|Edit|[Cc]hange|Do (that|it)|Step it|Compute|must run|[Tt]ake|Try|It is"
    r" recommended)\b"
)


@pytest.mark.parametrize(
    "name",
    # the finder's refusal is Lightning's own, and has its words
    [n for n, case in ROWS.items() if case.expected(2) == "refused" and n != "batch-size-found"],
)
def test_a_refusal_names_what_it_is_about_and_what_to_do(name):
    told = read_told()[ROWS[name].__doc__].detail.partition(": ")[2]
    assert re.search(OF_NONE.get(name, WHOSE), told)
    assert WHAT_TO_DO.search(told)


@pytest.mark.parametrize("engine", SAMPLE)
def test_other_engines_do_what_the_table_says(engine):
    if f"(torch {torch.__version__.partition('+')[0]}," not in read_run():
        pytest.skip(f"the table is not of torch {torch.__version__}")
    names, table = SAMPLE[engine], read_table()
    expected = {name: table[CASES[name].__doc__][engine] for name in names}
    assert {"right", "wrong", "error", "-"} <= set(expected.values())
    found = run_cases(engine, names, 2, [name for name in names if expected[name] == "right"])
    assert {name: outcome.kind for name, outcome in found.items()} == expected


@pytest.mark.parametrize("engine, name, kind", FEATURES_OF_OTHERS)
def test_other_engines_train_features_as_the_table_says(engine, name, kind):
    if f"(torch {torch.__version__.partition('+')[0]}," not in read_run():
        pytest.skip(f"the table is not of torch {torch.__version__}")
    assert run_feature(engine, name).kind == read_table()[FEATURES[name].__doc__][engine] == kind
