"""`CUDAMemoryTracker`: how much memory each part of a step needs, on which rank, and for what."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from .allocator_advice import RunFigures
from .memory_figures import GIB, KEYS, SPREAD_KEYS, History, StepRecord, activations, collect, render_table
from .memory_leak import LeakDetector, LeakWatch
from .memory_ledger import CATEGORIES, measure, measure_module, measure_units
from .memory_oom import OutOfMemory, add_snapshot, attach_observer, find_unit, is_out_of_memory, parse_wanted
from .memory_phases import RESETS, Phase, PhaseMeter, ResetPolicy
from .memory_ranks import RankGatherer, Spread, spread, to_metrics
from .memory_report import ReportData, find_allocations, write_png, write_report
from .memory_source import MemorySource, choose_source

log = logging.getLogger(__name__)


class CUDAMemoryTracker(Callback):
    """Tracks memory by step, phase, category and rank; names leaks; explains out-of-memory errors.

    Works with any strategy. Without CUDA it tracks the process's resident memory instead and says so.
    It only observes: no number of the training changes, and nothing waits for the device.

    Logged every `every_n_steps` optimizer steps, to every logger, under the keys of
    `lightning_zero3.callbacks.memory_figures.KEYS`: peaks in total and by phase, allocated, reserved,
    inactive, one fragmentation figure, retries, pinned host memory, memory outside of torch, CUDA graph
    pools, and the ledger: parameters, gradients, optimizer state, slots, buffers and activations (the
    rest). Over several ranks a key is the highest rank's, and the main ones also have `/min`, `/mean`
    and `/max_rank`; one packed all-gather carries them all.

    Args:
        every_n_steps: optimizer steps between logging; None takes the Trainer's `log_every_n_steps`.
        reset: when the allocator's peaks are reset: "phase" gives exact peaks by phase; "step" and
            "never" leave the process-wide peaks to others and give lower bounds for quiet phases.
        detail_share: how much of the time may go into peaks by phase. Where steps are short, only some
            of them are read between their phases; all of them have a total peak.
        per_unit: also log `memory/unit/NAME_gib`, the model state of each part of the model.
        every_statistic: log `/min`, `/mean` and `/max_rank` of every key, not only of the main ones.
        progress_bar: show the peak of this rank in the progress bar.
        table: print a table when fitting ends.
        report: path of an HTML page to write when fitting ends; self-contained.
        report_png: also draw the page's charts to a PNG beside it (needs matplotlib).
        history_entries: how many allocations, with Python stacks, the CUDA allocator remembers for
            snapshots and the report; None is 100000 with `report` and none without. Costs time.
        oom_folder: where snapshots go after an out-of-memory error; None is `default_root_dir`/oom.
        leak_window: steps of whose memory the lowest level is compared with the windows before; 0 for
            no leak detection.
        leak_windows: consecutive windows with a risen floor that make a leak.
        leak_growth_mib: least growth over those windows, in MiB.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        reset: ResetPolicy = "phase",
        detail_share: float = 0.001,
        per_unit: bool = False,
        every_statistic: bool = False,
        progress_bar: bool = True,
        table: bool = True,
        report: str | None = None,
        report_png: bool = False,
        history_entries: int | None = None,
        oom_folder: str | None = None,
        leak_window: int = 10,
        leak_windows: int = 3,
        leak_growth_mib: float = 8.0,
    ) -> None:
        if reset not in RESETS:
            raise ValueError(f"reset: expected one of {', '.join(RESETS)}, got {reset!r}")
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("history_entries", history_entries, 0),
            ("leak_window", leak_window, 0),
            ("leak_windows", leak_windows, 1),
            ("leak_growth_mib", leak_growth_mib, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if detail_share <= 0:
            raise ValueError(f"detail_share: expected more than 0, got {detail_share}")
        if report_png and report is None:
            raise ValueError("report_png: draws the charts of the report; give report= a path too")
        self.every_n_steps = every_n_steps
        self.reset: ResetPolicy = reset
        self.detail_share = detail_share
        self.per_unit = per_unit
        self.every_statistic = every_statistic
        self.progress_bar = progress_bar
        self.table = table
        self.report = report
        self.report_png = report_png
        self.history_entries = history_entries if history_entries is not None else 100_000 * (report is not None)
        self.oom_folder = oom_folder
        self._leak_settings = (leak_window, leak_windows, int(leak_growth_mib * 2**20))
        self.run_spreads: dict[str, Spread] = {}  # figures of the whole run, once it has ended
        self.leaks: list[str] = []  # what was reported
        self.oom_reports: list[OutOfMemory] = []
        self._source_name = ""
        self._clear()

    def _clear(self) -> None:
        """Everything that belongs to one run."""
        self.source: MemorySource | None = None
        self.meter: PhaseMeter | None = None
        self.gatherer: RankGatherer | None = None
        self.history = History()
        self._leak: LeakWatch | None = None
        self._ledger: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._last_step = self._last_logged = 0
        self._step_done = True
        self._process = 0  # bytes that were resident before training, without CUDA
        self._worst = (0, 0)  # (unused, reserved) bytes at the step end with the most unused
        self._undo: list[Callable[[], None]] = []
        self._trainer: Trainer | None = None

    # ---- begin and end -----------------------------------------------------------------------

    def make_source(self, device: torch.device) -> MemorySource:
        """Where figures come from; override to feed others."""
        return choose_source(device, self.detail_share)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.meter is not None:  # the validation inside of a fit
            return
        device = trainer.strategy.root_device
        self.source = self.make_source(device)
        self._source_name = self.source.name
        if self.source.name != "cuda":
            figures = {"process": "this process's resident memory", "driver": "what the whole device has used"}
            rank_zero_info(f"CUDAMemoryTracker: no CUDA allocator to ask, tracking {figures.get(self.source.name)}")
        self.meter = PhaseMeter(self.source, self.reset, self.detail_share)
        if self.source.name == "process":
            self._process = max(0, self.meter.last.allocated - measure_module(pl_module, "cpu"))
        self.gatherer = RankGatherer()
        window, windows, growth = self._leak_settings
        self._leak = LeakWatch(LeakDetector(window, windows, growth)) if window else None
        self._trainer = trainer
        self._last_step = self._last_logged = trainer.global_step
        self._record_checkpoints(trainer)
        self._watch_cuda(device)
        if self.progress_bar and trainer.progress_bar_callback is not None:
            self._show_in_progress_bar(trainer.progress_bar_callback)

    def _record_checkpoints(self, trainer: Trainer) -> None:
        """Lightning has a hook for the beginning of a save and none for its end."""
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            assert self.meter is not None
            before = self.meter.phase
            self.meter.enter("checkpoint")
            try:
                save(*args, **kwargs)
            finally:
                self.meter.enter(before)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
        self._undo.append(lambda: trainer.__dict__.pop("save_checkpoint", None))

    def _watch_cuda(self, device: torch.device) -> None:
        if self.source is None or self.source.name != "cuda" or device.type != "cuda":
            return
        if torch.cuda.memory.get_allocator_backend() == "native":
            attach_observer(self._on_cuda_oom)
            if self.history_entries:
                # stacks="all" would resolve C++ frames as well, for minutes.
                torch.cuda.memory._record_memory_history(
                    enabled="all", context="all", stacks="python", max_entries=self.history_entries, device=device
                )
                self._undo.append(lambda: torch.cuda.memory._record_memory_history(enabled=None))

    def _show_in_progress_bar(self, bar: Any) -> None:
        """Through the bar's own figures: `self.log(prog_bar=True)` would wait for the device every batch."""
        get_metrics = bar.get_metrics

        @functools.wraps(get_metrics)
        def with_memory(*args: Any, **kwargs: Any) -> dict[str, Any]:
            # A step that has not been read yet has no peak of its own.
            peak = (self.meter.step_peak or self.meter.last.peak_allocated) if self.meter is not None else 0
            return {**get_metrics(*args, **kwargs), "mem": f"{peak / GIB:.1f}G"}

        bar.get_metrics = with_memory
        self._undo.append(lambda: bar.__dict__.pop("get_metrics", None))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for undo in reversed(self._undo):
            undo()
        if self.gatherer is not None:
            self.gatherer.close()
        if (close := getattr(self.source, "close", None)) is not None:
            close()
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """A launcher may pickle the callback; what belongs to a run stays in its process."""
        copy = CUDAMemoryTracker.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._clear()
        return copy.__dict__

    # ---- phases ------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if self.meter is not None:
            self.meter.enter(phase)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.meter is not None
        self.meter.enter("forward")
        if self._step_done:
            self._step_done = False
            self.meter.start_step()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._enter("backward")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._enter("optimizer")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("other")

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.meter is not None and self.source is not None
        if trainer.global_step == self._last_step:  # gradients are still accumulating
            self.meter.enter("other")
            return
        self._last_step, self._step_done = trainer.global_step, True
        every = self.every_n_steps or trainer.log_every_n_steps
        logs = bool(every) and trainer.global_step // every > self._last_logged // every
        if not (logs or self.meter.is_due):
            return
        begun = perf_counter()
        sample = self.meter.finish_step()
        if sample.waste > self._worst[0]:
            self._worst = (sample.waste, sample.reserved)
        if logs:
            self._last_logged = trainer.global_step
            self._log(trainer, pl_module)
        elif not self.history.records:  # before the first logging step the report would know nothing
            self._ledger = measure(trainer, pl_module, self.source.device_type)
        self.history.add(
            StepRecord(
                trainer.global_step,
                self.meter.step_peak,
                dict(self.meter.step_peaks) if self.meter.detailed else {},
                sample.allocated,
                sample.reserved,
                sample.waste,
                self._ledger,
            )
        )
        if self._leak is not None and sample.live is not None:
            message = self._leak.add(sample.live, trainer.global_step, self.source.device_type, pl_module)
            if message is not None:
                self._report_leak(message, trainer)
        if not logs:
            self.meter.charge(perf_counter() - begun)

    # ---- figures -----------------------------------------------------------------------------

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One collective, then the loggers; they write on rank 0 only."""
        assert self.meter is not None and self.source is not None and self.gatherer is not None
        self._ledger = measure(trainer, pl_module, self.source.device_type)
        around = self.source.read_surroundings()
        figures = collect(self.meter.log_peak, self.meter.log_peaks, self.meter.last, around, self._ledger, self._process)
        self.meter.start_log_window()
        spreads = spread(list(KEYS), self.gatherer.gather(figures))
        in_full = list(KEYS) if self.every_statistic else SPREAD_KEYS
        metrics = to_metrics(spreads, self.gatherer.world_size, in_full)
        if self.per_unit:
            units = measure_units(trainer, pl_module, self.source.device_type)
            metrics.update({f"memory/unit/{name}_gib": size / GIB for name, size in units.items()})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run's own peaks, gathered once more; every rank gets here or none."""
        assert self.meter is not None and self.source is not None and self.gatherer is not None
        self._ledger = measure(trainer, pl_module, self.source.device_type)
        around = self.source.read_surroundings()
        figures = collect(self.meter.run_peak, self.meter.run_peaks, self.meter.last, around, self._ledger, self._process)
        waste, reserved = self._worst
        names = [*KEYS, "run/peak_reserved", "run/worst_waste", "run/reserved_at_worst", "run/capacity", "run/pinned"]
        extra = [self.meter.run_peak_reserved, waste, reserved, around.capacity, around.pinned_allocated]
        gathered = self.gatherer.gather([*figures, *map(float, extra)])
        self.run_spreads = spread(names, gathered)
        if not trainer.is_global_zero:
            return
        if self.table:
            shown = {name: figure for name, figure in self.run_spreads.items() if name.startswith("memory/")}
            print(render_table(self._title(), shown, self.gatherer.world_size))
        if self.report is not None:
            self._write_report(pl_module, names, gathered)

    def _title(self) -> str:
        assert self.source is not None
        kind = {"cuda": "CUDA memory", "driver": "device memory (all processes)"}.get(self.source.name)
        return f"{kind or 'Resident memory of the process (no CUDA)'} over {len(self.history.records)} records"

    def _write_report(self, pl_module: LightningModule, names: list[str], gathered: torch.Tensor) -> None:
        assert self.source is not None and self.meter is not None and self.report is not None
        sample, peak = self.meter.last, self.meter.run_peak
        data = ReportData(
            title=self._title(),
            source=self.source.name,
            records=self.history.records,
            composition={
                **self._ledger,
                "graph_pool": sample.graph_pool,
                "process": self._process,
                "activations": activations(peak, sample, self._ledger, self._process),
            },
            phase_peaks=dict(self.meter.run_peaks),
            ranks=[dict(zip(names, row, strict=True)) for row in gathered.tolist()],
            allocations=find_allocations(self.source.name, self.source.device_type, pl_module),
            remarks=[*self.leaks],
        )
        path = Path(self.report)
        write_report(path, data)
        if self.report_png:
            write_png(path.with_suffix(".png"), data)
        rank_zero_info(f"CUDAMemoryTracker: wrote {path}")

    def run_figures(self) -> RunFigures:
        """Of the fullest rank, for `AllocatorConfig.suggest`, once fitting has ended."""
        if not self.run_spreads:
            raise RuntimeError("run_figures: there are none before Trainer.fit has ended normally")

        def high(name: str, scale: int = 1) -> int:
            return int(self.run_spreads[name].high * scale)

        return RunFigures(
            source=self._source_name,
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

    # ---- leaks and out of memory -------------------------------------------------------------

    def _report_leak(self, message: str, trainer: Trainer) -> None:
        message = f"rank {trainer.global_rank}, step {trainer.global_step}: {message}"
        self.leaks.append(message)
        log.warning("CUDAMemoryTracker: %s", message)

    def _on_cuda_oom(self, device: int, wanted: int, limit: int, free: int) -> None:
        """torch calls this before it raises, also when the program catches the error."""
        if self._trainer is not None and len(self.oom_reports) < 3:
            self._report_oom(self._trainer, wanted, None)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception) or self.meter is None:
            return
        unit = find_unit(exception, pl_module)
        if self.oom_reports and self.oom_reports[-1].step == trainer.global_step:
            report = self.oom_reports[-1]  # the observer was here before, with better figures
            report.unit = unit
        else:
            report = self._report_oom(trainer, parse_wanted(exception), unit)
        if report is None:
            return
        log.error("CUDAMemoryTracker: %s", report.describe())
        if hasattr(exception, "add_note"):
            exception.add_note(report.describe())

    def _report_oom(self, trainer: Trainer, wanted: int | None, unit: str | None) -> OutOfMemory | None:
        """Never raises: the out-of-memory error must reach the program, not an error of ours."""
        try:
            report = self._collect_oom(trainer, wanted, unit)
        except Exception:  # reported in full, and the original error goes on
            log.exception("CUDAMemoryTracker: the report on an out-of-memory error failed")
            return None
        self.oom_reports.append(report)
        return report

    def _collect_oom(self, trainer: Trainer, wanted: int | None, unit: str | None) -> OutOfMemory:
        assert self.meter is not None and self.source is not None
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
            categories={**ledger, "activations": activations(sample.allocated, sample, ledger, self._process)},
        )
        if self.source.name == "cuda":
            add_snapshot(report, Path(self.oom_folder or Path(trainer.default_root_dir) / "oom"))
        return report
