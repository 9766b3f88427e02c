"""The parts of the tracker by themselves: sources, phases, ledger, ranks, leaks, out of memory,
report.
"""

import gc
import re

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_zero3.callbacks import CUDAMemoryTracker
from lightning_zero3.callbacks.memory import leaks, out_of_memory
from lightning_zero3.callbacks.memory.allocations import Allocation, at_peak
from lightning_zero3.callbacks.memory.figures import GIB, History, StepRecord, render_table
from lightning_zero3.callbacks.memory.leaks import LeakDetector, LeakWatch, find_grown, take_census
from lightning_zero3.callbacks.memory.ledger import unit_of
from lightning_zero3.callbacks.memory.out_of_memory import (
    OutOfMemory,
    find_unit,
    is_out_of_memory,
    largest_free_block,
    parse_wanted,
)
from lightning_zero3.callbacks.memory.ranks import spread, to_metrics
from lightning_zero3.callbacks.memory.report import ReportData, render, write_png
from lightning_zero3.callbacks.memory.source import Sample, Surroundings

MIB = 2**20
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")

# ---- figures over ranks
# ---------------------------------------------------------------------------


def test_spread_by_hand():
    nan = float("nan")
    figures = spread(
        ["a", "b", "c"], torch.tensor([[1.0, nan, nan], [4.0, 7.0, nan]], dtype=torch.float64)
    )
    assert (figures["a"].low, figures["a"].mean, figures["a"].high, figures["a"].rank) == (
        1.0,
        2.5,
        4.0,
        1,
    )
    assert (figures["b"].low, figures["b"].high, figures["b"].rank) == (7.0, 7.0, 1)
    assert "c" not in figures
    assert to_metrics(figures, 2, ["a"]) == {
        "a": 4.0,
        "a/min": 1.0,
        "a/mean": 2.5,
        "a/max_rank": 1.0,
        "b": 7.0,
    }
    assert to_metrics(figures, 1, ["a"]) == {"a": 4.0, "b": 7.0}
    assert "rank of highest" in render_table("title", figures, 2)


def test_history_is_bounded_and_loses_no_peak():
    history = History(limit=64)
    for step in range(1, 1001):
        history.add(
            StepRecord(
                step,
                5000 if step == 777 else step,
                {"forward": 5000 if step == 777 else step},
                step,
                step,
                0,
                {},
            )
        )
    assert len(history.records) < 64 and history.stride > 1
    assert max(record.peaks["forward"] for record in history.records) == 5000
    assert history.records[-1].allocated >= 1000 - history.stride


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.layers.3.mlp.weight", "model.layers.3"),
        ("head.weight", "head"),
        ("scale", "scale"),
        ("0.weight", "0"),
    ],
)
def test_unit_of(name, unit):
    assert unit_of(name) == unit


# ---- leaks
# ----------------------------------------------------------------------------------------


def test_a_growing_floor_is_found_and_noise_is_not():
    detector = LeakDetector(window=5, windows=3, least_growth=8 * MIB, warm_up=5)
    noisy = [detector.add(GIB + (step * 7919 % 13) * 10 * MIB, step) for step in range(200)]
    assert noisy == [None] * 200
    detector = LeakDetector(window=5, windows=3, least_growth=8 * MIB, warm_up=5)
    rates = [detector.add(GIB + step * MIB + (step % 3) * 50 * MIB, step) for step in range(60)]
    found = [rate for rate in rates if rate is not None]
    assert rates.index(found[0]) == 5 + 4 * 5 - 1  # the first four floors after the warm-up
    assert found[0] == pytest.approx(MIB, rel=0.1)
    more = [detector.add(GIB + step * MIB, step) for step in range(60, 600)]
    # after 3, 6, 12, 24 and 48 windows
    assert len(found) + len([rate for rate in more if rate is not None]) == 5


def test_one_step_up_is_not_a_leak():
    detector = LeakDetector(window=5, windows=3, least_growth=8 * MIB, warm_up=0)
    assert all(detector.add(GIB if step < 50 else 2 * GIB, step) is None for step in range(100))


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.cache = []
        self.table = {"losses": []}


GLOBAL_CACHE = []


def test_the_grown_tensors_are_named_with_their_holder():
    module = Keeper()
    gc.collect()
    before = take_census("cpu")
    module.inner.cache.extend(torch.ones(1000, 7) for _ in range(3))
    module.table["losses"].extend(module.inner(torch.ones(2)).sum() for _ in range(4))
    GLOBAL_CACHE.append(torch.ones(999))
    lines = [str(grown) for grown in find_grown(before, "cpu", module)]
    GLOBAL_CACHE.clear()
    assert lines[0] == "3 more float32[1000, 7] (0.1 MiB), held by inner.cache[...]"
    assert (
        "4 more float32[] (0.0 MiB), held by Keeper.table['losses'][...]; each keeps an autograd"
        " graph" in lines[-1]
    )
    assert any("1 more float32[999]" in line and "GLOBAL_CACHE" in line for line in lines)


def test_a_view_counts_with_all_that_it_keeps_and_a_storage_once():
    module = Keeper()
    gc.collect()
    before = take_census("cpu")
    for step in range(0, 20, 5):  # each is a view of 1 MiB, of 8
        module.table[step] = torch.zeros(8, 512, 513)[0]
    module.inner.cache.extend(torch.zeros(3 * MIB).chunk(6))  # 2 MiB each, of one storage
    module.names = {f"step {step}": torch.zeros(MIB) for step in range(2)}
    lines = [str(grown) for grown in find_grown(before, "cpu", module)]
    assert lines == [
        "4 more float32[512, 513] (32.1 MiB), held by Keeper.table[...];"
        " a view that keeps 8.0 MiB: use .clone()",
        "6 more float32[524288] (12.0 MiB), held by inner.cache[...]",
        "2 more float32[1048576] (8.0 MiB), held by Keeper.names[...]",
    ]


class Leaky:
    kept = []


def test_a_class_that_holds_tensors_is_named_and_small_ones_are_not():
    gc.collect()
    before = take_census("cpu")
    Leaky.kept.extend(torch.ones(100_001) for _ in range(3))
    small = [torch.ones(5) for _ in range(7)]
    lines = [str(grown) for grown in find_grown(before, "cpu", Keeper())]
    Leaky.kept.clear()
    assert len(small) == 7 and not any("float32[5]" in line for line in lines)
    assert "3 more float32[100001] (1.1 MiB), held by Leaky.kept[...]" in lines


def test_a_watch_reports_a_leak_with_what_grew():
    module, watch = (
        Keeper(),
        LeakWatch(LeakDetector(window=4, windows=2, least_growth=MIB, warm_up=2)),
    )
    messages = []
    for step in range(30):
        module.inner.cache.append(torch.ones(MIB // 4))
        messages.append(watch.add(step * MIB, step, "cpu", module))
    first = next(message for message in messages if message is not None)
    assert "1.00 MiB per step" in first and "inner.cache[...]" in first


# ---- out of memory
# --------------------------------------------------------------------------------

# As torch 2.13 words it.
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 1.12 GiB is free. Including non-PyTorch memory, this process has 78.02 GiB memory in"
    " use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 6.50 GiB is reserved by"
    " PyTorch but unallocated."
)


def cpu_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    return caught.value


def test_out_of_memory_errors_are_recognised():
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA_MESSAGE))
    assert parse_wanted(torch.OutOfMemoryError(CUDA_MESSAGE)) == int(2.5 * GIB)
    error = cpu_out_of_memory()
    assert is_out_of_memory(error) and parse_wanted(error) == 2**58
    assert is_out_of_memory(MemoryError()) and parse_wanted(MemoryError()) is None
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), Bursting()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)


class Bursting(nn.Module):
    def forward(self, x):
        return torch.empty(2**58, dtype=torch.uint8)


def test_the_unit_comes_from_the_traceback():
    module = Deep()
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(2))
    assert find_unit(caught.value, module) == "blocks.1"
    assert find_unit(RuntimeError(), module) is None


SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "blocks": [
                {"size": 3 * MIB, "state": "inactive"},
                {"size": 90 * MIB, "state": "active_allocated"},
                {"size": 40 * MIB, "state": "active_pending_free"},
                {"size": 7 * MIB, "state": "inactive"},
            ],
        },
        {"device": 1, "blocks": [{"size": 500 * MIB, "state": "inactive"}]},
    ]
}


def test_largest_free_block():
    assert largest_free_block(SNAPSHOT, 0) == 7 * MIB
    assert largest_free_block({"segments": []}, 0) == 0


def make_report(**changes):
    sample = Sample(70 * GIB, 76 * GIB, 76 * GIB, 76 * GIB, 2 * GIB, 70 * GIB, retries=3)
    figures = dict(
        rank=3,
        step=120,
        phase="forward",
        unit="layers.7",
        source="cuda",
        wanted=int(2.5 * GIB),
        sample=sample,
        surroundings=Surroundings(capacity=79 * GIB, free=1 * GIB, outside=2 * GIB),
        largest_free=GIB // 2,
        categories={
            "parameters": 10 * GIB,
            "gradients": 5 * GIB,
            "optimizer_state": 20 * GIB,
            "activations": 35 * GIB,
        },
    )
    return OutOfMemory(**{**figures, **changes})


def test_the_message_has_every_number_and_a_remedy():
    text = make_report().describe()
    for part in (
        *(
            "rank 3, step 120, forward, in layers.7",
            "wanted                    2.50 GiB",
            "1.00 GiB",
        ),
        *("reserved but unused       6.00 GiB", "largest free block        512.0 MiB", "capacity"),
        "activations 35.00 GiB, optimizer_state 20.00 GiB, parameters 10.00 GiB",
        *("AllocatorConfig(expandable_segments=True)", "activation checkpointing"),
    ):
        assert part in text, text
    assert "roundup_power2_divisions" in make_report(expandable=True).describe()
    full = make_report(wanted=20 * GIB)
    assert not full.is_fragmented and "really in use" in full.describe()
    foreign = make_report(surroundings=Surroundings(capacity=79 * GIB, free=0, outside=30 * GIB))
    assert "other processes" in foreign.describe()
    assert "unknown" in make_report(wanted=None, largest_free=None).describe()


def test_one_observer_per_process_that_does_not_keep_the_tracker_alive(monkeypatch):
    attached, seen = [], []
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False
    )
    monkeypatch.setattr(out_of_memory, "_listeners", [])

    class Listener:
        def hear(self, *figures):
            seen.append((self.name, figures))

    for name in ("first", "second"):
        listener = Listener()
        listener.name = name
        out_of_memory.attach_observer(listener.hear)
    assert len(attached) == 1
    attached[0](0, 10, 20, 30)
    assert seen == [("second", (0, 10, 20, 30))]
    del listener
    attached[0](0, 10, 20, 30)
    assert len(seen) == 1


# ---- report
# ---------------------------------------------------------------------------------------


def frame(name, line, filename="train.py"):
    return {"name": name, "filename": filename, "line": line}


def event(action, address, size, *frames):
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def test_what_was_alive_at_the_peak():
    attention = (
        frame("linear", 9, "/site/torch/nn/functional.py"),
        frame("attend", 12),
        frame("training_step", 40),
    )
    trace = [
        event("free_completed", 1, 500),  # from before the trace
        event("alloc", 2, 100, *attention),
        event("alloc", 3, 300, frame("embed", 5)),
        event("alloc", 4, 100, *attention),
        event("free_requested", 3, 300),
        event("free_completed", 3, 300),
        event("alloc", 5, 200),
    ]
    size, places = at_peak(trace)
    assert size == 500
    assert [(place.size, place.count, place.what) for place in places] == [
        (300, 1, "embed (train.py:5)"),
        (200, 2, "attend (train.py:12)"),
    ]
    assert places[1].stack[0].startswith("linear")
    assert at_peak([]) == (0, [])


def report_data():
    ledger = {
        "parameters": GIB,
        "gradients": GIB,
        "optimizer_state": 2 * GIB,
        "unsharded_units": GIB // 8,
        "reduce_buffer": GIB // 8,
        "buffers": 0,
        "graph_inputs": 0,
    }
    records = [
        StepRecord(
            step,
            6 * GIB + step * MIB,
            {"forward": 5 * GIB, "backward": 6 * GIB + step * MIB},
            5 * GIB,
            7 * GIB,
            GIB,
            ledger,
        )
        for step in range(1, 50)
    ]
    ranks = [
        {
            "memory/peak_gib": 6 + rank,
            "memory/fragmentation": 0.1,
            "memory/retries": 0.0,
            "run/peak_reserved": 8.0 * GIB,
        }
        for rank in range(4)
    ]
    allocations = [
        Allocation(GIB, 3, "attend <script>", ("attend (train.py:12)",)),
        Allocation(MIB, 1, "embed", ("x",)),
    ]
    composition = {**ledger, "graph_pool": 0, "process": 0, "activations": 2 * GIB}
    phases = {"forward": 5 * GIB, "backward": 6 * GIB}
    return ReportData(
        *("CUDA memory", "cuda", records, composition, phases, 49, ranks, allocations),
        remarks=["a <leak>"],
        run="Net, DDPStrategy, 4 ranks; train.py on host",
    )


def test_the_page_is_self_contained_and_complete():
    page = render(report_data())
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<img", page)
    sections = (
        "by category",
        "by phase",
        "peak is made of",
        "Peak of each phase",
        "Ranks",
        "Largest allocations",
    )
    for text in (
        *sections,
        "rank 3",
        "attend (train.py:12)",
        "train.py on host",
        "The peak of rank 0",
    ):
        assert text in page
    assert "activations and others" in page and "this rank" not in page
    steps = [record.step for record in report_data().records]
    ticks = [int(tick) for tick in re.findall(r'text-anchor="\w+">(\d+)<', page)]
    assert len(ticks) > 4 and all(tick % 5 == 0 and tick <= max(steps) for tick in ticks), ticks
    # nothing of the run becomes markup
    assert "a &lt;leak&gt;" in page and "attend &lt;script&gt;" in page
    from xml.etree import ElementTree

    for drawing in re.findall(r"<svg.*?</svg>", page, re.S):
        ElementTree.fromstring(drawing)
    assert page.count("<svg") == 5


def test_an_empty_run_still_renders():
    data = report_data()
    empty = ReportData(
        "t", "process", [], {"parameters": 0, "activations": 0}, {}, 0, data.ranks[:1], []
    )
    page = render(empty)
    assert "No steps were recorded" in page and "reserved" not in page.partition("</style>")[2]


def test_png(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    write_png(tmp_path / "memory.png", report_data())
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="report_png needs matplotlib"):
        CUDAMemoryTracker(report="memory.html", report_png=True)


@pytest.mark.parametrize("option", ["report", "oom_folder"])
def test_a_path_that_cannot_be_written_is_an_error_before_training(option, tmp_path):
    (tmp_path / "file").write_text("in the way")
    path = str(tmp_path / "file" / "memory.html")
    runner = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[CUDAMemoryTracker(**{option: path})],
    )
    with pytest.raises(PermissionError, match=r"CUDAMemoryTracker cannot write .*memory\.html"):
        runner.fit(BoringModel())
    assert runner.global_step == 0


def test_leak_census_ignores_parameters():
    model = BoringModel()
    before = take_census("cpu")
    model.extra = nn.Linear(300, 300)
    assert not any(shape == (300, 300) for _, shape, _, _ in take_census("cpu") - before)
    assert leaks.MIB == MIB
