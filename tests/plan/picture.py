"""The picture of README: what memory of a rank is for, measured in trainings.

python tests/plan/picture.py    # writes docs/memory.png; takes half a minute
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.parity import trainer
from helpers.ranks import run_ranks
from plan.grid import STEP, Measured, Model

FILE = Path(__file__).parents[2] / "docs" / "memory.png"
RUNS = (("ddp", 2), ("zero3", 2), ("zero3", 4))
CATEGORIES = ("parameters", "gradients", "optimizer_state", "unsharded_units", "reduce_buffer")


class ByCategory(Measured):
    """The ledger before an update, of any strategy."""

    def begin(self, runner: Any) -> None:
        from lightning_zero3.callbacks.memory.ledger import measure

        self._count = lambda: measure(runner, runner.lightning_module, "cpu")
        self._start(sum(self._count().values()))

    def on_before_optimizer_step(self, runner: Any, module: Any, optimizer: Any) -> None:
        if module.measures:
            self.ledger = self._count()


def fit(rank: int, world_size: int, strategy: str) -> dict[str, int]:
    """Bytes by category; what is left of the most in a step is of activations."""
    import lightning_zero3  # noqa: F401  registers the strategy

    measured = ByCategory()
    options = {"callbacks": [measured], "limit_train_batches": STEP + 1}
    trainer(strategy, world_size, **options).fit(Model("transformer", measured, "fused"))
    found = {name: measured.ledger[name] for name in CATEGORIES}
    return {**found, "activations": max(0, measured.most - sum(found.values()))}


def main() -> None:
    """Train, and draw."""
    from matplotlib import pyplot

    bars = {f"{name}\n{n} ranks": run_ranks(fit, n, name)[0] for name, n in RUNS}
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    left = dict.fromkeys(bars, 0.0)
    for name in (*CATEGORIES, "activations"):
        sizes = [its[name] / 2**20 for its in bars.values()]
        label = name.replace("_", " ")
        axes.barh([*bars], sizes, left=[*left.values()], label=label, height=0.6)
        left = {bar: at + size for (bar, at), size in zip(left.items(), sizes, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("MiB of one rank, at the most in a step")
    figure.legend(frameon=False, fontsize="small", ncols=3, loc="outside upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FILE, dpi=120)


if __name__ == "__main__":
    from plan import picture  # ranks import functions by name

    picture.main()
