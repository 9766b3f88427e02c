"""Peaks by phase: which part of a step needed the most memory.

Pure bookkeeping over a source of samples. A phase lasts until the next one is entered; entering
reads the source once, gives the peak since the last reading to the phase that ends, and resets the
peak.
"""

from dataclasses import dataclass, field
from math import inf
from time import perf_counter, thread_time
from typing import Literal

from .source import MemorySource, Sample

Phase = Literal["forward", "backward", "optimizer", "validation", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = (
    "forward",
    "backward",
    "optimizer",
    "validation",
    "checkpoint",
    "other",
)
RARE: tuple[Phase, ...] = ("validation", "checkpoint")  # always read: they cost nothing per step


@dataclass
class Budget:
    """Keeps what is done again and again below a share of the time, by pauses in proportion to its
    cost.
    """

    share: float
    _due_s: float = 0.0

    def affords(self) -> bool:
        """Whether it may be done now."""
        return perf_counter() >= self._due_s

    def charge(self, cost_s: float) -> None:
        """It was done, for `cost_s` of this thread's time; a thread that waits for a core costs
        nothing.
        """
        self._due_s = perf_counter() + cost_s / self.share


@dataclass
class PhaseMeter:
    """Attributes peaks to phases.

    Reading between the phases of every step may cost more than short steps can bear. A step is read
    closely, between its phases, while that takes at most `share` of the time; the others have a
    total peak but no peaks by phase, and what a step that is not read at all needed shows in the
    peak of the next one that is. `close` and `steps` count both kinds.

    Without `reset` a peak is known exactly only where it rises above all before it; elsewhere the
    larger of the first and last sample stands, a lower bound.
    """

    source: MemorySource
    reset: bool = True  # the source's peaks after each reading
    share: float = inf  # of the time; infinite: every step is read closely
    phase: Phase = "other"
    last: Sample = field(init=False)
    # bytes; empty in a step that is not read closely
    step_peaks: dict[Phase, int] = field(default_factory=dict)
    # bytes; cleared by `start_log_window`
    log_peaks: dict[Phase, int] = field(default_factory=dict)
    run_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes
    step_peak: int = 0  # bytes; the largest of the step so far
    log_peak: int = 0
    run_peak: int = 0
    run_peak_reserved: int = 0
    steps: int = 0
    close: int = 0  # of them read closely
    is_close: bool = True  # whether this step is
    _spent_s: float = 0.0  # reading between the phases of this step
    _ended: bool = True  # whether the end of the last step was read

    def __post_init__(self) -> None:
        self._budget = Budget(self.share)
        self.last = self.source.read()
        self._highest = self.last.peak_allocated  # that the source has shown
        if self.reset:
            self.source.reset_peaks()

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another."""
        if self.is_close or phase in RARE or self.phase in RARE:
            self._read()
        self.phase = phase

    def start_step(self) -> None:
        """Begin a step with its forward, and decide how closely to look at it."""
        if self.is_close and self.steps:
            self._budget.charge(self._spent_s)
        self._spent_s, is_close = 0.0, self._budget.affords()
        if is_close or self.is_close:
            # hazard: a peak of steps that were not read would go to the first phase of this one
            self._read()
        self.phase, self.is_close = "forward", is_close
        self.steps += 1
        self.close += is_close
        self.step_peaks.clear()
        if self._ended:
            self.step_peak = 0
        self._ended = False

    def finish_step(self, thorough: bool = True) -> Sample:
        """Read the end of a step, `thorough` as in :meth:`MemorySource.read`."""
        self._read(thorough)
        self.phase, self._ended = "other", True
        return self.last

    def start_log_window(self) -> None:
        """Forget the peaks since the last logging step, validation and checkpoints between steps
        too.
        """
        self.log_peaks.clear()
        self.log_peak = 0

    def _read(self, thorough: bool = False) -> None:
        if self.source.is_busy():  # capturing a CUDA graph
            return
        begun = thread_time()
        sample = self.source.read(thorough)
        raised = self.reset or sample.peak_allocated > self._highest
        self._add_peak(
            sample.peak_allocated if raised else max(self.last.allocated, sample.allocated)
        )
        self.run_peak_reserved = max(self.run_peak_reserved, sample.peak_reserved, sample.reserved)
        self._highest = max(self._highest, sample.peak_allocated)
        self.last = sample
        if self.reset:
            self.source.reset_peaks()
        if not thorough:
            self._spent_s += thread_time() - begun

    def _add_peak(self, peak: int) -> None:
        self.step_peak = max(self.step_peak, peak)
        self.log_peak = max(self.log_peak, peak)
        self.run_peak = max(self.run_peak, peak)
        if self.is_close or self.phase in RARE:
            for peaks in (self.step_peaks, self.log_peaks, self.run_peaks):
                if peak > peaks.get(self.phase, -1):
                    peaks[self.phase] = peak
