"""Lightning's profilers see the same actions as often as on one device, and what zero3 does in
them.
"""

from collections import Counter

from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler

from helpers.models import Lit, Recipe
from helpers.parity import local_gradients, sharded_gradients, trainer, zero3
from helpers.ranks import run_ranks

ACTIONS = {"training_step", "backward", "optimizer_step", "validation_step", "setup"}


def fit(profiler, world_size, strategy="auto"):
    gradients = local_gradients if strategy == "auto" else sharded_gradients
    options = {"profiler": profiler, "limit_val_batches": 2, "max_epochs": 2}
    trainer(strategy, world_size, **options).fit(Lit(Recipe(steps=3), gradients))
    return profiler


def named(actions, strategy):
    """Those of the strategy and of the module, by what is called; callbacks of ours are others."""
    kept = {name: count for name, count in actions.items() if not name.startswith("[Callback]")}
    return {
        name.replace(f"[Strategy]{strategy}.", "[Strategy]"): count for name, count in kept.items()
    }


def simple(rank, world_size):
    recorded = fit(SimpleProfiler(), world_size, zero3()).recorded_durations
    assert all(duration > 0 for durations in recorded.values() for duration in durations)
    return Counter({name: len(durations) for name, durations in recorded.items()})


def test_the_simple_profiler_counts_what_it_counts_on_one_device():
    alone = {
        name: len(durations)
        for name, durations in fit(SimpleProfiler(), 1).recorded_durations.items()
    }
    expected = named(alone, "SingleDeviceStrategy")
    assert {f"[Strategy]{action}" for action in ("training_step", "validation_step")} <= set(
        expected
    )
    assert expected["[Strategy]training_step"] == 6 and expected["[Strategy]validation_step"] == 4
    for found in run_ranks(simple, 2, timeout=60):
        assert named(found, "Zero3Strategy") == expected


class Kept(AdvancedProfiler):
    """Its records, which are gone when a run is over."""

    def describe(self):
        self.records, self.text = dict(self.profiled_actions), self.summary()


def advanced(rank, world_size):
    profiler = fit(Kept(), world_size, zero3())
    found = {}
    for action, profile in profiler.records.items():
        profile.create_stats()
        found[action] = {
            (file.rpartition("/")[0].rpartition("/")[2], name): calls[0]
            for (file, _, name), calls in profile.stats.items()
        }
    return found, profiler.text


def test_the_advanced_profiler_looks_into_the_engine():
    for found, summary in run_ranks(advanced, 2, timeout=60):
        step = found["[Strategy]Zero3Strategy.training_step"]
        assert step["strategies", "training_step"] == 6
        assert sum(times for (folder, _), times in step.items() if folder == "engine") >= 6 * 3
        assert "[Strategy]Zero3Strategy.training_step" in summary
