"""Peaks by phase: which part of a step needed the most memory.

Pure bookkeeping over a source of samples. A phase lasts until the next one is entered; entering reads
the source once, gives the peak since the last reading to the phase that ends, and resets the peak.
"""

from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Literal

from .memory_source import MemorySource, Sample

Phase = Literal["forward", "backward", "optimizer", "validation", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "validation", "checkpoint", "other")
ResetPolicy = Literal["phase", "step", "never"]
RESETS = ("phase", "step", "never")


RARE: tuple[Phase, ...] = ("validation", "checkpoint")  # always read: they cost nothing per step


@dataclass
class PhaseMeter:
    """Attributes peaks to phases.

    Reading between the phases of every step could cost more than short steps can bear. A step is
    detailed when the reads of the last detailed one are at most `detail_share` of the time since then;
    the others are read at their end at most, and have a total peak but no peaks by phase. What a step
    that is not read at all needed shows in the peak of the next one that is.

    With `reset` other than "phase" a peak is known exactly only for the phase that raised it; for the
    others the larger of its first and last sample stands, a lower bound.
    """

    source: MemorySource
    reset: ResetPolicy = "phase"
    detail_share: float = inf  # of the time; infinite: every step is detailed
    phase: Phase = "other"
    detailed: bool = True
    last: Sample = field(init=False)
    step_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes; cleared by `start_step`
    log_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes; cleared by `start_log_window`
    run_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes
    step_peak: int = 0  # bytes; the largest of the step so far
    log_peak: int = 0
    run_peak: int = 0
    run_peak_reserved: int = 0
    skipped: int = 0  # changes of phase during a capture, where nothing may be read
    _spent_s: float = 0.0  # reading, in this step
    _begun_s: float = field(default_factory=perf_counter)
    _due_s: float = 0.0  # when the next step may be detailed
    _read_due_s: float = 0.0  # when the end of a step may be read
    _finished: bool = True  # whether the last step was read

    def __post_init__(self) -> None:
        self.last = self.source.read()
        if self.reset != "never":
            self.source.reset_peaks()
        self._forget_peak()

    def enter(self, phase: Phase) -> Sample:
        """End the current phase and begin another; returns the sample between them."""
        if self.detailed or phase in RARE or self.phase in RARE:
            return self._read(phase)
        self.phase = phase
        return self.last

    @property
    def is_due(self) -> bool:
        """Whether the end of this step can be afforded."""
        return self.detailed or perf_counter() >= self._read_due_s

    def finish_step(self) -> Sample:
        """Read the end of a step; `charge` what was then done with it."""
        self._finished = True
        return self._read("other", thorough=True)

    def charge(self, cost_s: float) -> None:
        """Put the next reading off until this one has become a small share of the time."""
        self._read_due_s = perf_counter() + cost_s / self.detail_share

    def start_step(self) -> None:
        """Forget the peaks of the step before, and decide how closely to look at this one."""
        now = perf_counter()
        if self.detailed:
            self._due_s = self._begun_s + self._spent_s / self.detail_share
        self.detailed = now >= self._due_s
        if self.detailed:
            self._begun_s, self._spent_s = now, 0.0
        self.step_peaks.clear()
        self.step_peak = 0
        if self.reset == "step" and self._finished and not self.source.is_busy():
            self.source.reset_peaks()
            self._forget_peak()
        self._finished = False

    def start_log_window(self) -> None:
        """Forget the peaks since the last logging step, validation and checkpoints between steps too."""
        self.log_peaks.clear()
        self.log_peak = 0

    def _read(self, phase: Phase, thorough: bool = False) -> Sample:
        if self.source.is_busy():
            self.skipped += 1
            self.phase = phase
            return self.last
        begun = perf_counter()
        sample = self.source.read(thorough)
        raised = self.reset == "phase" or sample.peak_allocated > self._known_peak
        self._add_peak(sample.peak_allocated if raised else max(self.last.allocated, sample.allocated))
        self.run_peak_reserved = max(self.run_peak_reserved, sample.peak_reserved, sample.reserved)
        self._known_peak = max(self._known_peak, sample.peak_allocated)
        self.last, self.phase = sample, phase
        if self.reset == "phase":
            self.source.reset_peaks()
        self._spent_s += perf_counter() - begun
        return sample

    def _add_peak(self, peak: int) -> None:
        self.step_peak = max(self.step_peak, peak)
        self.log_peak = max(self.log_peak, peak)
        self.run_peak = max(self.run_peak, peak)
        if self.detailed or self.phase in RARE:
            for peaks in (self.step_peaks, self.log_peaks, self.run_peaks):
                if peak > peaks.get(self.phase, -1):
                    peaks[self.phase] = peak

    def _forget_peak(self) -> None:
        self._known_peak = self.last.peak_allocated if self.reset == "never" else self.last.allocated
