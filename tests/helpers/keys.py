"""The page of the keys that callbacks log.

python tests/helpers/keys.py    # writes docs/reference/keys.md
"""

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "keys.md"


def render() -> str:
    """The page, from the callbacks' own tables."""
    from lightning_zero3.callbacks import memory_figures, step_timer

    lines = ["# Logged keys", "", "Written by `tests/helpers/keys.py`."]
    for title, keys in (
        ("CUDAMemoryTracker", memory_figures.KEYS),
        ("StepTimer", step_timer.KEYS),
    ):
        lines += ["", f"## {title}", "", "| key | unit and meaning |", "|---|---|"]
        lines += [f"| `{key}` | {meaning} |" for key, meaning in keys.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
