"""Imports go one way: a module may import only from rows above its own. Files and functions stay short.

`LAYERS` is the whole rule. Every source file must stand in it, so that a new file gets its place
by decision; a name in it without a file is fine. Names are paths below the repository's root,
`*` stands for any file name that no other row gives in full.
"""

import ast
import fnmatch
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

NOTHING: set[str] = set()
NUMPY = {"numpy"}
TORCH = {"torch", "numpy"}
LIGHTNING = {"torch", "numpy", "yaml", "rich", "torchmetrics", "lightning", "lightning_utilities", "typing_extensions"}

# One row a line: modules, and the third-party packages they may import besides the standard
# library. Modules of one row do not import each other.
LAYERS = [
    # Integers and strings.
    (["strategies/garbage", "strategies/launchers", "strategies/position", "strategies/world", "strategies/turns"], NOTHING),
    (["strategies/frames", "strategies/symptoms"], NOTHING),
    (["strategies/reports"], TORCH),
    (["strategies/environment", "strategies/engine/layout", "strategies/engine/order"], NOTHING),
    (["strategies/residency/functions"], NOTHING),
    (["strategies/residency/legacy"], TORCH),
    (["strategies/data/order"], NUMPY),
    (["strategies/data/nobatch", "strategies/data/options"], NOTHING),
    # Tensors.
    (["strategies/residency/apart", "strategies/residency/home", "strategies/residency/refused_graph"], TORCH),
    (["strategies/residency/given_out"], TORCH),
    (["strategies/collectives/board"], NOTHING),
    (["strategies/collectives/diary", "strategies/collectives/wire"], TORCH),
    (["strategies/collectives/group"], TORCH),
    (["strategies/collectives/compared", "strategies/collectives/hybrid", "strategies/collectives/pairwise"], TORCH),
    (["strategies/collectives/timing"], TORCH),
    (["strategies/collectives/shared"], TORCH),
    (["strategies/collectives/door"], TORCH),
    (["strategies/collectives/__init__"], TORCH),
    (
        [
            "strategies/host",
            "strategies/rng",
            "strategies/rollcall",
            "strategies/sessions",
            "strategies/engine/streams",
            "strategies/engine/huge_pages",
            "strategies/engine/partition",
            "strategies/residency/resting",
        ],
        TORCH,
    ),
    (["strategies/residency/flat_gradient", "strategies/residency/numbers"], TORCH),
    (
        [
            "strategies/rendezvous",
            "strategies/residency/in_use",
            "strategies/residency/past_python",
        ],
        TORCH,
    ),
    (["strategies/residency/__init__"], TORCH),
    (["strategies/environment_report"], {*TORCH, "rich"}),
    (["strategies/engine/buffers", "strategies/engine/clearing", "strategies/engine/segments"], TORCH),
    (["strategies/engine/shards"], TORCH),
    (["strategies/engine/chunk", "strategies/engine/lifted"], TORCH),
    (["strategies/engine/unit"], TORCH),
    (["strategies/engine/debug", "strategies/engine/reduce"], TORCH),
    (["strategies/engine/one_rank"], TORCH),
    (
        [
            "strategies/engine/agreement",
            "strategies/engine/build",
            "strategies/engine/hooks",
            "strategies/engine/structure",
            "strategies/engine/transforms",
        ],
        TORCH,
    ),
    (["strategies/engine/gradients", "strategies/engine/saved_tensors"], TORCH),
    (
        [
            "strategies/engine/held_gradients",
            "strategies/engine/joint_steps",
            "strategies/engine/kept_views",
            "strategies/engine/runs",
        ],
        TORCH,
    ),
    (["strategies/engine/access"], TORCH),
    (["strategies/engine/backward"], TORCH),
    (["strategies/engine/engine"], TORCH),
    (["strategies/engine/__init__"], TORCH),
    (["strategies/captured"], TORCH),
    (["strategies/optimizer_questions", "strategies/optimizer_trial"], TORCH),
    (["strategies/device_waits", "strategies/finite", "strategies/optimizers", "strategies/substitution"], TORCH),
    (["strategies/checkpoints/archive"], NOTHING),
    (["strategies/checkpoints/boxes", "strategies/checkpoints/manifest", "strategies/checkpoints/options"], NOTHING),
    (["strategies/checkpoints/errors", "strategies/checkpoints/optimizer_hooks"], TORCH),
    (["strategies/checkpoints/storage"], NOTHING),
    (["strategies/checkpoints/slices"], TORCH),
    (["strategies/checkpoints/gather", "strategies/checkpoints/gradients"], TORCH),
    (["strategies/checkpoints/full", "strategies/checkpoints/writer"], TORCH),
    (["strategies/checkpoints/background", "strategies/checkpoints/sharded"], TORCH),
    (["strategies/checkpoints/model_state", "strategies/checkpoints/optimizer_state"], TORCH),
    (["strategies/ledger", "strategies/long_vector", "strategies/optimizer_uses", "strategies/owned"], TORCH),
    (["strategies/param_groups"], TORCH),
    (["strategies/checkpoints/weights"], {*TORCH, "safetensors"}),
    (["strategies/checkpoints/consolidate", "strategies/checkpoints/inspect"], TORCH),
    (["strategies/averaging"], TORCH),
    (["strategies/data/device", "strategies/data/unsized"], TORCH),
    (["strategies/data/seeding", "strategies/data/source", "strategies/data/stream"], TORCH),
    (["strategies/data/sampler"], TORCH),
    (["strategies/data/feed"], TORCH),
    (["strategies/data/map_feed", "strategies/data/stream_feed"], TORCH),
    (["strategies/data/dispatch"], TORCH),
    (["strategies/data/loader"], TORCH),
    (["strategies/data/shard"], TORCH),
    (["strategies/data/hooks"], TORCH),
    (["strategies/data/__init__"], TORCH),
    # Lightning from here on.
    (["strategies/adapted", "strategies/cluster", "strategies/precision", "strategies/signals"], LIGHTNING),
    (["strategies/processes"], LIGHTNING),
    (["strategies/logged"], LIGHTNING),
    (["strategies/watch"], LIGHTNING),
    (["strategies/watched"], LIGHTNING),
    (["strategies/evaluation", "strategies/metric_states"], LIGHTNING),
    (["strategies/checkpoints/strategy"], LIGHTNING),
    (["strategies/checkpoints/__init__"], LIGHTNING),
    (["strategies/second_run"], LIGHTNING),
    (["strategies/zero3"], LIGHTNING),
    (["strategies/__init__"], LIGHTNING),
    (["strategies/lightning_zero3/__init__"], LIGHTNING),
    # The allocator's options are read and checked before anything imports torch.
    (["callbacks/allocator_grammar"], NOTHING),
    (["callbacks/allocator_environment", "callbacks/allocator_rules"], NOTHING),
    (["callbacks/allocator_early"], NOTHING),
    (["callbacks/allocator_readback", "callbacks/allocator_pluggable", "callbacks/allocator_advice"], TORCH),
    (
        [
            "callbacks/memory_charts",
            "callbacks/memory_leak",
            "callbacks/fsdp_communication",
            "callbacks/memory_ledger",
            "callbacks/memory_ranks",
            "callbacks/memory_source",
        ],
        LIGHTNING,
    ),
    (["callbacks/memory_allocations", "callbacks/memory_oom", "callbacks/memory_phases"], LIGHTNING),
    (["callbacks/memory_figures"], LIGHTNING),
    (["callbacks/memory_report"], LIGHTNING),
    (["callbacks/memory_run"], LIGHTNING),
    (["callbacks/graph_limits", "callbacks/graph_lines"], NOTHING),
    (["callbacks/graph_exchanges", "callbacks/graph_random"], TORCH),
    (["callbacks/graph_values"], TORCH),
    (
        [
            "callbacks/graph_batch",
            "callbacks/graph_python",
            "callbacks/graph_software",
            "callbacks/graph_state",
            "callbacks/graph_tape",
        ],
        LIGHTNING,
    ),
    (["callbacks/graph_device"], LIGHTNING),
    (["callbacks/graph_optimizer", "callbacks/graph_step", "callbacks/graph_watch"], LIGHTNING),
    (["callbacks/graph_call", "callbacks/graph_check", "callbacks/graph_compare"], LIGHTNING),
    (["callbacks/graph_ranks"], LIGHTNING),
    (["callbacks/graph_module"], LIGHTNING),
    (["callbacks/graph_runner"], LIGHTNING),
    (["callbacks/*"], LIGHTNING),
    (["callbacks/__init__"], LIGHTNING),
    (["strategies/lightning_zero3/__main__"], LIGHTNING),
]


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # dotted, absolute


def find_row(module: str, layers: list) -> int | None:
    """Index into the table; a name given in full beats a pattern."""
    for row, (names, _) in enumerate(layers):
        if module in names:
            return row
    for row, (names, _) in enumerate(layers):
        if any("*" in name and fnmatch.fnmatchcase(module, name) for name in names):
            return row
    return None


def source_modules(root: Path) -> list[str]:
    files = [*root.glob("strategies/**/*.py"), *root.glob("callbacks/**/*.py")]
    return sorted(file.relative_to(root).with_suffix("").as_posix() for file in files)


def import_name(module: str) -> str:
    """`strategies/engine/unit` is imported as `lightning_zero3.strategies.engine.unit`."""
    name = module.removesuffix("/__init__").replace("/", ".")
    if name == "strategies.lightning_zero3" or name.startswith("strategies.lightning_zero3."):
        return name.removeprefix("strategies.")
    return f"lightning_zero3.{name}"


def find_imports(module: str, source: str) -> list[Import]:
    """Every import, those inside functions and `if TYPE_CHECKING` too: knowledge is knowledge."""
    package = import_name(module).split(".")
    if not module.endswith("/__init__"):
        package.pop()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, node.module] if node.module else base
            found += [Import(node.lineno, ".".join([*parts, a.name])) for a in node.names]
    return found


def resolve(target: str, modules: dict[str, str]) -> str | None:
    """The source module that `target` names: itself, or the one that holds the name."""
    for name in (target, target.rpartition(".")[0]):
        if name in modules:
            return modules[name]
    return None


def find_faults(root: Path, layers: list) -> list[str]:
    on_disk = source_modules(root)
    by_import_name = {import_name(module): module for module in on_disk}
    faults = []
    for module in on_disk:
        row = find_row(module, layers)
        if row is None:
            faults.append(f"{module}.py: not in the layer table")
            continue
        source = (root / f"{module}.py").read_text(encoding="utf-8")
        for found in find_imports(module, source):
            if fault := judge(found, row, by_import_name, layers):
                faults.append(f"{module}.py:{found.line}: {fault}")
    return list(dict.fromkeys(faults))  # one statement may import several names


def judge(found: Import, row: int, modules: dict[str, str], layers: list) -> str | None:
    """What is wrong with this import in a module of this row, if anything."""
    top = found.target.partition(".")[0]
    if top == "lightning_zero3":
        target = resolve(found.target, modules)
        if target is None:
            return f"imports {found.target}, which is no file here"
        target_row = find_row(target, layers)
        if target_row is not None and target_row >= row:
            direction = "sideways" if target_row == row else "from a row below"
            return f"imports {direction}: {target}"
    elif top not in sys.stdlib_module_names and top not in layers[row][1]:
        allowed = ", ".join(sorted(layers[row][1])) or "nothing"
        return f"imports {top}; allowed in this row besides the standard library: {allowed}"
    return None


def test_imports_go_one_way():
    assert len(source_modules(ROOT)) > 3, "the sources were not found"
    assert find_faults(ROOT, LAYERS) == []


PLANTED = {
    "upward": ("strategies/engine/layout", "from .engine import Zero3Engine", "row below"),
    "upward module": ("strategies/engine/layout", "from . import hooks", "row below"),
    "sideways": ("strategies/engine/layout", "from .order import after", "sideways"),
    "in a function": ("strategies/engine/unit", "def f():\n    from . import hooks", ":2: "),
    "absolute": ("strategies/rng", "import lightning_zero3.strategies.zero3", "row below"),
    "callbacks": ("strategies/zero3", "from ..callbacks import memory", "row below"),
    "lightning": ("strategies/engine/engine", "import lightning.pytorch", "imports lightning"),
    "torch": ("strategies/environment", "from torch import nn", "imports torch"),
    "unlisted": ("strategies/engine/helpers", "", "not in the layer table"),
    "no such module": ("strategies/zero3", "from .engine.nothing import x", "no file here"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(case, tmp_path):
    module, source, expected = PLANTED[case]
    allowed = {
        "strategies/__init__": "from .zero3 import Zero3Strategy",
        "strategies/zero3": "import torch\nfrom .engine import Zero3Engine",
        "strategies/engine/__init__": "from .engine import Zero3Engine",
        "strategies/engine/engine": "import torch\nfrom . import hooks\nfrom .layout import split",
        "strategies/engine/hooks": "import math",
        "strategies/engine/order": "",
        "strategies/engine/layout": "import math",
        "callbacks/memory": "from ..strategies import Zero3Strategy",
        "callbacks/__init__": "from .memory import Memory",
    }
    for name, text in allowed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    assert find_faults(tmp_path, LAYERS) == []
    (tmp_path / f"{module}.py").write_text(source)
    faults = find_faults(tmp_path, LAYERS)
    assert len(faults) == 1 and expected in faults[0] and faults[0].startswith(module), faults


# ---- sizes -----------------------------------------------------------------------------------

MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 400, 40


def functions(source: str) -> list[tuple[str, int]]:
    """Name of each, and lines below its signature: the docstring and the code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node.body[-1].end_lineno - node.body[0].lineno + 1))
    return found


def test_files_and_functions_are_short():
    sources = {module: (ROOT / f"{module}.py").read_text(encoding="utf-8") for module in source_modules(ROOT)}
    lengths = {module: len(source.splitlines()) for module, source in sources.items()}
    assert {module: n for module, n in lengths.items() if n > MOST_LINES_OF_A_FILE} == {}
    found = [(module, name, n) for module, source in sources.items() for name, n in functions(source)]
    assert len(found) > 1000 and max(n for *_, n in found) > 20, "the functions were not found"
    assert [entry for entry in found if entry[2] > MOST_LINES_OF_A_FUNCTION] == []


def test_a_long_function_is_counted():
    assert functions('def f(\n    a,\n):\n    """Two\n    lines."""\n    x = a\n\n    return x\n') == [("f", 5)]


def test_the_size_of_the_engine_is_what_the_document_says():
    text = (ROOT / "docs" / "CONTRACTS.md").read_text(encoding="utf-8")
    said = re.search(r"`strategies/engine/` has about ([\d,]+) lines", text)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "strategies/engine").glob("*.py"))
    assert said is not None and abs(int(said[1].replace(",", "")) - lines) <= 0.05 * lines, "run tests/ranks/make_contracts.py"


def says(source: str, word: str) -> bool:
    """Whether it is an attribute in ``source``, or a string."""
    nodes = list(ast.walk(ast.parse(source)))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return word.lower() in map(str.lower, strings + [node.attr for node in nodes if isinstance(node, ast.Attribute)])


@pytest.mark.parametrize("word", ["record_stream", "AVG"])
def test_the_engine_does_without(word):
    """Slots are never returned to the allocator, and events order streams (engine/streams.py). Means are sums, scaled."""
    for module in source_modules(ROOT):
        if module.startswith(("strategies/engine/", "strategies/collectives/")):
            assert not says((ROOT / f"{module}.py").read_text(encoding="utf-8"), word), module


def test_a_word_is_seen():
    planted = "x.record_stream(s)", "dist.all_reduce(x, dist.ReduceOp.AVG)", 'door.all_reduce(x, "avg")'
    assert [(says(s, "record_stream"), says(s, "AVG")) for s in planted] == [(True, False), (False, True), (False, True)]
