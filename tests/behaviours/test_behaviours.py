"""Whatever a model does: zero3 computes what plain torch computes, or refuses by name.

`cases_*.py` hold the behaviours, `harness.py` what runs and compares them, `make_table.py` writes
BEHAVIOURS.md.
"""

from pathlib import Path

import pytest
import torch

from behaviours import load_cases
from behaviours.harness import CASES, STEPS, Chain, Run, execute, run_case, run_cases
from behaviours.promised import DROPPABLE
from helpers.ranks import run_ranks

load_cases()
pytestmark = pytest.mark.timeout(1500)  # the first test waits for all cells
# One rank is the main setting of those that run on no other number. Of what nobody is promised the
# gate runs a sample.
CELLS = [
    pytest.param(
        (name, world_size),
        id=f"{name}-{world_size}",
        marks=[pytest.mark.variant] if world_size != max(case.worlds) or name in DROPPABLE else [],
    )
    for name, case in CASES.items()
    for world_size in case.worlds
]


# Known traps of sharding engines. Cases name the ones they would fall into; the rest cannot be met
# here, or are met elsewhere.
PITFALLS = """
1 first forward under inference mode; 2 no gradient on some ranks; 3 stale gradient buffers; 4 post-accumulate hooks without a
gradient; 5 hooks that fire twice in a backward; 6 weights tied across units; 7 saved views of old memory; 8 version counters;
9 recomputation that stops early; 10 re-entrant recomputation; 11 views changed in place; 12 outputs that are no tensors; 13 a
loss on intermediates; 14 several backwards; 15 several forwards; 16 accumulation; 17 AVG that sums; 18 clipping by local norms;
19 padding; 20 infinities on one rank; 21 param groups; 22 optimizers that look at shapes; 23 requires_grad changed later; 24
optimizers built before sharding; 25 access outside forward; 26 training_step instead of forward; 27 a sub-module before the
root; 28 exceptions and skipped steps; 29 ranks in different branches; 30 evaluation; 31 stale slots; 32 state dicts; 33 loads;
34 copies and averages; 35 odd shapes and layouts; 36 mixed dtypes; 37 complex and sparse; 38 parametrizations and caches of
weights; 39 buffers; 40 autocast; 41 compilation; 42 streams; 43 user hooks; 44 cycles that keep memory; 45 sets that iterate
differently; 46 double backward and functorch; 47 the meta device; 48 shards without elements
"""
# Why no case of the matrix can meet it, and a test that does.
ELSEWHERE = {
    17: (
        "the engine never asks for an average: it sums and scales",
        "test_layering.py::test_the_engine_does_without",
    ),
    19: (
        "padding is zero, in shards and in gradients, whatever a step before left there",
        "ranks/test_leftovers.py::test_padding_holds_nothing",
    ),
    20: (
        "a matter of the precision plugin",
        "trainer/test_scaler.py::test_all_ranks_skip_a_step_that_overflows_on_one",
    ),
    42: (
        (
            "there are no streams on the CPU. On CUDA two streams fork from the compute stream before"
            " they overwrite slots or read shards, and it joins them before it reads a slot, fills"
            " the reduce buffer again or steps; all cases run there too"
        ),
        "behaviours/test_on_a_gpu.py::test_right",
    ),
    44: (
        (
            "a model holds its engine by hooks, and the engine the model by its parameters: the"
            " garbage collector frees both"
        ),
        "ranks/test_leftovers.py::test_a_model_is_freed_with_its_engine",
    ),
    45: (
        "units, chunks and groups are lists in the order of named_parameters",
        "ints/test_partition.py::test_every_parameter_has_one_unit",
    ),
    47: ("it is a matter of set-up", "ranks/test_meta.py::test_values_are_those_that_rank_0_draws"),
}


@pytest.fixture(scope="session")
def outcomes(request):
    """Of all cells that this session asked for: run together they take a fifth of the time."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cells = [p["cell"] for p in params if "cell" in p]
    found = {}
    for world_size in sorted({w for _, w in cells}):
        names = [n for n, w in cells if w == world_size]
        together = [n for n in names if not CASES[n].refused_by_one]
        outcomes = run_cases("zero3", names, world_size, together)
        found |= {(name, world_size): outcome for name, outcome in outcomes.items()}
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_right_or_refused_or_known(cell, outcomes):
    name, world_size = cell
    outcome = outcomes[cell]
    assert outcome.kind == CASES[name].expected(world_size), outcome.detail


# Several backwards and forwards, clipping, what is frozen, `training_step`, stale slots, loads,
# copies, hooks, derivatives.
OF_THE_STEP = {14, 16, 18, 23, 26, 31, 33, 34, 43, 46}


def _takes_gain(name):
    case = CASES[name]
    concerned = OF_THE_STEP & set(case.pitfalls) or type(case).__module__.endswith("_gradients")
    return (
        concerned
        and case.expected(2) == "right"
        and any(isinstance(module, Chain) for module in case.model().modules())
    )


@pytest.fixture(scope="session")
def outcomes_with_gain(request):
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = [p["chained"] for p in params if "chained" in p]
    return run_cases("zero3", names, 2, names, gain=True)


@pytest.mark.parametrize("chained", sorted(filter(_takes_gain, CASES), key=list(CASES).index))
def test_right_with_a_parameter_of_the_model_itself(chained, outcomes_with_gain):
    """It is in use during the whole step, and nobody gathers it in between."""
    outcome = outcomes_with_gain[chained]
    assert outcome.kind == "right", outcome.detail


# ---- the matrix itself -----------------------------------------------------------------------


def reference_on_rank(rank, world_size, name):
    load_cases()
    return execute(CASES[name], Run, rank, world_size)


def test_the_reference_is_one_process_on_the_joined_batch():
    ranks = run_ranks(reference_on_rank, 2, "plain")
    case = CASES["plain"]
    torch.manual_seed(0)
    model = case.model()
    (optimizer,) = case.optimizers(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(model, torch.cat([case.batch(step, rank) for rank in range(2)]))
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(
            sum(found[f"logged[{step}]"] for found in ranks) / 2, loss.detach()
        )
    for name, p in model.named_parameters():
        for found in ranks:
            torch.testing.assert_close(found[f"parameter {name}"], p.detach())
            torch.testing.assert_close(found[f"gradient of {name}"], p.grad)


def test_every_optimizer_of_torch_has_a_case():
    optimizers = [
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and cls is not torch.optim.Optimizer
    ]
    assert len(optimizers) > 10
    for cls in set(optimizers) - {torch.optim.SparseAdam}:  # refused, see test_errors.py
        assert any(f"`torch.optim.{cls.__name__}`" in case.__doc__ for case in CASES.values()), cls


def test_every_pitfall_has_a_case_or_a_reason():
    numbers = {int(line.split()[0]) for line in " ".join(PITFALLS.split()).split("; ")}
    assert numbers == set(range(1, 49))
    covered = {number for case in CASES.values() for number in case.pitfalls}
    assert covered | set(ELSEWHERE) == numbers and not covered & set(ELSEWHERE)
    for _, test in ELSEWHERE.values():
        file, function = test.split("::")
        assert f"\ndef {function}(" in (Path(__file__).parents[1] / file).read_text(), test


@pytest.mark.parametrize(
    ("engine", "kind", "text"),
    [
        ("unreduced", "wrong", "gradient of blocks.0.up.weight"),
        ("sleeping", "hang", "in set_up"),
        ("dying", "error", "exit code 3"),
        ("raising", "error", "KeyError: 'no reason'"),
        ("ddp", "right", ""),
        ("fsdp2", "right", ""),
    ],
)
def test_outcomes_are_recognised(engine, kind, text, monkeypatch):
    monkeypatch.setattr(type(CASES["plain"]), "timeout", 4.0)
    outcome = run_case(engine, "plain")
    assert outcome.kind == kind, outcome.detail
    assert text in outcome.detail


def test_an_unexpected_error_is_no_refusal():
    outcome = run_case("raising", "read-outside-a-step")
    assert outcome.kind == "error", outcome.detail


def test_an_error_on_one_rank_is_no_refusal():
    outcome = run_case("raisingononerank", "read-outside-a-step")
    assert outcome.kind == "error" and "rank 0 raised nothing" in outcome.detail, outcome.detail
