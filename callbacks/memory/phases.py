"""Measure peaks by phase: which part of a step needed the most memory.

This is bookkeeping over a source of samples. A phase lasts until the next one begins. Then the
meter reads the source once, gives the peak since the last reading to the phase that ends, and
resets the peak.
"""

from dataclasses import dataclass, field
from math import inf
from time import perf_counter, thread_time
from typing import Literal

from .source import MemorySource, Sample

Phase = Literal["forward", "backward", "optimizer", "validation", "checkpoint", "other"]
PHASES: tuple[str, ...] = (
    "forward",
    "backward",
    "optimizer",
    "validation",
    "checkpoint",
    "other",
)
# Phases that the meter always reads, as they come too rarely to cost much.
RARE: tuple[Phase, ...] = ("validation", "checkpoint")


@dataclass
class Budget:
    """Limits repeated work to a share of the time, by pauses in proportion to its cost."""

    share: float  # of the time
    _due_s: float = 0.0

    def affords(self) -> bool:
        """Say whether the work may be done now."""
        return perf_counter() >= self._due_s

    def charge(self, cost_s: float) -> None:
        """Charge work that took `cost_s` seconds of this thread's CPU time.

        While a thread waits for a core, it costs nothing.
        """
        self._due_s = perf_counter() + cost_s / self.share


@dataclass
class PhaseMeter:
    """Attributes peaks to phases.

    To read between the phases of every step may cost more than short steps can bear. The meter
    reads a step closely, between its phases, as long as such readings take at most `share` of the
    time. Other steps have a total peak but no peaks by phase; the peak of a step without any
    reading is part of the peak of the next step with one.

    Without `reset` a peak is exact only if it rises above all peaks before it; else it is the
    larger of the first and the last sample, a lower bound.
    """

    source: MemorySource
    reset: bool = True  # reset the source's peaks after each reading
    share: float = inf  # of the time for close readings; infinite: read every step closely
    phase: Phase = "other"
    last: Sample = field(init=False)
    # bytes; empty in a step without close readings
    step_peaks: dict[str, int] = field(default_factory=dict)
    # bytes; cleared by `start_log_window`
    log_peaks: dict[str, int] = field(default_factory=dict)
    run_peaks: dict[str, int] = field(default_factory=dict)  # bytes
    step_peak: int = 0  # bytes; the largest of the step so far
    log_peak: int = 0
    run_peak: int = 0
    run_peak_reserved: int = 0
    steps: int = 0
    close_steps: int = 0  # steps with close readings
    is_close: bool = True  # whether this step has close readings
    _spent_s: float = 0.0  # CPU seconds of the readings between the phases of this step
    _has_read_end: bool = True  # whether the meter has read the end of the last step

    def __post_init__(self) -> None:
        self._budget = Budget(self.share)
        self.last = self.source.read()
        self._highest = self.last.peak_allocated  # largest peak in any sample
        if self.reset:
            self.source.reset_peaks()

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another."""
        if self.is_close or phase in RARE or self.phase in RARE:
            self._read()
        self.phase = phase

    def start_step(self) -> None:
        """Begin a step with its forward, and decide whether to read it closely."""
        if self.is_close and self.steps:
            self._budget.charge(self._spent_s)
        self._spent_s, is_close = 0.0, self._budget.affords()
        if is_close or self.is_close:
            # hazard: else the peak of steps without readings would go to this step's first phase
            self._read()
        self.phase, self.is_close = "forward", is_close
        self.steps += 1
        self.close_steps += is_close
        self.step_peaks.clear()
        if self._has_read_end:
            self.step_peak = 0
        self._has_read_end = False

    def finish_step(self, thorough: bool = True) -> Sample:
        """Read the end of a step, `thorough` as in :meth:`MemorySource.read`."""
        self._read(thorough)
        self.phase, self._has_read_end = "other", True
        return self.last

    def start_log_window(self) -> None:
        """Forget the peaks since the last logging step, also of validation and checkpoints."""
        self.log_peaks.clear()
        self.log_peak = 0

    def _read(self, thorough: bool = False) -> None:
        if self.source.is_busy():  # hazard: a reading would invalidate the capture of a graph
            return
        begin_s = thread_time()
        sample = self.source.read(thorough)
        is_exact = self.reset or sample.peak_allocated > self._highest
        lower_bound = max(self.last.allocated, sample.allocated)
        self._add_peak(sample.peak_allocated if is_exact else lower_bound)
        self.run_peak_reserved = max(self.run_peak_reserved, sample.peak_reserved, sample.reserved)
        self._highest = max(self._highest, sample.peak_allocated)
        self.last = sample
        if self.reset:
            self.source.reset_peaks()
        if not thorough:
            self._spent_s += thread_time() - begin_s

    def _add_peak(self, peak: int) -> None:
        self.step_peak = max(self.step_peak, peak)
        self.log_peak = max(self.log_peak, peak)
        self.run_peak = max(self.run_peak, peak)
        if self.is_close or self.phase in RARE:
            for peaks in (self.step_peaks, self.log_peaks, self.run_peaks):
                if peak > peaks.get(self.phase, -1):
                    peaks[self.phase] = peak
