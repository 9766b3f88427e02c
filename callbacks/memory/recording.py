"""One run as the tracker sees it on this rank: what is read at each step, kept, and said at the
end.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from ..allocator.advice import RunFigures
from .allocations import find_allocations
from .figures import (
    GIB,
    KEYS,
    OF_THE_CUDA_ALLOCATOR,
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
# Figures of the whole run that travel behind KEYS, in bytes.
RUN_KEYS = (
    "run/peak_reserved",
    "run/worst_waste",
    "run/reserved_at_worst",
    "run/capacity",
    "run/pinned",
)


@dataclass
class Recording:
    """From setup to teardown."""

    source: MemorySource
    meter: PhaseMeter
    ends: Budget  # for reading the end of a step where nothing is logged
    gatherer: RankGatherer
    leak: LeakWatch | None
    process: int  # bytes that were resident before training; 0 with CUDA
    step: int  # the last one that ended
    undo: list[Callable[[], None]] = field(default_factory=list)
    history: History = field(default_factory=History)
    leaks: list[str] = field(default_factory=list)
    in_step: bool = False  # between its first and its last batch
    last_logged: int = field(init=False)
    ledger: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    # (unused, reserved) bytes at the step end with the most unused
    _worst: tuple[int, int] = (
        0,
        0,
    )

    def __post_init__(self) -> None:
        self.last_logged = self.step

    def begin_batch(self) -> None:
        """Forward begins; of a new step, or of one that still accumulates gradients."""
        if self.in_step:
            self.meter.enter("forward")
        else:
            self.meter.start_step()
            self.in_step = True

    def end_batch(self, trainer: Trainer, module: LightningModule, every: int) -> bool:
        """After a batch; True where its figures are to be logged."""
        if trainer.global_step == self.step:  # gradients are still accumulating
            self.meter.enter("other")
            return False
        self.step, self.in_step = trainer.global_step, False
        logs = bool(every) and self.step // every > self.last_logged // every
        affords = self.ends.affords()
        if not (logs or affords or self.meter.is_close):
            return False
        begun = thread_time()
        self.meter.finish_step(thorough=affords)
        # before the first logging step the report would know nothing
        if logs or not self.history.records:
            self.ledger = measure(trainer, module, self.source.device_type)
        self._keep()
        if affords:
            self.ends.charge(thread_time() - begun)
        self._watch_for_leaks(trainer, module)
        if logs:
            self.last_logged = self.step
        return logs

    def _keep(self) -> None:
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
        """Cheap, but for the search after a leak has shown."""
        live = self.meter.last.live
        if self.leak is not None and live is not None:
            found = self.leak.add(live, self.step, self.source.device_type, module)
            if found is not None:
                self.leaks.append(f"rank {trainer.global_rank}, step {self.step}: {found}")
                log.warning("CUDAMemoryTracker: %s", self.leaks[-1])

    def gather_window(self) -> dict[str, Spread]:
        """The figures since the last logging step, over all ranks; collective."""
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
        """(names, [world, names]): the figures of the whole run; collective."""
        meter, around = self.meter, self.source.read_surroundings()
        self.ledger = measure(trainer, module, self.source.device_type)
        figures = collect(
            meter.run_peak, meter.run_peaks, meter.last, around, self.ledger, self.process
        )
        extra = (meter.run_peak_reserved, *self._worst, around.capacity, around.pinned_allocated)
        return [*KEYS, *RUN_KEYS], self.gatherer.gather([*figures, *map(float, extra)])

    @property
    def title(self) -> str:
        """What the figures are, and of how many steps."""
        kinds = {"cuda": "CUDA memory", "driver": "Device memory (all processes)"}
        kind = kinds.get(self.source.name, "Resident memory of the process (no CUDA)")
        return f"{kind}, {self.meter.steps} steps"

    def table(self, figures: dict[str, Spread]) -> str:
        """For the terminal; without the rows that such a source never fills."""
        never = ("memory/process_gib",) if self.source.name == "cuda" else OF_THE_CUDA_ALLOCATOR
        shown = {
            name: figure for name, figure in figures.items() if name in KEYS and name not in never
        }
        title = f"{self.title}; peaks by phase from {self.meter.close} of them"
        return render_table(title, shown, self.gatherer.world_size)

    def report(self, module: LightningModule, names: list[str], gathered: Tensor) -> ReportData:
        """For the page."""
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
            close_steps=self.meter.close,
            ranks=[dict(zip(names, row, strict=True)) for row in gathered.tolist()],
            allocations=find_allocations(self.source.name, self.source.device_type, module),
            remarks=[*self.leaks],
        )

    def explain_oom(
        self, trainer: Trainer, wanted: int | None, unit: str | None, folder: Path
    ) -> OutOfMemory:
        """The figures of this moment; asks no other rank."""
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
        """Put back what was wrapped, and give back files and groups."""
        for undo in reversed(self.undo):
            undo()
        self.gatherer.close()
        self.source.close()


def run_figures(source: str, figures: dict[str, Spread]) -> RunFigures:
    """Of the fullest rank, for `AllocatorConfig.suggest`."""

    def high(name: str, scale: int = 1) -> int:
        return int(figures[name].high * scale)

    return RunFigures(
        source=source,
        peak_allocated=high("memory/peak_gib", GIB),
        peak_reserved=high("run/peak_reserved"),
        capacity=high("run/capacity"),
        worst_waste=high("run/worst_waste"),
        reserved_at_worst=high("run/reserved_at_worst"),
        retries=high("memory/retries"),
        ooms=high("memory/ooms"),
        pinned_allocated=high("run/pinned"),
        pinned_reserved=high("memory/pinned_gib", GIB),
    )
