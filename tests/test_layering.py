"""Imports between rooms go one way, and no room grows; `helpers/rooms.py` has the table."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.rooms import (
    PICTURE,
    ROOMS,
    ROOT,
    Room,
    count_tokens,
    draw,
    picture_in,
    room_of,
    sizes,
    source_modules,
)


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # dotted, absolute


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


def find_faults(root: Path, rooms: list[Room]) -> list[str]:
    on_disk = source_modules(root)
    by_import_name = {import_name(module): module for module in on_disk}
    faults, used, inside = [], {room.name: set() for room in rooms}, {}
    for module in on_disk:
        room = room_of(module, rooms)
        if room is None:
            faults.append(f"{module}.py: its room is not in the table")
            continue
        for found in find_imports(module, (root / f"{module}.py").read_text(encoding="utf-8")):
            target = resolve(found.target, by_import_name)
            if target is not None and (other := room_of(target, rooms)) is not None:
                if other == room:
                    inside.setdefault(module, set()).add(target)
                    continue
                used[room.name].add(other.name)
            if fault := judge(found, target, room, rooms):
                faults.append(f"{module}.py:{found.line}: {fault}")
    for room in rooms:
        if unused := set(room.uses.split()) - used[room.name]:
            faults.append(f"{room.name} uses nothing of {', '.join(sorted(unused))}")
    faults += [f"{' -> '.join(cycle)}: a cycle" for cycle in find_cycles(inside)]
    return list(dict.fromkeys(faults))  # one statement may import several names


def judge(found: Import, target: str | None, room: Room, rooms: list[Room]) -> str | None:
    """What is wrong with this import of another room, or of a package, if anything."""
    top, _, name = found.target.partition(".")[0], *found.target.rpartition(".")[1:]
    if top != "lightning_zero3":
        if top in sys.stdlib_module_names or top in room.packages.split():
            return None
        return f"imports {top}, and {room.name} may not"
    other = None if target is None else room_of(target, rooms)
    if other is None:
        return f"imports {found.target}, which is no file here"
    if other.name not in room.uses.split():
        return f"imports {target}, and {room.name} may not use that room"
    if rooms.index(other) > rooms.index(room):
        return f"imports {target} from a room below"
    if name.startswith("_"):
        return f"imports {name}, which is private to {target}"
    if room.name.startswith("callbacks") and not other.name.startswith("callbacks"):
        if target not in (other.name, f"{other.name}/__init__"):
            return f"imports {target}: callbacks use what {other.name}/__init__ offers"
    return None


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Circles of imports within rooms; a room's `__init__` imports its files, and they not it."""
    finished, cycles = set(), []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append([*path[path.index(module) :], module])
        elif module not in finished:
            for target in sorted(graph.get(module, ())):
                visit(target, [*path, module])
            finished.add(module)

    for module in sorted(graph):
        visit(module, [])
    return cycles


def test_imports_go_one_way():
    assert len(source_modules(ROOT)) > 100, "the sources were not found"
    assert find_faults(ROOT, ROOMS) == []


PLANTED = {
    "a room below": (
        "strategies/engine/layout",
        "from ..zero3 import Zero3Strategy",
        "may not use",
    ),
    "a cycle": ("strategies/engine/layout", "from . import hooks", "a cycle"),
    "in a function": ("strategies/engine/layout", "def f():\n    from ..zero3 import x", ":2: "),
    "absolute": ("strategies/engine/layout", "import lightning_zero3.strategies.zero3", "may not"),
    "callbacks": ("strategies/zero3", "from .engine import a\nfrom ..callbacks import b", ":2: "),
    "lightning": ("strategies/engine/layout", "import lightning.pytorch", "imports lightning"),
    "unlisted": ("strategies/nowhere/file", "", "not in the table"),
    "no such file": ("strategies/engine/layout", "from .nothing import x", "no file here"),
    "private": ("strategies/zero3", "from .engine import _a", "imports _a"),
    "unused": ("strategies/zero3", "", "uses nothing of strategies/engine"),
    "past the front": ("callbacks/__init__", "from ..strategies.engine.layout import a", "offers"),
}
SMALL = [
    Room("strategies/collectives", ""),
    Room("strategies/engine", "", "strategies/collectives"),
    Room("strategies/zero3", "", "strategies/engine"),
    Room("callbacks", "", "strategies/engine"),
]


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_found(case, tmp_path):
    module, source, expected = PLANTED[case]
    allowed = {
        "strategies/zero3": "import torch\nfrom .engine import Zero3Engine",
        "strategies/collectives/__init__": "",
        "strategies/engine/__init__": "from .hooks import Zero3Engine",
        "strategies/engine/hooks": "from ..collectives import a\nfrom .layout import b",
        "strategies/engine/layout": "import math",
        "callbacks/__init__": "from ..strategies.engine import Zero3Engine",
    }
    for name, text in allowed.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    assert find_faults(tmp_path, SMALL) == []
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / f"{module}.py").write_text(source)
    faults = find_faults(tmp_path, SMALL)
    assert len(faults) == 1 and expected in faults[0], faults


def test_the_page_has_the_table():
    assert picture_in(PICTURE.read_text(encoding="utf-8")) == draw(ROOMS), (
        "run tests/helpers/rooms.py"
    )


def test_the_engine_is_seven_floors_deep():
    """A file stands one floor above those that it imports; `__init__`, which has all names, is none."""
    files = {path.stem: path for path in (ROOT / "strategies" / "engine").glob("*.py")}

    def floor(name):
        trees = ast.walk(ast.parse(files[name].read_text()))
        below = {n.module for n in trees if isinstance(n, ast.ImportFrom) and n.level == 1}
        return 1 + max(map(floor, below & files.keys()), default=0)

    floors = {name: floor(name) for name in files if name != "__init__"}
    assert floors["layout"] == 1 and floors["unit"] == 3
    assert {name: n for name, n in floors.items() if n > 7} == {}


def test_one_file_reaches_into_torch():
    modules = {m: (ROOT / f"{m}.py").read_text(encoding="utf-8") for m in source_modules(ROOT)}
    assert {m for m, text in modules.items() if "torch._C" in text} == {
        "strategies/support/torch_internals"
    }


# ---- sizes ---------------------------------------------------------------------------------------


def test_no_room_outgrows_its_budget():
    """A room that needs more gets it by decision: raise its number in the table, and say why."""
    found = sizes(ROOT, ROOMS)
    assert sum(found.values()) > 50_000, "the sources were not found"
    budgets = {room.name: room.tokens for room in ROOMS}
    assert {name: n for name, n in found.items() if n > budgets[name]} == {}


def test_tokens_are_those_of_code():
    source = (
        '"""Two\nlines."""\nx = [1,  # one\n     2]\n\n\ndef f():\n    "Doc."\n    return f"{x}"\n'
    )
    assert count_tokens(source) == 14
    assert count_tokens(source.replace("    ", "  ").replace("  # one", "")) == count_tokens(source)


def says(source: str, word: str) -> bool:
    """Whether it is an attribute in ``source``, or a string."""
    nodes = list(ast.walk(ast.parse(source)))
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    attributes = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return word.lower() in map(str.lower, strings + attributes)


@pytest.mark.parametrize("word", ["record_stream", "AVG"])
def test_the_engine_does_without(word):
    """Slots never go back to the allocator, and events order streams. Means are sums, scaled."""
    for module in source_modules(ROOT):
        if module.startswith(("strategies/engine/", "strategies/collectives/")):
            assert not says((ROOT / f"{module}.py").read_text(encoding="utf-8"), word), module


def test_a_word_is_seen():
    planted = ("x.record_stream(s)", "dist.all_reduce(x, dist.ReduceOp.AVG)", 'f(x, "avg")')
    found = [(says(s, "record_stream"), says(s, "AVG")) for s in planted]
    assert found == [(True, False), (False, True), (False, True)]
