"""A picture of one training step: when each unit is unsharded, waited for and reduced.

    python examples/profile_step.py              # 2 processes on the CPU; writes profile.png

`torch.profiler` sees the phases of the engine by names such as "zero3::unshard blocks.0". The same
names are in `trace.json`, which https://ui.perfetto.dev shows beside every operator.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3

WIDTH, BLOCKS = 512, 4
COLORS = {
    "unshard": "#3b6fb6",
    "wait": "#d9822b",
    "reduce": "#2a9d67",
    "wait for sums": "#c2577f",
    "agreement": "#8b949e",
    "wait for batch": "#e0b13b",
    "optimizer begins": "#57606a",
    "optimizer ends": "#57606a",
}


class Block(torch.nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, WIDTH] to the same
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Regression(LightningModule):
    """Learns a random projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, target = batch
        return (self.blocks(x) - target).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ProfiledStep(Callback):
    """Profiles one step, from its batch to the next one."""

    def __init__(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.step, self.profile = step, profile(activities=activities)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == self.step:
            self.profile.start()
        elif trainer.global_step == self.step + 1:
            self.profile.stop()


def find_spans(profiled: profile) -> dict[str, list[tuple[str, float, float]]]:
    """{unit or phase: [(phase, start, duration)]} in milliseconds."""
    events = [event for event in profiled.events() if event.name.startswith("zero3::")]
    begin = min(event.time_range.start for event in events)
    spans = defaultdict(list)
    for event in events:
        name = event.name.removeprefix("zero3::")
        phase = max((known for known in COLORS if name.startswith(known)), key=len)
        row = name.removeprefix(phase).strip() or phase
        start = (event.time_range.start - begin) / 1000
        spans[row].append((phase, start, event.time_range.elapsed_us() / 1000))
    return dict(spans)


def draw(spans: dict[str, list[tuple[str, float, float]]], file: Path) -> None:
    """One line for each unit, one bar for each phase."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.45 * len(spans)), layout="constrained")
    for row, name in enumerate(sorted(spans, reverse=True)):
        for phase, start, duration in spans[name]:
            axes.barh(row, duration, left=start, height=0.7, color=COLORS[phase], label=phase)
    axes.set_yticks(range(len(spans)), sorted(spans, reverse=True))
    axes.set_xlabel("milliseconds")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(
        unique.values(), unique.keys(), ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main(folder: Path = Path(), devices: int = 2) -> dict[str, list[tuple[str, float, float]]]:
    """Train four steps, profile the last one, write `profile.png` and `trace.json`."""
    seed_everything(7, verbose=False)
    profiled = ProfiledStep(step=3)
    trainer = Trainer(
        accelerator="auto",
        devices=devices,
        strategy=lightning_zero3.Zero3Strategy(unit_policy=["Block"]),
        max_steps=4,
        callbacks=[profiled],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x = torch.randn(8 * devices * 64, WIDTH)
    trainer.fit(Regression(), DataLoader(TensorDataset(x, x.flip(1)), batch_size=64))
    spans = find_spans(profiled.profile)
    if lightning_zero3.current_world().rank == 0:
        draw(spans, folder / "profile.png")
        profiled.profile.export_chrome_trace(str(folder / "trace.json"))
        for name, phases in spans.items():
            total = ", ".join(f"{phase} {duration:.2f} ms" for phase, _, duration in phases)
            print(f"{name:18} {total}")
        print(f"The picture is {folder / 'profile.png'}.")
    return spans


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    main(devices=parser.parse_args().devices)
