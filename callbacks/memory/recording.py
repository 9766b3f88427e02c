"""Record one run on this rank: read the figures of each step, keep them, report them at the end."""

import logging
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from ..allocator.advice import RunFigures
from .allocations import find_allocations
from .figures import (
    CUDA_ALLOCATOR_KEYS,
    GIB,
    KEYS,
    REST,
    WORDS,
    History,
    StepRecord,
    activations,
    collect,
    render_table,
)
from .leaks import LeakWatch
from .ledger import CATEGORIES, measure
from .out_of_memory import OutOfMemory, add_snapshot
from .phases import Budget, PhaseMeter
from .ranks import RankGatherer, Spread, spread
from .report import ReportData
from .source import MemorySource

log = logging.getLogger(__name__)
# Figures of the whole run, in bytes, that `Recording.gather_run` gathers after those of KEYS.
RUN_KEYS = (
    "run/peak_reserved",
    "run/worst_waste",
    "run/reserved_at_worst",
    "run/capacity",
    "run/pinned",
)


@dataclass
class Recording:
    """The figures of one run, from `setup` to `teardown` of the tracker."""

    source: MemorySource
    meter: PhaseMeter
    end_budget: Budget  # for readings at the end of steps without logging
    gatherer: RankGatherer
    leak: LeakWatch | None
    process: int  # bytes that were resident before training; 0 with CUDA
    step: int  # number of the last step that has ended
    undo: list[Callable[[], None]] = field(default_factory=list)  # functions that `close` calls
    history: History = field(default_factory=History)
    leaks: list[str] = field(default_factory=list)
    is_in_step: bool = False  # between the first and the last batch of a step
    last_logged: int = field(init=False)
    ledger: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    # (unused, reserved) bytes at the step end with the most unused bytes
    _worst: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.last_logged = self.step

    def begin_batch(self) -> None:
        """Begin a forward, of a new step or of one that still accumulates gradients."""
        if self.is_in_step:
            self.meter.enter("forward")
        else:
            self.meter.start_step()
            self.is_in_step = True

    def end_batch(self, trainer: Trainer, module: LightningModule, every: int) -> bool:
        """Read the figures after a batch; return whether the tracker must log them."""
        if trainer.global_step == self.step:  # gradients are still accumulating
            self.meter.enter("other")
            return False
        self.step, self.is_in_step = trainer.global_step, False
        is_logged = bool(every) and self.step // every > self.last_logged // every
        is_thorough = self.end_budget.affords()
        if not (is_logged or is_thorough or self.meter.is_close):
            return False
        begin_s = thread_time()
        self.meter.finish_step(is_thorough)
        # The first record needs a ledger, too: the first logging step may come much later.
        if is_logged or not self.history.records:
            self.ledger = measure(trainer, module, self.source.device_type)
        self._add_record()
        if is_thorough:
            self.end_budget.charge(thread_time() - begin_s)
        self._watch_for_leaks(trainer, module)
        if is_logged:
            self.last_logged = self.step
        return is_logged

    def _add_record(self) -> None:
        meter, sample = self.meter, self.meter.last
        self._worst = max(self._worst, (sample.waste, sample.reserved))
        peaks = dict(meter.step_peaks)
        self.history.add(
            StepRecord(
                self.step,
                meter.step_peak,
                peaks,
                sample.allocated,
                sample.reserved,
                sample.waste,
                self.ledger,
            )
        )

    def _watch_for_leaks(self, trainer: Trainer, module: LightningModule) -> None:
        """Look for a leak, and warn of it; only the search for holders after a leak is slow."""
        live = self.meter.last.live
        if self.leak is not None and live is not None:
            found = self.leak.add(live, self.step, self.source.device_type, module)
            if found is not None:
                self.leaks.append(f"rank {trainer.global_rank}, step {self.step}: {found}")
                log.warning("CUDAMemoryTracker: %s", self.leaks[-1])

    def gather_window(self) -> dict[str, Spread]:
        """Gather the figures since the last logging step over all ranks; collective."""
        meter = self.meter
        figures = collect(
            meter.log_peak,
            meter.log_peaks,
            meter.last,
            self.source.read_surroundings(),
            self.ledger,
            self.process,
        )
        meter.start_log_window()
        return spread(list(KEYS), self.gatherer.gather(figures))

    def gather_run(self, trainer: Trainer, module: LightningModule) -> tuple[list[str], Tensor]:
        """Gather the figures of the whole run: (names, [world, names]); collective."""
        meter, around = self.meter, self.source.read_surroundings()
        self.ledger = measure(trainer, module, self.source.device_type)
        figures = collect(
            meter.run_peak, meter.run_peaks, meter.last, around, self.ledger, self.process
        )
        extra = (meter.run_peak_reserved, *self._worst, around.capacity, around.pinned_allocated)
        return [*KEYS, *RUN_KEYS], self.gatherer.gather([*figures, *map(float, extra)])

    @property
    def title(self) -> str:
        """The kind of memory, and the number of steps."""
        kinds = {"cuda": "CUDA memory", "driver": "Device memory (all processes)"}
        kind = kinds.get(self.source.name, "Resident memory of the process (no CUDA)")
        return f"{kind}, {self.meter.steps} steps"

    def table(self, figures: dict[str, Spread]) -> str:
        """Return the table for the terminal, without rows that this source never fills."""
        is_cuda = self.source.name == "cuda"
        empty = ("memory/process_gib",) if is_cuda else CUDA_ALLOCATOR_KEYS
        rows = {
            name: figure
            for name, figure in figures.items()
            if name in KEYS and name not in empty and (figure.high or is_cuda)
        }
        title = f"{self.title}; peaks by phase from {self.meter.close_steps} of them"
        table = render_table(title, rows, self.gatherer.world_size)
        return f"{table}\n{WORDS if is_cuda else REST}"

    def report(
        self, trainer: Trainer, module: LightningModule, names: list[str], gathered: Tensor
    ) -> ReportData:
        """Return the data of the HTML page."""
        sample, peak = self.meter.last, self.meter.run_peak
        return ReportData(
            title=self.title,
            source=self.source.name,
            records=self.history.records,
            composition={
                **self.ledger,
                "graph_pool": sample.graph_pool,
                "process": self.process,
                "activations": activations(peak, sample, self.ledger, self.process),
            },
            phase_peaks=dict(self.meter.run_peaks),
            close_steps=self.meter.close_steps,
            ranks=[dict(zip(names, row, strict=True)) for row in gathered.tolist()],
            allocations=find_allocations(self.source.name, self.source.device_type, module),
            remarks=[*self.leaks],
            run=describe_run(trainer, module),
        )

    def explain_oom(
        self, trainer: Trainer, wanted: int | None, unit: str | None, folder: Path
    ) -> OutOfMemory:
        """Return a report on an out-of-memory error; asks no other rank.

        Args:
            trainer: the running Trainer.
            wanted: bytes of the failed request, if known.
            unit: name of the submodule that was running, if known.
            folder: folder of snapshots.
        """
        sample = self.source.read()
        ledger = measure(trainer, trainer.lightning_module, self.source.device_type)
        report = OutOfMemory(
            rank=trainer.global_rank,
            step=trainer.global_step,
            phase=self.meter.phase,
            unit=unit,
            source=self.source.name,
            wanted=wanted,
            sample=sample,
            surroundings=self.source.read_surroundings(),
            largest_free=None,
            categories={
                **ledger,
                "activations": activations(sample.allocated, sample, ledger, self.process),
            },
        )
        if self.source.name == "cuda":
            add_snapshot(report, folder)
        return report

    def close(self) -> None:
        """Call the functions of `undo`, the last one first, and close the group and the files."""
        for undo in reversed(self.undo):
            undo()
        self.gatherer.close()
        self.source.close()


def describe_run(trainer: Trainer, module: LightningModule) -> str:
    """Return the run's model, strategy, host, date and versions, to find it again."""
    ranks = f"{trainer.world_size} rank{'s' * (trainer.world_size > 1)}"
    return (
        f"{type(module).__name__}, {type(trainer.strategy).__name__}, {ranks};"
        f" {Path(sys.argv[0]).name} on {platform.node()},"
        f" {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())};"
        f" torch {torch.__version__}, Lightning {lightning.__version__}"
    )


def run_figures(source: str, figures: dict[str, Spread]) -> RunFigures:
    """Return the figures of the fullest rank, for `AllocatorConfig.suggest`."""

    def read_highest(name: str, scale: int = 1) -> int:
        return int(figures[name].high * scale)

    return RunFigures(
        source=source,
        peak_allocated=read_highest("memory/peak_gib", GIB),
        peak_reserved=read_highest("run/peak_reserved"),
        capacity=read_highest("run/capacity"),
        worst_waste=read_highest("run/worst_waste"),
        reserved_at_worst=read_highest("run/reserved_at_worst"),
        retries=read_highest("memory/retries"),
        ooms=read_highest("memory/ooms"),
        pinned_allocated=read_highest("run/pinned"),
        pinned_reserved=read_highest("memory/pinned_gib", GIB),
    )
