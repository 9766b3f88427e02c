"""Plans and measurements of the same trainings: three models, numbers of ranks, precisions, offload.

python tests/plan/grid.py    # writes docs/PLAN.md
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.parity import trainer
from helpers.ranks import run_ranks

VOCAB, WIDTH, HEADS, LENGTH, BATCH = 512, 192, 4, 64, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(pl.LightningModule):
    """Trains a net on random data of its kind."""

    def __init__(self, kind: str, measured: Measured, optimizer: str) -> None:
        super().__init__()
        self.kind, self.measured, self.optimizer = kind, measured, optimizer
        torch.manual_seed(0)
        if kind == "transformer":
            self.net = nn.Sequential(
                nn.Embedding(VOCAB, WIDTH),
                nn.Sequential(*(Attention() for _ in range(4))),
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, VOCAB),
            )
        elif kind == "convolutions":
            blocks = [
                nn.Sequential(nn.Conv2d(96, 96, 3, padding=1), nn.BatchNorm2d(96), nn.ReLU())
                for _ in range(6)
            ]
            head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
            self.net = nn.Sequential(nn.Conv2d(3, 96, 3), nn.Sequential(*blocks), head)
        else:  # wide, and few activations
            blocks = [nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(4)]
            self.net = nn.Sequential(nn.Sequential(*blocks), nn.Linear(768, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.measures = batch_idx == STEP
        if self.measures:
            self.measured.begin(self.trainer)
        x, y = batch
        loss = F.cross_entropy(self.net(x).flatten(0, -2).float(), y.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "muon":  # steps on whole parameters
            return torch.optim.Muon([p for p in self.parameters() if p.dim() == 2])
        return torch.optim.AdamW(self.parameters(), fused=self.optimizer == "fused")

    def train_dataloader(self) -> DataLoader:
        samples = 16 * BATCH
        if self.kind == "transformer":
            tokens = torch.randint(VOCAB, (samples, LENGTH + 1))
            data: Any = list(zip(tokens[:, :-1], tokens[:, 1:], strict=True))
        else:
            shape = (3, 18, 18) if self.kind == "convolutions" else (768,)
            data = list(zip(torch.randn(samples, *shape), torch.arange(samples) % 10, strict=True))
        return DataLoader(data, batch_size=BATCH)


@dataclass(frozen=True)
class Case:
    """A training; all but its model are options of the Trainer and the strategy."""

    model: str
    precision: str = "32-true"
    offload: str | None = None
    optimizer: str = "fused"
    accumulate: int = 1


GRID = [
    Case(*each)
    for each in itertools.product(
        ("transformer", "convolutions", "wide"),
        ("32-true", "bf16-mixed", "bf16-true"),
        (None, "optimizer", "parameters"),
    )
]
STATE = (
    "parameters",
    "gradients",
    "optimizer state",
    "unsharded units",
    "reduce buffer",
    "buffers",
)
STEP = 3  # that is measured: the first ones allocate what stays


class Measured(pl.Callback):
    """Bytes of state before the update of a step, and the most that a step has at once."""

    def begin(self, runner: pl.Trainer) -> None:
        """In `training_step`: gradients that are not needed have been freed."""
        self._start(sum(runner.strategy.memory_ledger().values()))

    def _start(self, before: int) -> None:
        self._before = before
        # it does not see that memory of before is freed
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()

    def on_before_optimizer_step(self, runner: pl.Trainer, module: Any, optimizer: Any) -> None:
        if module.measures:
            self.state = sum(runner.strategy.memory_ledger().values())

    def on_train_batch_end(
        self, runner: pl.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == STEP:
            self._profile.__exit__(None, None, None)
            events = self._profile.kineto_results.events()
            changes = [event for event in events if event.name() == "[memory]"]
            now = most = 0
            for event in sorted(changes, key=lambda event: event.start_ns()):
                now += event.nbytes()
                most = max(most, now)
            self.most = self._before + most


def fit(case: Case, devices: int) -> Measured:
    """Train a case, or plan it where the environment says so."""
    from lightning_zero3 import Zero3Strategy

    measured = Measured()
    runner = trainer(
        Zero3Strategy(offload=case.offload),
        devices,
        precision=case.precision,
        callbacks=[measured],
        accumulate_grad_batches=case.accumulate,
        use_distributed_sampler=True,
        limit_train_batches=STEP + 1,
    )
    runner.fit(Model(case.model, measured, case.optimizer))
    return measured


def plan(case: Case, devices: int) -> dict[str, Any]:
    """The plan, in bytes."""
    from lightning_zero3.strategies.plan import PLAN

    asked = {"devices": devices, "nodes": 1, "device_memory": None, "host_memory": None}
    os.environ[PLAN] = json.dumps({**asked, "json": True})
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            fit(case, devices)
    finally:
        del os.environ[PLAN]
    return Counter(json.loads(text.getvalue().splitlines()[-1]))


def measure(rank: int, devices: int, cases: list[Case]) -> list[tuple[int, int]]:
    """State and the most in a step, of each case."""
    found = [fit(case, devices) for case in cases]
    return [(each.state, each.most) for each in found]


@dataclass
class Row:
    """Bytes of a rank."""

    state: int
    state_measured: int
    most: int
    most_measured: int


def compare(devices: int, cases: list[Case]) -> list[Row]:
    """Plan and measure each case."""
    rows = []
    measured = run_ranks(measure, devices, cases, timeout=500)[0]
    for case, (state, most) in zip(cases, measured, strict=True):
        its = plan(case, devices)
        on_device = sum(its[name] for name in STATE)
        # on the CPU the device is the host
        rows.append(Row(on_device + its["host"], state, its["most in a step"] + its["host"], most))
    return rows


def table(devices: int, rows: list[Row]) -> list[str]:
    """Lines of the table: sizes in MiB."""
    lines = []
    for case, row in zip(GRID, rows, strict=True):
        sizes = [f"{size / 2**20:.2f}" for size in vars(row).values()]
        ratios = row.state / row.state_measured, row.most / row.most_measured
        cells = [devices, case.model, case.precision, case.offload or "", *sizes[:2], *sizes[2:]]
        cells = [*cells[:6], f"{ratios[0]:.3f}", *cells[6:], f"{ratios[1]:.3f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


HEAD = """# Plans against measurements

What `python -m lightning_zero3 plan` says of a rank, and what ranks then had: MiB of state (parameters, gradients, optimizer
state, unsharded units, the reduce buffer, buffers), and the most in a step, with activations. Fused AdamW, gloo ranks on one
machine. On the CPU the device is the host, so that offload is counted with the rest. State is what the strategy's ledger has
before an update, the most adds what torch's allocator gave out in the step. Written by `python tests/plan/grid.py`;
`tests/plan` holds state to 3% and the most to 10%. Convolutions have workspaces of their kernels that no plan knows.

| ranks | model | precision | offload | state: plan | measured | ratio | most: plan | measured | ratio |
|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Write the table."""
    lines = [line for devices in (1, 2, 4) for line in table(devices, compare(devices, GRID))]
    (Path(__file__).parents[2] / "docs" / "PLAN.md").write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    from plan import grid  # ranks import functions by name

    grid.main()
