"""`CUDAMemoryTracker`: measures the memory of each part of a step, by rank and by category."""

import functools
import logging
import os
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import WarningCache
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from ..allocator.advice import RunFigures
from .figures import GIB, KEYS, SPREAD_KEYS
from .leaks import LeakDetector, LeakWatch
from .ledger import measure_module, measure_units
from .out_of_memory import OutOfMemory, attach_observer, find_unit, is_out_of_memory, parse_wanted
from .phases import Budget, Phase, PhaseMeter
from .ranks import RankGatherer, Spread, spread, to_metrics
from .recording import Recording, run_figures
from .report import write_png, write_report
from .source import MemorySource, choose_source

log = logging.getLogger(__name__)


class CUDAMemoryTracker(Callback):
    """Tracks memory by step, phase, category and rank; names leaks; explains out-of-memory errors.

    It works with any strategy. Without CUDA it tracks the process's resident memory instead and
    says so. It only observes: no number of the training changes, and nothing waits for the device.

    Every `every_n_steps` optimizer steps it logs to every logger, under the keys of
    `lightning_zero3.callbacks.memory.figures.KEYS`: peaks in total and by phase, allocated,
    reserved, inactive, one fragmentation figure, retries, pinned host memory, memory outside of
    torch, CUDA graph pools, and the ledger: parameters, gradients, optimizer state, unsharded
    units, the reduce buffer (of DDP: its buckets), buffers, static inputs of graphs and activations
    (the rest). Over several ranks a key has the highest
    rank's value, and the main ones also have `/min`, `/mean` and `/max_rank`; one packed all-gather
    carries them all.

    The peaks of the run and of the steps between two logging steps are exact, except with a
    pluggable allocator, where only the driver knows figures and a peak is the largest reading.
    Peaks by phase are exact in every step that the tracker reads closely, by one reading and reset
    for each phase; it does so as long as this takes less than `time_share` of the time. Without
    CUDA a close reading took 0.45 ms a step on a core of 2.6 GHz, so that by default the tracker
    reads every step above 0.2 s closely. The table has the number of these steps. Altogether the
    tracker took 0.3% to 0.5% of steps of 12 ms and more, on two busy cores.

    Args:
        every_n_steps: optimizer steps between logging; None takes the Trainer's
            `log_every_n_steps`.
        time_share: share of the time, above 0, for readings between logging steps; three quarters
            of it are for peaks by phase. None reads every step closely, whatever this costs.
        reset_peaks: reset the allocator's peaks, which are process-wide, after each reading. With
            False other readers keep their peaks, and peaks of quiet phases and steps are lower
            bounds.
        per_unit: also log `memory/unit/NAME_gib`, the model state of each part of the model.
        every_statistic: log `/min`, `/mean` and `/max_rank` of every key, not only of the main
            ones.
        progress_bar: show the peak of this rank in the progress bar.
        table: print a table when fitting ends.
        report: path of an HTML page to write when fitting ends; self-contained.
        report_png: also draw the page's charts to a PNG beside it (needs matplotlib).
        history_entries: how many allocations, with Python stacks, the CUDA allocator remembers for
            snapshots and the report; None is 100000 with `report` and none without. Costs time.
        oom_folder: where snapshots go after an out-of-memory error; None is `default_root_dir`/oom.
        leak_window: steps in a window, whose lowest level the tracker compares with those of
            earlier windows; 0 for no leak detection.
        leak_windows: consecutive windows with a risen floor that make a leak.
        leak_growth_mib: least growth over those windows, in MiB.

    Attributes:
        run_spreads: the figures of the whole run over all ranks, by key, after fitting has ended.
        leaks: the reports of leaks on this rank.
        oom_reports: the out-of-memory errors on this rank, also those that the program caught.
    """

    _run: Recording | None = None
    _trainer: Trainer | None = None
    _source_name = ""

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        time_share: float | None = 0.003,
        reset_peaks: bool = True,
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
        _check_arguments(locals())
        self.every_n_steps = every_n_steps
        self.time_share = inf if time_share is None else time_share
        self.reset_peaks = reset_peaks
        self.per_unit = per_unit
        self.every_statistic = every_statistic
        self.progress_bar = progress_bar
        self.table = table
        self.report = report
        self.report_png = report_png
        self.history_entries = (
            history_entries if history_entries is not None else 100_000 * (report is not None)
        )
        self.oom_folder = oom_folder
        self.leak_settings = (leak_window, leak_windows, int(leak_growth_mib * 2**20))
        self._said = WarningCache()  # a fit and a test after it tell the same once
        self.run_spreads: dict[str, Spread] = {}
        self.leaks: list[str] = []
        self.oom_reports: list[OutOfMemory] = []

    # ---- begin and end -----------------------------------------------------------------------

    def make_source(self, device: torch.device) -> MemorySource:
        """Return the source of figures; override it to supply others."""
        return choose_source(device)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._run is not None:  # for the validation inside of a fit
            return
        for path in (self.report, self.oom_folder):
            _require_writable(path)
        device = trainer.strategy.root_device
        source = self.make_source(device)
        if source.name != "cuda":
            reasons = {
                "process": "no CUDA, so figures are of this process's resident memory",
                "driver": "the allocator has no figures, so these are of the whole device",
            }
            self._said.info(f"CUDAMemoryTracker: {reasons.get(source.name)}")
        meter = PhaseMeter(source, self.reset_peaks, 0.75 * self.time_share)
        resident = meter.last.allocated - measure_module(pl_module, "cpu")
        window, windows, growth = self.leak_settings
        self._run = Recording(
            source=source,
            meter=meter,
            end_budget=Budget(0.25 * self.time_share),
            gatherer=RankGatherer(),
            leak=LeakWatch(LeakDetector(window, windows, growth)) if window else None,
            leaks=self.leaks,
            process=max(0, resident) if source.name == "process" else 0,
            step=trainer.global_step,
        )
        self._trainer, self._source_name = trainer, source.name
        self._record_checkpoints(trainer, self._run)
        if source.name == "cuda" and device.type == "cuda":
            self._watch_cuda(device, self._run)
        if self.progress_bar and trainer.progress_bar_callback is not None:
            _show_in_progress_bar(trainer.progress_bar_callback, self._run)

    def _watch_cuda(self, device: torch.device, run: Recording) -> None:
        if torch.cuda.memory.get_allocator_backend() != "native":
            return
        attach_observer(self._on_cuda_oom)
        if self.history_entries:
            # stacks="all" would resolve C++ frames as well, which takes minutes.
            torch.cuda.memory._record_memory_history(
                enabled="all",
                context="all",
                stacks="python",
                max_entries=self.history_entries,
                device=device,
            )
            run.undo.append(lambda: torch.cuda.memory._record_memory_history(enabled=None))

    @staticmethod
    def _record_checkpoints(trainer: Trainer, run: Recording) -> None:
        """Wrap `Trainer.save_checkpoint`: Lightning has no hook for the end of a save."""
        save = trainer.save_checkpoint

        @functools.wraps(save)
        def save_checkpoint(*args: Any, **kwargs: Any) -> None:
            before = run.meter.phase
            run.meter.enter("checkpoint")
            try:
                save(*args, **kwargs)
            finally:
                run.meter.enter(before)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
        run.undo.append(lambda: trainer.__dict__.pop("save_checkpoint", None))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._run is not None:
            self._run.close()
        self._run = self._trainer = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the run, which belongs to its process: a launcher may pickle the callback."""
        return {**self.__dict__, "_run": None, "_trainer": None}

    # ---- phases ------------------------------------------------------------------------------

    def _enter_phase(self, phase: Phase) -> None:
        if self._run is not None:
            self._run.meter.enter(phase)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._run is not None
        self._run.begin_batch()

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        self._enter_phase("backward")

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self._enter_phase("optimizer")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter_phase("validation")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter_phase("other")

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # ---- figures -----------------------------------------------------------------------------

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the figures; on logging steps also gather and log them.

        To gather is collective; the loggers write on rank 0 alone.
        """
        assert self._run is not None
        # Lightning does not declare its attribute
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not self._run.end_batch(trainer, pl_module, every):
            return
        in_full = list(KEYS) if self.every_statistic else SPREAD_KEYS
        metrics = to_metrics(self._run.gather_window(), self._run.gatherer.world_size, in_full)
        if self.per_unit:
            units = measure_units(trainer, pl_module, self._run.source.device_type)
            metrics.update({f"memory/unit/{name}_gib": size / GIB for name, size in units.items()})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the figures of the run, and write table and report; collective.

        hazard: either every rank gets here, or none.
        """
        run = self._run
        assert run is not None
        names, gathered = run.gather_run(trainer, pl_module)
        self.run_spreads = spread(names, gathered)
        if not trainer.is_global_zero:
            return
        if self.table:
            print(run.table(self.run_spreads))
        if self.report is not None:
            data, path = run.report(trainer, pl_module, names, gathered), Path(self.report)
            write_report(path, data)
            if self.report_png:
                write_png(path.with_suffix(".png"), data)
            rank_zero_info(f"CUDAMemoryTracker: wrote {path}")

    def run_figures(self) -> RunFigures:
        """Return the figures of the fullest rank, for `AllocatorConfig.suggest`.

        Raises:
            RuntimeError: fitting has not ended normally yet.
        """
        if not self.run_spreads:
            raise RuntimeError("run_figures: there are none before Trainer.fit has ended normally")
        return run_figures(self._source_name, self.run_spreads)

    # ---- out of memory -----------------------------------------------------------------------

    def _on_cuda_oom(self, device: int, wanted: int, limit: int, free: int) -> None:
        """Report an error before torch raises it, also one that the program catches."""
        if self._trainer is not None and len(self.oom_reports) < 3:
            self._report_oom(self._trainer, wanted, None)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not is_out_of_memory(exception) or self._run is None:
            return
        unit = find_unit(exception, pl_module)
        if not self.oom_reports or self.oom_reports[-1].step != trainer.global_step:
            report = self._report_oom(trainer, parse_wanted(exception), unit)
        else:
            report = self.oom_reports[-1]  # by the observer, whose figures are better
            report.unit = unit
        if report is None:
            return
        log.error("CUDAMemoryTracker: %s", report.describe())
        if hasattr(exception, "add_note"):
            exception.add_note(report.describe())

    def _report_oom(
        self, trainer: Trainer, wanted: int | None, unit: str | None
    ) -> OutOfMemory | None:
        """Make a report, or log why it failed.

        This never raises, so that the program gets the out-of-memory error and no error of ours.
        """
        assert self._run is not None
        try:
            report = self._run.explain_oom(
                trainer, wanted, unit, Path(self.oom_folder or f"{trainer.default_root_dir}/oom")
            )
        except Exception:  # logged with its traceback; the original error goes on
            log.exception("CUDAMemoryTracker: the report on an out-of-memory error failed")
            return None
        self.oom_reports.append(report)
        return report


def _check_arguments(arguments: dict[str, Any]) -> None:
    least = {
        "every_n_steps": 1,
        "history_entries": 0,
        "leak_window": 0,
        "leak_windows": 1,
        "leak_growth_mib": 0,
    }
    for name, bound in least.items():
        if arguments[name] is not None and arguments[name] < bound:
            raise ValueError(f"{name}: expected at least {bound}, got {arguments[name]}")
    share = arguments["time_share"]
    if share is not None and not 0 < share <= 1:
        raise ValueError(
            f"time_share: expected a share above 0 and at most 1, or None for no limit, got {share}"
        )
    if arguments["report_png"] and arguments["report"] is None:
        raise ValueError("report_png: draws the charts of the report; give report= a path too")
    if arguments["report_png"] and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "report_png needs matplotlib (the extra `report`): pip install matplotlib, or leave"
            " report_png out"
        )


def _require_writable(path: str | None) -> None:
    """Fail before training if nothing can be written at ``path``.

    Raises:
        PermissionError: the folder that is there, or the file, is not writable.
    """
    if path is None:
        return
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK) or (there.is_file() and there != Path(path).absolute()):
        raise PermissionError(f"CUDAMemoryTracker cannot write {path}: {there} is not writable.")


def _show_in_progress_bar(bar: Any, run: Recording) -> None:
    """Add the peak to the bar's own figures.

    `self.log(prog_bar=True)` would wait for the device in every batch.
    """
    get_metrics = bar.get_metrics

    @functools.wraps(get_metrics)
    def with_memory(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # A step without a reading has no peak of its own yet.
        peak = run.meter.step_peak or run.meter.last.peak_allocated
        return {**get_metrics(*args, **kwargs), "mem": f"{peak / GIB:.1f}G"}

    bar.get_metrics = with_memory
    run.undo.append(lambda: bar.__dict__.pop("get_metrics", None))
