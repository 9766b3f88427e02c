"""Run every behaviour under zero3, DDP and FSDP2; write what came out to docs/BEHAVIOURS.md (what
people ask about) and docs/BEHAVIOURS_ALL.md (the rest), and counts to README.md.

    python tests/behaviours/make_table.py [NAME ...]
    python tests/behaviours/make_table.py --as-expected

Runs everything by default, else these cases and what is not in the documents yet. `ENGINE:NAME`
runs one cell of a row. With `--as-expected` nothing runs: zero3's cells are what its cases expect,
the others what they were, as after a case was deleted.

The documents are written after each run, so that a run of all that is broken off loses nothing:
cells that did not run again keep what they were.
"""

import multiprocessing
import platform
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 4  # a busy machine is no hang
# runs of two ranks each: they wait for each other, and for time-outs, more than they compute
AT_ONCE = 3
TOGETHER = 20  # cases in one run
TABLE, ALL = ROOT / "docs" / "BEHAVIOURS.md", ROOT / "docs" / "BEHAVIOURS_ALL.md"
README = ROOT / "README.md"
ENGINES = ("zero3", "ddp", "fsdp2")
KINDS = ("right", "refused", "wrong", "error", "hang", "-")
TITLES = {
    "access": "Reading, writing and copying parameters",
    "resting": "Other ways to a parameter outside its unit's use",
    "root": "Parameters of the model itself",
    "states": "State dicts, and rank 0 alone",
    "outputs": "Calls, outputs and what ranks do differently",
    "autograd": "Derivatives, hooks, checkpoints and compilation",
    "gradients": "Other ways to a gradient",
    "modules": "Modules",
    "layers": "Layers of researchers",
    "buffers": "Buffers",
    "graphs": "Graphs of other shapes",
    "optimizers": "Optimizers",
    "memory": "Past torch's dispatcher and autograd",
    "trainer": "Lightning's own features",
}
TOLD = "What zero3 says when it refuses"
# Rows of `PROMISED` that people ask about; they stand in BEHAVIOURS.md, all others in the appendix.
ASKED = frozenset(
    "plain method-other-than-forward two-forwards-one-backward retain-graph several-losses"
    " backward-inside-step gradient-accumulation contrastive-over-ranks"
    " weight-read-outside-its-unit penalty-over-parameters questions-outside-a-step functional-call"
    " copied-into clamped-in-forward target-network changed-outside-its-unit"
    " embedding-with-max-norm low-rank-merged codebook-as-parameter"
    " read-when-gathered surgery-when-gathered saved-on-rank-zero forward-on-rank-zero"
    " pruned-during-training load-state-dict"
    " tied-across-units tied-blocks scalar-parameter channels-last-parameter mixed-dtypes"
    " own-parameter-class dict-output opaque-output view-of-weight kept-view-of-weight"
    " unused-on-one-rank blocks-skipped-by-their-forward unused-in-some-steps mixture-of-experts"
    " exception-in-forward exception-in-backward"
    " gradient-penalty backward-create-graph grad-of-parameters inner-loop"
    " functorch functorch-by-input functorch-hessian ensemble-by-vmap"
    " function-saving-weight fused-linear-loss reversible-blocks adjoint-method"
    " save-on-cpu sparse-gradients tensor-hooks-on-parameters post-accumulate-hooks module-hooks"
    " grad-read-after-backward grad-clipped-by-user grad-scaled-by-user grad-assigned"
    " grad-rows-changed grad-accumulated-by-hand"
    " checkpoint-non-reentrant checkpoint-reentrant checkpoint-several-blocks"
    " checkpoint-with-dropout selective-checkpoint-around-several"
    " compiled-blocks compiled-model scripted-blocks"
    " weight-norm spectral-norm low-rank-adapter lstm attention convolutions"
    " frozen unfrozen-later toggled-every-step"
    " batch-norm buffers buffers-written-by-data growing-buffers"
    " optimizer-adam-w-foreach optimizer-adam-fused optimizer-adafactor optimizer-muon"
    " optimizer-lbfgs closure"
    " param-groups param-group-edits add-param-group zero-grad-keeps-tensors"
    " two-optimizers two-optimizers-toggled two-optimizers-one-graph"
    " Ema Swa Unfreezing Pruned LearningRateFound GradientNorms ClippedByNorm Manual"
    " optimizer-of-norms read-outside-a-step numpy-between-steps"
    " initialized-after-set-up multiplied-in-place data-replaced element-set-between-steps"
    " vector-to-parameters data-read-outside-its-unit"
    " deepcopy-after averaged-model-ungathered averaged-model-after pickle-after"
    " state-dict-ungathered".split()
)
# Reasons in `NOT_PROMISED` that begin so are of programs that go on to raise.
STAYS = "Stays an error: "
# Rows that were deleted with the mechanisms that only they needed: why, how many they were, and
# what such a program gets now.
DROPPED = (
    (
        "They go past torch: addresses, arrays, DLPack, storages, `set_`",
        23,
        "NaN or an error; `debug=True` sees writes to weights in use",
    ),
    (
        "They do not ask the parameter's class: `torch.tensor(p)`, `torch.Tensor(p)`, `alpha=p`",
        14,
        "NaN",
    ),
    (
        "Collectives of the user's own on weights, which the strategy keeps alike",
        13,
        "functions of `torch.distributed` store what they write, methods of a process group are"
        " torch's error",
    ),
    (
        "Gradients kept without `clone()`, and followed over what comes later",
        15,
        "`p.grad` is the gradient of now; one that is over is an error; a tensor that was assigned"
        " and kept does not follow, without a word",
    ),
    (
        "Transforms, compiled functions, scripts and tensor classes that are given a sharded weight"
        " itself; `torch.func.grad` in a layer's own forward",
        13,
        "NaN or torch's error; a copy of the weight is right",
    ),
    (
        "Weights kept over a step, and writes to copies of them",
        7,
        "what is kept is a snapshot, with a warning; a write to a copy is an error, and to"
        " `p.data`, `p.detach()` and their rows it is stored",
    ),
    ("Wrong under ddp too, or refused by torch", 8, "torch's error, ours, or what ddp does"),
    ("Another shape or dtype than at set-up (`model.double()`)", 3, "an error"),
    ("Stale gradients, and a network stepped before its backward", 3, "an error"),
    (
        "Gradients used, or made zeros, after a backward that failed",
        3,
        "they are cleared",
    ),
    ("Gradients from before a parameter came to an optimizer", 1, "there are none"),
    (
        "Changes in place as nobody spells them (`weight.t_()`, `F.relu(weight, inplace=True)`,"
        " `F.embedding(..., max_norm=...)` outside its layer)",
        5,
        "an error, or untested",
    ),
    (
        "Rare combinations, in the middle of a backward, a closure or a failure, of fake tensors",
        9,
        "untested",
    ),
)
HEAD = """# What a model may do

Generated by `tests/behaviours/make_table.py`, whose tests check it. Every row is a small program, trained for a few steps on
two ranks with different data, and compared in losses, gradients and parameters with plain torch whose gradients are averaged
by hand. Here are the rows that people ask about. [BEHAVIOURS_ALL.md](BEHAVIOURS_ALL.md) has all others, says how each engine
was run and what zero3 is known not to see, and quotes its errors.

| | |
|-|-|
| right | the same numbers |
| refused | an error that names the parameter or unit, else the optimizer or callback, and what to do; or torch's own |
| wrong | it ran, with other numbers and without a word |
| error | any other error, or a dead process |
| hang | no end |
| - | the program is about `gathered`, which only zero3 has |
"""
APPENDIX = """# What a model may do: the other rows

The appendix of [BEHAVIOURS.md](BEHAVIOURS.md), which says what the words mean. Generated by `tests/behaviours/make_table.py`;
`test_behaviours.py` and `test_in_the_trainer.py` there check the zero3 column, `test_table.py` some cells of the others.
{run}
The later ones are of rows that were added, or run again.

Programs run in fp32 over gloo on the CPU. zero3 is the engine of `Trainer(strategy="zero3")`. ddp is
`DistributedDataParallel(find_unused_parameters=True)`, where every rank holds the whole model; re-entrant checkpoints have the
options that torch's documentation names for them. fsdp2 is `fully_shard` on every repeated block and the model; it is told of
methods beside `forward`, and of exceptions. For both the step runs inside the model's `forward` (not for fsdp2 where the
optimizer steps in it, too), and for ddp a backward inside of the step, or a second one, is prepared, as Lightning does it. What
is compiled is compiled with the backend `aot_eager`. Rows on gradients, loads, hooks and the like are tested once more in a
model that has a parameter of its own beside its layers: it is in use during the whole step.

zero3 is right in the same rows with `debug=True` (`test_in_debug.py`), on one rank that exchanges with itself
(`test_over_a_group.py`) and in `bf16-mixed` (`test_in_bfloat16.py`, within its rounding), where in-place changes of weights in
a forward are refused.

What zero3 is known not to see has no row, and numbers are other ones then without a word: writes to weights in their layer's
forward past torch's counters (by an address, an array, an extension), without `debug=True`, and to buffers that are not
persistent and floating; a tensor that was assigned to `p.grad`, kept, and read after clipping or another backward (in torch it
is the gradient; here it is what it was); an optimizer's rule that combines parameters, begins later than step 32, and of which
no option tells when; hooks on an optimizer of the user's own whose `step` calls `super().step()`: torch calls them once more in
there, where param groups hold what this rank steps on; and a `TorchDispatchMode` of the user's own, around a forward, that does
not do what it is told.

The section on Lightning's own features is of modules that the Trainer trains for three epochs: fsdp2 is
`ModelParallelStrategy` there. They are compared, in losses and weights, with one process that trains on the joined batches, or
with ddp (`all_gather`, the finders, Muon). An error of Lightning's own counts as refused for all that get it;
`DistributedDataParallel` takes no `SyncBatchNorm` on CPUs.
"""


def main(names: list[str]) -> int:
    """The number of runs that failed by themselves."""
    from behaviours.harness import Outcome

    cases = all_rows()
    cells, run = read_cells(cases), read_run()
    if names == ["--as-expected"]:
        for name, case in cases.items():
            if case.expected(2) == "right":
                cells[name]["zero3"] = Outcome("right")
            elif cells[name]["zero3"].kind != "refused":
                raise ValueError(f"{name} is refused now: run it, and its text will be quoted")
        write(cases, cells, run)
        return 0
    chosen = {
        engine: [
            name
            for name in cases
            if not names
            or {name, f"{engine}:{name}"} & set(names)
            or cells[name][engine].kind not in KINDS
        ]
        for engine in ENGINES
    }
    failures = 0
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn"), be_patient) as pool:
        jobs = {
            pool.submit(outcomes, *job): job
            for engine in ENGINES
            for job in runs(engine, chosen[engine], cells)
        }
        for done in as_completed(jobs):
            engine, batch, _ = jobs[done]
            try:
                found = done.result()
            except (
                Exception
            ) as error:  # the run of others goes on, and these cells stay what they were
                failures += 1
                print(f"{engine}, {batch} failed: {error}", flush=True)
                continue
            for name, outcome in found.items():
                cells[name][engine] = outcome
                print(engine, name, outcome.kind, flush=True)
            write(cases, cells, run)
    whole = sum(map(len, chosen.values())) == len(ENGINES) * len(cases)
    write(cases, cells, this_run("All") if whole else with_part(run, this_run("Some")))
    return failures


def write(cases, cells, run: str) -> None:
    """Both documents, and the counts in the README."""
    TABLE.write_text(render(cases, cells))
    ALL.write_text(render_all(cases, cells, run))
    README.write_text(counted(README.read_text(), cells))


def all_rows() -> dict:
    """What has a row, by name: cases that run without a Trainer, and features of Lightning."""
    from behaviours import load_cases
    from behaviours.harness import CASES
    from behaviours.in_the_trainer import FEATURES

    load_cases()
    return {**CASES, **FEATURES}


def asked_rows() -> dict[str, list[str]]:
    """What stands in BEHAVIOURS.md: names in :func:`all_rows`, by titles of groups."""
    from behaviours.harness import CASES
    from behaviours.in_the_trainer import kebab
    from behaviours.promised import PROMISED

    found = {
        title: [name if name in CASES else kebab(name) for name in names if name in ASKED]
        for title, names in PROMISED.items()
    }
    return {title: names for title, names in found.items() if names}


def runs(engine: str, wanted: list[str], cells) -> list[tuple[str, list[str], bool]]:
    """Engine, cases, and whether these run together: those do that were right the last time, in a
    fifth of the time.
    """
    from behaviours.harness import CASES

    right = [name for name in wanted if cells[name][engine].kind == "right"]
    right = [
        name
        for name in right
        if name in CASES and (engine != "zero3" or CASES[name].expected(2) == "right")
    ]
    alone = [(engine, [name], False) for name in wanted if name not in right]
    return alone + [
        (engine, right[start : start + TOGETHER], True) for start in range(0, len(right), TOGETHER)
    ]


def be_patient() -> None:
    """In a process that runs some of it."""
    for case in all_rows().values():
        case.timeout *= PATIENCE


def outcomes(engine: str, names: list[str], together: bool) -> dict:
    """By name."""
    from behaviours.harness import run_cases
    from behaviours.in_the_trainer import FEATURES, run_feature

    if names[0] in FEATURES:  # alone
        return {names[0]: run_feature(engine, names[0])}
    return run_cases(engine, names, 2, names if together else ())


def this_run(cells: str) -> str:
    """A sentence for the head: which cells are of which commit, under what."""
    from importlib.metadata import version

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    commit = git("rev-parse", "--short=8", "HEAD")
    changed = " with changes" if git("status", "--porcelain", "strategies", "tests") else ""
    torch, lightning, python = (
        version("torch").partition("+")[0],
        version("lightning"),
        platform.python_version(),
    )
    return (
        f"{cells} cells were run at commit {commit}{changed} (torch {torch}, Lightning {lightning},"
        f" Python {python})."
    )


def with_part(run: str, part: str) -> str:
    """The sentences of `run`, and `part` unless one of them names its commit and versions
    already.
    """
    return run if part.removeprefix("Some") in run else f"{run} {part}".strip()


def read_run() -> str:
    """What the appendix says of the commits and versions that it is of."""
    return " ".join(
        re.findall(r"^(?:All|Some) cells were run at commit .*\)\.$", ALL.read_text(), re.MULTILINE)
    )


def rows_in(document: Path) -> dict[str, dict[str, str]]:
    """The kind of every cell of one document, by behaviour and engine."""
    sections = document.read_text().partition("\n## ")[2]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in sections.splitlines()
        if line.startswith("| ")
    ]
    # a title has no cells, the head of a table no name
    return {row[0]: dict(zip(ENGINES, row[1:], strict=True)) for row in rows if row[0] and row[1]}


def read_table() -> dict[str, dict[str, str]]:
    """The same of both documents."""
    return {**rows_in(TABLE), **rows_in(ALL)}


def read_told() -> dict:
    """zero3's refusals, by behaviour."""
    from behaviours.harness import Outcome

    section = ALL.read_text().partition(f"## {TOLD}\n")[2].partition("\n## ")[0]
    return {
        line[1]: Outcome("refused", line[2])
        for line in re.finditer(r"^- (.*?): (\w+(?:Error|Exception): .*)$", section, re.MULTILINE)
    }


def read_cells(cases) -> dict:
    """Outcomes as the documents have them, by name and engine; of kind "?" where they do not."""
    from behaviours.harness import Outcome

    kinds, told = read_table(), read_told()
    cells = {
        name: {e: Outcome(kinds.get(case.__doc__, {}).get(e, "?")) for e in ENGINES}
        for name, case in cases.items()
    }
    for name, case in cases.items():
        if cells[name]["zero3"].kind == "refused":
            cells[name]["zero3"] = told.get(case.__doc__, Outcome("?"))
    return cells


def render(cases, cells) -> str:
    """The document of what people ask about."""
    from behaviours.promised import NOT_PROMISED

    lines = [HEAD, f"| of {len(cells)} | {' | '.join(ENGINES)} |", "|-|-|-|-|"]
    for kind in KINDS:
        counts = [Counter(row[engine].kind for row in cells.values())[kind] for engine in ENGINES]
        lines.append(f"| {kind}: | {' | '.join(map(str, counts))} |")
    lines += ["", "## What people ask about", "", f"| | {' | '.join(ENGINES)} |", "|-|-|-|-|"]
    for title, names in asked_rows().items():
        lines += [f"| **{title}** | | | |", *(line_of(cases, cells, name) for name in names)]
    lines += ["", "## What stays an error", ""]
    lines += [
        f"- {one_up(reason.removeprefix(STAYS))}" for reason in NOT_PROMISED if STAYS in reason
    ]
    total = sum(count for _, count, _ in DROPPED)
    lines += [
        "",
        "## What was dropped",
        "",
        f"{total} rows that nobody's program needs are no longer tested, and what only they needed"
        " is gone. Such programs get now:",
        "",
        *(f"- {why} ({count}): {now}." for why, count, now in DROPPED),
    ]
    return "\n".join(lines) + "\n"


def one_up(text: str) -> str:
    """``text`` with a capital letter."""
    return text[:1].upper() + text[1:]


def line_of(cases, cells, name: str) -> str:
    """A row."""
    kinds = (cells[name][engine].kind for engine in ENGINES)
    return f"| {cases[name].__doc__} | {' | '.join(kinds)} |"


def render_all(cases, cells, run: str) -> str:
    """The appendix."""
    asked = {name for names in asked_rows().values() for name in names}
    lines = [APPENDIX.format(run=run.replace("). ", ").\n")).rstrip("\n")]
    for theme, title in TITLES.items():
        rows = [
            line_of(cases, cells, name)
            for name, case in cases.items()
            if name not in asked and type(case).__module__.endswith(f"_{theme}")
        ]
        lines += ["", f"## {title}", "", f"| | {' | '.join(ENGINES)} |", "|-|-|-|-|", *rows]
    lines += ["", f"## {TOLD}", ""]
    # of what torch.compile adds nothing
    lines += [
        f"- {case.__doc__}: {cells[name]['zero3'].detail.partition(chr(10))[0]}"
        for name, case in cases.items()
        if cells[name]["zero3"].kind == "refused"
    ]
    return "\n".join(lines) + "\n"


def counted(readme: str, cells) -> str:
    """The README with the numbers of rows that it names."""
    ddp, fsdp2 = (
        sum(row[engine].kind == "wrong" for row in cells.values()) for engine in ("ddp", "fsdp2")
    )
    readme = re.sub(r"says of \d+ things", f"says of {len(cells)} things", readme)
    return re.sub(
        r"DDP in \d+ of them, FSDP2 in \d+", f"DDP in {ddp} of them, FSDP2 in {fsdp2}", readme
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    sys.exit(main(sys.argv[1:]))
