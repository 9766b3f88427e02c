"""The ledger against every storage that lives, with DDP, FSDP2, zero3, on one device and on a
GPU.
"""

import gc
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

import lightning_zero3  # noqa: F401  (registers the strategy)
from helpers.ranks import run_ranks
from helpers.tracking import MIB, WIDTH, Model, fit, needs_cuda
from lightning_zero3.callbacks import CUDAMemoryTracker
from lightning_zero3.callbacks.memory.figures import GIB, KEYS
from lightning_zero3.callbacks.memory.ledger import CATEGORIES, STRATEGY_CATEGORIES
from lightning_zero3.callbacks.memory.phases import PHASES

LAYERS = 12  # so that the data set is far below 1% of them


class Sharded(Model):
    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if not getattr(self, "done", False):
            for layer in [*self.layers, self]:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.done = True


def find_mapped(rank):
    """Memory of the other ranks that this process maps, as the kernel lists it: zero3's ranks on
    one machine share some.
    """
    path = Path("/proc/self/maps")
    lines = path.read_text().splitlines() if path.exists() else []
    maps = [line.split() for line in lines if "memfd:lightning_zero3 rank" in line]
    return [
        [int(end, 16) for end in fields[0].split("-")] for fields in maps if int(fields[-3]) != rank
    ]


def count_live_tensors(rank=0):
    """An independent ledger: every storage of this rank that Python can reach, once."""
    storages, foreign = {}, find_mapped(rank)
    for item in gc.get_objects():
        if (
            issubclass(type(item), torch.Tensor)
            and not hasattr(item, "_local_tensor")
            and _has_storage(item)
        ):
            # a sharded parameter of zero3 would refuse
            with torch._C.DisableTorchFunctionSubclass():
                storage = item.untyped_storage()
            if storage.nbytes() <= 8:
                continue  # the one number of a sharded parameter
            if not any(start <= storage.data_ptr() < stop for start, stop in foreign):
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _has_storage(tensor):
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


class CountLive(Callback):
    """Counts after each step."""

    def on_train_batch_end(self, trainer, *args):
        gc.collect()
        self.live = count_live_tensors(trainer.global_rank)


def ledger_case(rank, world_size, kind, folder):
    strategy = {
        "ddp": lambda: DDPStrategy(),
        "fsdp2": lambda: ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1
        ),
        "zero3": lambda: "zero3",
    }[kind]()
    gc.collect()
    foreign = count_live_tensors(rank)
    tracker, live = CUDAMemoryTracker(table=False, per_unit=True), CountLive()
    model = Sharded(LAYERS) if kind == "fsdp2" else Model(LAYERS)
    seen = {}

    class Look(Callback):
        def on_train_batch_end(self, trainer, *args):
            seen["calls"] = tracker._run.gatherer.calls
            if kind == "ddp":
                seen["buckets"] = trainer.strategy.model._get_ddp_logging_data()["bucket_sizes"]

    _, logger = fit(
        tracker, live, Look(), tmp_path=folder, model=model, strategy=strategy, devices=world_size
    )
    return {
        "ledger": {
            category: tracker.run_spreads[f"memory/{category}_gib"].high * GIB
            for category in CATEGORIES
        },
        "live": live.live - foreign,
        "rows": logger.memory(),
        **seen,
    }


def ledger_cases(rank, world_size, folder):
    return {kind: ledger_case(rank, world_size, kind, folder) for kind in ("ddp", "fsdp2", "zero3")}


def test_ledger_against_live_storages_over_two_ranks(tmp_path):
    for rank, results in enumerate(run_ranks(ledger_cases, 2, tmp_path)):
        for kind, result in results.items():
            check_ledger(kind, result)
            if rank == 0:
                check_keys(kind, result["rows"])


def check_ledger(kind, result):
    ledger, state = result["ledger"], LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    share = 1 if kind == "ddp" else 2
    # zero3 pads a rank's share by 16 bytes
    assert ledger["parameters"] == pytest.approx(state / share, rel=1e-5)
    assert ledger["gradients"] == pytest.approx(state / share, rel=1e-5)
    assert ledger["optimizer_state"] == pytest.approx(2 * state / share, rel=1e-3)
    assert ledger["buffers"] == WIDTH * WIDTH * 4
    # Python cannot reach DDP's buckets; DDP itself knows their sizes.
    if kind == "ddp":
        assert ledger["reduce_buffer"] == sum(int(size) for size in result["buckets"].split(","))
    reachable = sum(ledger.values()) - (ledger["reduce_buffer"] if kind == "ddp" else 0)
    assert abs(result["live"] - reachable) < 0.01 * reachable, (kind, ledger)
    assert result["calls"] == 3  # at steps 2, 4 and 6 one collective each


def check_keys(kind, rows):
    assert [step for step, _ in rows] == [2, 4, 6]
    metrics = rows[-1][1]
    assert {name for name in metrics if name.count("/") == 1} <= set(KEYS)
    assert {f"memory/peak_gib/{part}" for part in ("min", "mean", "max_rank")} <= set(metrics)
    units = {name: size * GIB for name, size in metrics.items() if name.startswith("memory/unit/")}
    of_a_layer = (WIDTH * WIDTH + WIDTH) * 4
    expected = {"ddp": 4 * of_a_layer, "fsdp2": 2 * of_a_layer, "zero3": 2 * of_a_layer}[kind]
    if kind != "zero3":
        assert set(units) == {f"memory/unit/layers.{i}_gib" for i in range(LAYERS)}
    assert sum(units.values()) == pytest.approx(LAYERS * expected, rel=1e-3)


def test_ledger_on_a_single_device(tmp_path):
    gc.collect()
    foreign = count_live_tensors()
    tracker, live = CUDAMemoryTracker(table=False), CountLive()
    _, logger = fit(tracker, live, tmp_path=tmp_path)
    ledger = {
        category: tracker.run_spreads[f"memory/{category}_gib"].high * GIB
        for category in CATEGORIES
    }
    assert ledger["unsharded_units"] == ledger["reduce_buffer"] == 0
    assert abs(live.live - foreign - sum(ledger.values())) < 0.01 * sum(ledger.values())
    metrics = logger.memory()[-1][1]
    # where steps are short, not all are detailed
    missing = {f"memory/peak_{phase}_gib" for phase in PHASES}
    assert set(KEYS) - missing <= set(metrics) <= set(KEYS)
    assert tracker.run_spreads.keys() >= {f"memory/peak_{phase}_gib" for phase in PHASES[:3]}


class Told(SingleDeviceStrategy):
    """A strategy that keeps its own ledger."""

    def memory_ledger(self, per_unit=False):
        sizes = range(10 * MIB, 70 * MIB, 10 * MIB)
        ledger = dict(zip(STRATEGY_CATEGORIES, sizes, strict=True))
        return {**ledger, "units": {"layers.0": 7 * MIB, "head": 3 * MIB}} if per_unit else ledger


def test_a_strategy_that_knows_its_ledger_is_asked(tmp_path):
    _, logger = fit(
        CUDAMemoryTracker(table=False, per_unit=True), tmp_path=tmp_path, strategy=Told("cpu")
    )
    metrics = logger.memory()[-1][1]
    assert [metrics[f"memory/{category}_gib"] * 1024 for category in CATEGORIES] == [
        10,
        20,
        30,
        40,
        50,
        60,
        0,
    ]
    assert (
        metrics["memory/unit/layers.0_gib"] * 1024 == 7
        and metrics["memory/unit/head_gib"] * 1024 == 3
    )
    strategy = Told("cpu")
    strategy.memory_ledger = lambda: {"parameters": 1}
    with pytest.raises(KeyError, match="memory_ledger.*lacks.*gradients"):
        fit(CUDAMemoryTracker(), tmp_path=tmp_path, strategy=strategy)


@needs_cuda
@pytest.mark.gpu
def test_ledger_against_the_cuda_allocator(tmp_path):
    tracker = CUDAMemoryTracker(table=False, report=str(tmp_path / "memory.html"), report_png=False)
    seen = {}

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS's own, up to 32 MiB
            seen["allocated"] = torch.cuda.memory_stats()["allocated_bytes.all.current"]

    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    fit(tracker, Look(), tmp_path=tmp_path, model=Model(layers=64), accelerator="gpu", devices=1)
    ledger = sum(
        tracker.run_spreads[f"memory/{category}_gib"].high * GIB for category in CATEGORIES
    )
    assert abs(seen["allocated"] - before - ledger) < 0.01 * ledger
    assert "train" in (tmp_path / "memory.html").read_text()
