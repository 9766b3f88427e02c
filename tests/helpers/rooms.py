"""The rooms of the package: what each may import, and how large it may be.

    python tests/helpers/rooms.py    # rooms with their tokens; writes picture and table in ARCHITECTURE.md

A room is a folder of `strategies/` or `callbacks/`, or a file that stands beside them. Its size is
counted in tokens of Python code, without comments and docstrings, which formatting does not change.
"""

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- rooms: written by tests/helpers/rooms.py -->", "<!-- end of rooms -->"


@dataclass(frozen=True)
class Room:
    """One row of the table."""

    name: str  # its path below the root, without ".py"
    about: str
    uses: str = ""  # the rooms that it imports from, each of which stands in a row above
    packages: str = "torch"  # what it may import beside the standard library
    tokens: int = 0  # the most that it may have


_LIGHTNING = "torch lightning typing_extensions"

# Imports go up in this table, never down.
ROOMS = [
    Room(
        "strategies/support",
        "collector pauses, thread stacks, RNG states, texts",
        packages="torch numpy",
        tokens=1_358,
    ),
    Room("strategies/collectives", "every exchange between ranks", tokens=2_814),
    Room(
        "strategies/communicators",
        "which one a run has; shared memory",
        "strategies/collectives",
        tokens=1_927,
    ),
    Room(
        "strategies/engine",
        "ZeRO-3 in plain torch",
        "strategies/support strategies/collectives",
        "torch numpy",
        tokens=25_632,
    ),
    Room(
        "strategies/initial_values",
        "of layers on the meta device",
        "strategies/engine",
        tokens=859,
    ),
    Room(
        "strategies/checked_units",
        "the debug mode: lost writes are errors",
        "strategies/engine",
        tokens=228,
    ),
    Room(
        "strategies/graph_replay",
        "what a captured step does to the engine",
        "strategies/engine",
        tokens=563,
    ),
    Room(
        "strategies/activations",
        "what layers save, in host memory",
        "strategies/support strategies/engine",
        tokens=1_448,
    ),
    Room(
        "strategies/state_dicts",
        "values and optimizer state by name",
        "strategies/support strategies/engine",
        tokens=5_400,
    ),
    Room(
        "strategies/optimizers",
        "how an optimizer may step",
        "strategies/engine",
        tokens=4_430,
    ),
    Room(
        "strategies/launch",
        "how processes find each other",
        "strategies/support strategies/collectives",
        _LIGHTNING,
        tokens=10_283,
    ),
    Room(
        "strategies/data",
        "sharded loaders that resume",
        "strategies/support",
        "torch numpy tqdm lightning",
        tokens=13_234,
    ),
    Room(
        "strategies/checkpoints",
        "files: one or sharded, atomic",
        "strategies/support strategies/collectives strategies/engine strategies/state_dicts"
        " strategies/optimizers strategies/launch strategies/data",
        f"{_LIGHTNING} safetensors",
        tokens=15_408,
    ),
    Room(
        "strategies/numerics",
        "precision, and the first nan or inf",
        "strategies/support strategies/engine",
        _LIGHTNING,
        tokens=1_951,
    ),
    Room(
        "strategies/liveness",
        "heartbeats and the watchdog",
        "strategies/support strategies/collectives strategies/communicators strategies/engine"
        " strategies/launch",
        _LIGHTNING,
        tokens=6_320,
    ),
    Room(
        "strategies/evaluation",
        "ranks with unequal numbers of batches",
        "strategies/support strategies/collectives strategies/engine strategies/data strategies/liveness",
        f"{_LIGHTNING} torchmetrics",
        tokens=2_596,
    ),
    Room(
        "strategies/adapters",
        "Lightning's callbacks on shards",
        "strategies/collectives strategies/engine",
        _LIGHTNING,
        tokens=2_879,
    ),
    Room(
        "strategies/memory_ledger",
        "bytes of model state on this rank",
        "strategies/engine",
        tokens=380,
    ),
    Room(
        "strategies/plan",
        "what a run will need, before it starts",
        "strategies/support strategies/engine strategies/optimizers",
        _LIGHTNING,
        tokens=2_537,
    ),
    Room(
        "strategies/zero3",
        "the strategy: Trainer hooks, a few calls each",
        "strategies/support strategies/collectives strategies/communicators strategies/engine"
        " strategies/activations strategies/state_dicts strategies/optimizers strategies/launch strategies/data"
        " strategies/checkpoints"
        " strategies/numerics strategies/liveness strategies/evaluation strategies/adapters"
        " strategies/memory_ledger strategies/plan strategies/initial_values strategies/checked_units",
        _LIGHTNING,
        tokens=3_037,
    ),
    Room(
        "strategies",
        "registers the strategy",
        "strategies/collectives strategies/engine strategies/state_dicts strategies/launch"
        " strategies/data strategies/checkpoints strategies/liveness strategies/zero3",
        "lightning",
        tokens=194,
    ),
    Room(
        "strategies/lightning_zero3",
        "what users import, and its commands",
        "strategies/support strategies/state_dicts strategies",
        "",
        tokens=309,
    ),
    Room(
        "strategies/lightning_zero3/ray",
        "a strategy, reports and checkpoints for Ray Train",
        "strategies",
        f"{_LIGHTNING} ray",
        tokens=458,
    ),
    Room(
        "callbacks/allocator",
        "options of the CUDA allocator",
        "strategies/support",
        packages=_LIGHTNING,
        tokens=7_222,
    ),
    Room(
        "callbacks/memory",
        "where memory goes, and who took it",
        "strategies/support strategies/engine callbacks/allocator",
        _LIGHTNING,
        tokens=15_225,
    ),
    Room(
        "callbacks/timing",
        "where the time of a step goes",
        "callbacks/memory",
        _LIGHTNING,
        tokens=2_122,
    ),
    Room(
        "callbacks/graphs",
        "the training step as CUDA graphs",
        "strategies/support strategies/collectives strategies/communicators strategies/engine"
        " strategies/graph_replay",
        f"{_LIGHTNING} torchmetrics lightning_utilities",
        tokens=11_046,
    ),
    Room(
        "callbacks/cuda_backend",
        "precision and workspaces of CUDA's libraries",
        "callbacks/allocator",
        _LIGHTNING,
        tokens=1_817,
    ),
    Room(
        "callbacks/export",
        "models as programs, out of shards",
        "strategies/support strategies/checkpoints",
        f"{_LIGHTNING} onnx onnx_ir",
        tokens=5_011,
    ),
    Room(
        "callbacks",
        "loads a callback when it is first used",
        "callbacks/allocator callbacks/memory callbacks/timing callbacks/graphs"
        " callbacks/cuda_backend callbacks/export",
        "",
        tokens=207,
    ),
]


def source_modules(root: Path) -> list[str]:
    """Every source file: its path below ``root`` without ".py"."""
    files = [*root.glob("strategies/**/*.py"), *root.glob("callbacks/**/*.py")]
    return sorted(file.relative_to(root).with_suffix("").as_posix() for file in files)


def room_of(module: str, rooms: list[Room]) -> Room | None:
    """The room of a source file: of its own name, else of its folder."""
    names = {room.name: room for room in rooms}
    return names.get(module) or names.get(module.rpartition("/")[0])


def count_tokens(source: str) -> int:
    """Tokens of Python code: no comments, no docstrings, no line breaks or indentation."""
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    docstrings.add((first.lineno, first.col_offset))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    layout |= {tokenize.ENCODING, tokenize.ENDMARKER}
    total = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        if depth == 0 and token.type not in layout and token.start not in docstrings:
            total += kind != "FSTRING_START"  # one token, as before Python 3.12: its end counts
        depth += kind == "FSTRING_START"
    return total


def sizes(root: Path, rooms: list[Room]) -> dict[str, int]:
    """Tokens of each room."""
    found = dict.fromkeys((room.name for room in rooms), 0)
    for module in source_modules(root):
        if (room := room_of(module, rooms)) is not None:
            found[room.name] += count_tokens((root / f"{module}.py").read_text(encoding="utf-8"))
    return found


def draw(rooms: list[Room]) -> str:
    """The table as a mermaid flowchart, and as Markdown, from the top.

    What a room reaches through another one that it imports anyway is left out.
    """
    uses = {room.name: set(room.uses.split()) for room in rooms}

    def reached(name: str) -> set[str]:
        return uses[name].union(*map(reached, uses[name])) if uses[name] else set()

    def node(name: str) -> str:
        return f'{name.replace("/", "_")}["{name}"]'

    rows, arrows = ["| room | what it is for | imports |", "|---|---|---|"], []
    for room in reversed(rooms):
        indirect = set().union(*map(reached, uses[room.name]))
        used = sorted(uses[room.name] - indirect)
        arrows += [f"    {node(room.name)} --> {node(name)}" for name in used]
        rows.append(f"| `{room.name}` | {room.about} | {', '.join(f'`{n}`' for n in used)} |")
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", "", *rows])


def picture_in(text: str) -> str:
    """What stands between the marks in a document."""
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


if __name__ == "__main__":
    for name, tokens in (found := sizes(ROOT, ROOMS)).items():
        print(f"{name:28} {tokens:7,}")
    print(f"{'all':28} {sum(found.values()):7,}")
    document = PICTURE.read_text(encoding="utf-8")
    PICTURE.write_text(document.replace(picture_in(document), draw(ROOMS)), encoding="utf-8")
