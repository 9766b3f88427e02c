"""Peaks by phase: which part of a step needed the most memory.

Pure bookkeeping over a source of samples. A phase lasts until the next one is entered; entering reads
the source once, gives the peak since the last reading to the phase that ends, and resets the peak.
"""

from dataclasses import dataclass, field
from typing import Literal

from .memory_source import MemorySource, Sample

Phase = Literal["forward", "backward", "optimizer", "validation", "checkpoint", "other"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "validation", "checkpoint", "other")
ResetPolicy = Literal["phase", "step", "never"]
RESETS = ("phase", "step", "never")


@dataclass
class PhaseMeter:
    """Attributes peaks to phases.

    With `reset` other than "phase" a peak is known exactly only for the phase that raised it; for the
    others the larger of its first and last sample stands, a lower bound.
    """

    source: MemorySource
    reset: ResetPolicy = "phase"
    phase: Phase = "other"
    last: Sample = field(init=False)
    step_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes; cleared by `start_step`
    log_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes; cleared by `start_log_window`
    run_peaks: dict[Phase, int] = field(default_factory=dict)  # bytes
    run_peak_reserved: int = 0
    skipped: int = 0  # changes of phase during a capture, where nothing may be read

    def __post_init__(self) -> None:
        self.last = self.source.read()
        if self.reset != "never":
            self.source.reset_peaks()
        self._forget_peak()

    def enter(self, phase: Phase) -> Sample:
        """End the current phase and begin another; returns the sample between them."""
        if self.source.is_busy():
            self.skipped += 1
            self.phase = phase
            return self.last
        sample = self.source.read()
        raised = self.reset == "phase" or sample.peak_allocated > self._known_peak
        peak = sample.peak_allocated if raised else max(self.last.allocated, sample.allocated)
        self._raise_peak(self.phase, peak)
        self.run_peak_reserved = max(self.run_peak_reserved, sample.peak_reserved, sample.reserved)
        self._known_peak = max(self._known_peak, sample.peak_allocated)
        self.last, self.phase = sample, phase
        if self.reset == "phase":
            self.source.reset_peaks()
        return sample

    def start_step(self) -> None:
        """Forget the peaks of the step before; those of the run stay."""
        self.step_peaks.clear()
        if self.reset == "step" and not self.source.is_busy():
            self.source.reset_peaks()
            self._forget_peak()

    def start_log_window(self) -> None:
        """Forget the peaks since the last logging step, validation and checkpoints between steps too."""
        self.log_peaks.clear()

    @property
    def step_peak(self) -> int:
        """The largest of the step so far."""
        return max(self.step_peaks.values(), default=self.last.allocated)

    @property
    def run_peak(self) -> int:
        """The largest of the run so far."""
        return max(self.run_peaks.values(), default=self.last.allocated)

    def _raise_peak(self, phase: Phase, peak: int) -> None:
        for peaks in (self.step_peaks, self.log_peaks, self.run_peaks):
            if peak > peaks.get(phase, -1):
                peaks[phase] = peak

    def _forget_peak(self) -> None:
        self._known_peak = self.last.peak_allocated if self.reset == "never" else self.last.allocated
