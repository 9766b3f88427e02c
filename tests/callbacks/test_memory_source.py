"""Sources of memory figures, recorded, real and scripted, and the phases that their peaks are given
to.
"""

import os
import re
from pathlib import Path

import pytest
import torch

from helpers.recorded_memory import SPLIT_SEGMENTS, UNSPLIT_SEGMENTS, as_stats
from helpers.tracking import MIB, needs_cuda
from lightning_zero3.callbacks.memory.figures import GIB
from lightning_zero3.callbacks.memory.phases import Budget, PhaseMeter
from lightning_zero3.callbacks.memory.source import (
    CUDASource,
    ProcessSource,
    Sample,
    Surroundings,
    sample_from_stats,
)

# ---- sources
# --------------------------------------------------------------------------------------

# In the form of torch.cuda.memory_stats_as_nested_dict(), with figures made up, for what no
# published record shows.
STATS = {
    "allocated_bytes": {
        "all": {"allocated": 900, "current": 300, "freed": 600, "peak": 700},
        "large_pool": {"current": 1},
    },
    "reserved_bytes": {"all": {"allocated": 1000, "current": 1000, "freed": 0, "peak": 1000}},
    "inactive_split_bytes": {"all": {"allocated": 90, "current": 50, "freed": 40, "peak": 80}},
    "reserved_bytes_by_private_pools": {
        "(0, 1)": {"all": {"current": 200, "peak": 0}},
        "(0, 2)": {"all": {"current": 100}},
    },
    "num_alloc_retries": 2,
    "num_ooms": 1,
}


@pytest.mark.parametrize(
    ("table", "allocated", "reserved", "peaks", "inactive", "fragmentation"),
    [
        (SPLIT_SEGMENTS, 32249, 37644, (43042, 47504), 713142 * 1024, 5395 / 37644),
        # torch calls nothing inactive here, although 16 GiB are reserved and unused.
        (UNSPLIT_SEGMENTS, 32711, 49552, (52084, 52188), 0, 16841 / 49552),
    ],
)
def test_figures_recorded_on_a_gpu(table, allocated, reserved, peaks, inactive, fragmentation):
    sample = sample_from_stats(as_stats(table))
    assert (sample.allocated, sample.reserved, sample.live) == (
        allocated * MIB,
        reserved * MIB,
        allocated * MIB,
    )
    assert (sample.peak_allocated, sample.peak_reserved) == (peaks[0] * MIB, peaks[1] * MIB)
    assert (sample.inactive, sample.retries, sample.ooms, sample.graph_pool) == (inactive, 0, 0, 0)
    assert sample.fragmentation == pytest.approx(fragmentation)


def test_graph_pools_and_counts():
    sample = sample_from_stats(STATS)
    assert (sample.graph_pool, sample.retries, sample.ooms) == (300, 2, 1)
    # of a pool nobody else can use anything
    assert sample.waste == 1000 - 300 - 300 and sample.fragmentation == 0.4


def test_a_torch_without_pools_or_a_backend_without_figures_reads_as_zero():
    older = {
        name: value for name, value in STATS.items() if name != "reserved_bytes_by_private_pools"
    }
    assert sample_from_stats(older).graph_pool == 0
    assert sample_from_stats({}) == Sample(0, 0, 0, 0, 0, 0)
    assert sample_from_stats({}).fragmentation == 0.0


def proc_status(name):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", text).group(1)) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc")
def test_the_process_source_agrees_with_the_kernel():
    source = ProcessSource()
    kept = torch.ones(16 * MIB // 4)
    assert (
        source.read(thorough=True).live is not None
        and abs(source.read().allocated - proc_status("VmRSS")) < 2 * MIB
    )
    before = source.read()
    lively = source.read(thorough=True).live
    spike = torch.ones(64 * MIB // 4)
    during = source.read(thorough=True)
    del spike
    after = source.read()
    assert 60 * MIB < during.live - lively < 68 * MIB
    assert after.peak_allocated - before.allocated > 60 * MIB
    assert after.allocated - before.allocated < 8 * MIB
    source.reset_peaks()
    assert source.read().peak_allocated - before.allocated < 8 * MIB
    around = source.read_surroundings()
    assert around.capacity > around.free > 0 and around.outside >= 0
    source.close()
    del kept


@needs_cuda
@pytest.mark.gpu
def test_the_cuda_source_agrees_with_torch():
    device = torch.device("cuda", 0)
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    source = CUDASource(device)
    source.reset_peaks()
    sample = source.read()
    assert sample.allocated == torch.cuda.memory_allocated(device) == sample.peak_allocated
    assert sample.reserved == torch.cuda.memory_reserved(device)
    spike = torch.ones(128 * MIB, dtype=torch.uint8, device=device)
    del spike
    assert source.read().peak_allocated - sample.allocated == 128 * MIB
    free, total = torch.cuda.mem_get_info(device)
    around = source.read_surroundings()
    assert around.capacity == total and abs(around.free - free) < 64 * MIB
    pinned = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    assert source.read_surroundings().pinned_allocated >= 32 * MIB
    del kept, pinned


# ---- phases
# ---------------------------------------------------------------------------------------


class Scripted:
    """A source that follows a list of levels and keeps a true high-water mark between resets."""

    name, device_type = "cuda", "cpu"

    def __init__(self):
        self.level = self.peak = 100
        self.busy = False
        self.reads = 0

    def go(self, *levels):
        for level in levels:
            self.level = level
            self.peak = max(self.peak, level)

    def read(self, thorough=False):
        self.reads += 1
        return Sample(self.level, 1000, self.peak, 1000, inactive=0, live=self.level)

    def read_surroundings(self):
        return Surroundings(
            capacity=80 * GIB, free=20 * GIB, outside=3 * GIB, pinned_reserved=2 * GIB
        )

    def reset_peaks(self):
        self.peak = self.level

    def is_busy(self):
        return self.busy

    def close(self):
        pass


def run_a_step(meter, source):
    meter.start_step()
    source.go(300, 250)
    meter.enter("backward")
    source.go(400, 150)
    meter.enter("optimizer")
    source.go(180, 120)
    meter.finish_step()


def test_exact_peaks_by_phase():
    source = Scripted()
    meter = PhaseMeter(source)
    run_a_step(meter, source)
    assert meter.step_peaks == {"forward": 300, "backward": 400, "optimizer": 180}
    assert meter.step_peak == 400
    run_a_step(meter, source)
    assert meter.step_peaks == {"forward": 300, "backward": 400, "optimizer": 180}
    assert meter.run_peaks["other"] == 120 and meter.run_peak == 400


def test_without_resets_quiet_phases_are_a_lower_bound_and_the_peak_is_exact():
    source = Scripted()
    meter = PhaseMeter(source, reset=False)
    for _ in range(2):
        run_a_step(meter, source)
        assert meter.step_peaks["optimizer"] == 150  # its first sample; the 180 in it went unseen
    assert meter.run_peaks["backward"] == 400 and meter.run_peak == 400
    assert source.peak == 400


def test_short_steps_are_read_closely_only_as_often_as_time_allows():
    source = Scripted()
    meter = PhaseMeter(source, share=1e-9)
    run_a_step(meter, source)  # the first one is
    run_a_step(meter, source)
    reads = source.reads
    for _ in range(10):
        run_a_step(meter, source)
        assert meter.step_peak == 400 and meter.step_peaks == {}
    assert source.reads == reads + 10 and (meter.close_steps, meter.steps) == (1, 12)
    meter.enter("validation")
    source.go(900, 100)
    meter.enter("other")
    assert meter.run_peaks["validation"] == 900 and meter.run_peak == 900


def test_what_unread_steps_needed_goes_to_no_phase_of_the_next_step_that_is_read():
    source = Scripted()
    meter = PhaseMeter(source, share=1e-9)
    run_a_step(meter, source)
    meter.start_step()  # not read, nor is its end
    source.go(700, 100)
    meter._budget = Budget(1.0)
    run_a_step(meter, source)
    assert meter.step_peaks == {"forward": 300, "backward": 400, "optimizer": 180}
    assert meter.run_peaks["forward"] == 300 and meter.run_peak == meter.step_peak == 700
    run_a_step(meter, source)
    assert meter.step_peak == 400


def test_nothing_is_read_during_a_capture():
    source = Scripted()
    meter = PhaseMeter(source)
    source.busy = True
    reads = source.reads
    meter.enter("forward")
    meter.enter("backward")
    assert source.reads == reads and meter.phase == "backward"


def test_only_a_thorough_reading_asks_malloc():
    source = ProcessSource()
    assert source.read().live is None and source.read(thorough=True).live > 0
    source.close()
