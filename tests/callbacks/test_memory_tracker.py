"""`CUDAMemoryTracker` in the Trainer: phases, leaks, errors, arguments."""

import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from helpers.parity import trainer
from helpers.ranks import run_ranks
from helpers.recorded_memory import SPLIT_SEGMENTS, UNSPLIT_SEGMENTS, as_stats
from helpers.tracking import MIB, WIDTH, Model, fit, needs_cuda
from lightning_zero3.callbacks import AllocatorConfig, CUDAMemoryTracker, StepTimer
from lightning_zero3.callbacks.memory.figures import GIB
from lightning_zero3.callbacks.memory.ledger import CATEGORIES
from lightning_zero3.callbacks.memory.recording import Recording
from lightning_zero3.callbacks.memory.source import Sample, Surroundings, sample_from_stats

# ---- phases through the Trainer
# -------------------------------------------------------------------


class Scripted:
    """CUDA figures driven by the program: `use(bytes)` is what an allocation and its release would
    do.
    """

    name, device_type = "cuda", "cpu"
    level = peak = GIB

    def use(self, size):
        self.peak = max(self.peak, self.level + size)

    def read(self, thorough=False):
        return Sample(
            self.level,
            8 * GIB,
            self.peak,
            8 * GIB,
            GIB // 2,
            self.level,
            graph_pool=GIB,
            retries=2,
            ooms=1,
        )

    def read_surroundings(self):
        return Surroundings(
            80 * GIB, 60 * GIB, 3 * GIB, pinned_allocated=GIB, pinned_reserved=2 * GIB
        )

    def reset_peaks(self):
        self.peak = self.level

    def is_busy(self):
        return False

    def close(self):
        pass


class Spending(Model):
    """Uses a known amount in every phase."""

    def __init__(self, source):
        super().__init__(layers=1)
        self.source = source

    def training_step(self, batch, batch_idx):
        self.source.use(2 * GIB)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self.source.use(3 * GIB)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.source.use(1 * GIB)

    def validation_step(self, batch, batch_idx):
        self.source.use(5 * GIB)

    def on_save_checkpoint(self, checkpoint):
        self.source.use(4 * GIB)


class WithSource(CUDAMemoryTracker):
    scripted = None

    def make_source(self, device):
        return self.scripted


CUDA_ROWS = {"retries", "ooms", "pinned", "graph pool"}


def rows(printed):
    """First words of the lines of the table at the end."""
    return {line.split("  ")[0] for line in printed.splitlines()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_phase_gets_its_own_peak(accumulate, tmp_path, capsys):
    # Every step is read closely, however long reading takes on this machine.
    tracker = WithSource(report=str(tmp_path / "memory.html"), time_share=None)
    tracker.scripted = source = Scripted()
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    _, logger = fit(
        tracker,
        saving,
        tmp_path=tmp_path,
        model=Spending(source),
        limit_val_batches=1,
        val_check_interval=4,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        accumulate_grad_batches=accumulate,
    )
    run = {name: figure.high for name, figure in tracker.run_spreads.items()}
    assert [run[f"memory/peak_{phase}_gib"] for phase in ("forward", "backward", "optimizer")] == [
        3,
        4,
        2,
    ]
    assert [run[f"memory/peak_{phase}_gib"] for phase in ("validation", "checkpoint")] == [6, 5]
    assert run["memory/peak_gib"] == 6
    metrics = logger.memory()[0][1]
    expected = {
        "reserved": 8,
        "inactive": 0.5,
        "pinned": 2,
        "outside": 3,
        "graph_pool": 1,
        "allocated": 1,
    }
    assert {name: metrics[f"memory/{name}_gib"] for name in expected} == expected
    assert (
        metrics["memory/fragmentation"] == 6 / 8
        and metrics["memory/retries"] == 2
        and metrics["memory/ooms"] == 1
    )
    printed = capsys.readouterr().out
    assert "peak validation" in printed and "6.00 GiB" in printed and "fragmentation" in printed
    assert CUDA_ROWS <= rows(printed) and "process" not in rows(printed)
    page = (tmp_path / "memory.html").read_text()
    assert "6.00 GiB" in page and "checkpoint" in page
    assert tracker.run_figures().worst_waste == 6 * GIB
    assert AllocatorConfig().suggest(tracker.run_figures())[0].option == "expandable_segments"


class Recorded(Scripted):
    """Says what an allocator on a GPU has said."""

    def __init__(self, table):
        self.sample = sample_from_stats(as_stats(table))

    def read(self, thorough=False):
        return self.sample

    def read_surroundings(self):
        return Surroundings(80 * GIB, 20 * GIB, GIB)


@pytest.mark.parametrize(
    ("table", "figures"),
    [(SPLIT_SEGMENTS, (43042, 37644, 32249)), (UNSPLIT_SEGMENTS, (52084, 49552, 32711))],
)
def test_recorded_figures_reach_the_logger_and_the_advice(table, figures, tmp_path):
    tracker = WithSource(table=False)
    tracker.scripted = Recorded(table)
    _, logger = fit(tracker, tmp_path=tmp_path)
    metrics = logger.memory()[-1][1]
    peak, reserved, allocated = figures
    assert [metrics[f"memory/{name}_gib"] * 1024 for name in ("peak", "reserved", "allocated")] == [
        peak,
        reserved,
        allocated,
    ]
    assert metrics["memory/fragmentation"] == pytest.approx((reserved - allocated) / reserved)
    (advice,) = AllocatorConfig().suggest(tracker.run_figures())
    # much is unused, and nobody wanted it
    assert advice.option == "none" and "no retries" in advice.reason


def test_no_figures_before_the_end():
    with pytest.raises(RuntimeError, match="before Trainer.fit has ended"):
        CUDAMemoryTracker().run_figures()


def test_what_was_wrapped_is_put_back(tmp_path):
    bar = TQDMProgressBar()
    shown = []

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            shown.append(bar.get_metrics(trainer, pl_module)["mem"])

    trainer, _ = fit(
        CUDAMemoryTracker(table=False), bar, Look(), tmp_path=tmp_path, enable_progress_bar=True
    )
    assert len(shown) == 6 and all(text.endswith("G") and float(text[:-1]) > 0 for text in shown)
    assert "get_metrics" not in bar.__dict__ and "save_checkpoint" not in trainer.__dict__


def test_without_cuda_the_source_is_named_and_the_allocators_figures_are_not_shown(
    tmp_path, caplog, capsys
):
    with caplog.at_level(logging.INFO):
        fit(tracker := CUDAMemoryTracker(), tmp_path=tmp_path)
    assert "figures are of this process's resident memory" in caplog.text
    shown = rows(capsys.readouterr().out)
    assert {"process", "peak", "parameters", "outside"} <= shown and not CUDA_ROWS & shown
    assert all(
        tracker.run_spreads[f"memory/{name}"].high == 0
        for name in ("retries", "ooms", "pinned_gib", "graph_pool_gib")
    )


def test_validate_and_predict_alone(tmp_path):
    tracker = CUDAMemoryTracker()
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[tracker], enable_progress_bar=False
    )
    trainer.validate(BoringModel(), verbose=False)
    trainer.predict(BoringModel())
    assert tracker._run is None


def test_no_number_changes_and_no_extra_hook_for_the_optimizer(tmp_path):
    def weights(*callbacks):
        torch.manual_seed(0)
        trainer, _ = fit(*callbacks, tmp_path=tmp_path)
        return [parameter.detach().clone() for parameter in trainer.lightning_module.parameters()]

    tracked = weights(CUDAMemoryTracker(table=False, per_unit=True))
    assert all(torch.equal(a, b) for a, b in zip(tracked, weights(), strict=True))


# ---- leaks and errors
# -----------------------------------------------------------------------------


class Leaking(Model):
    """Leaks 1 MiB a step; malloc and the tracker are asked at a share of the time, so steps take
    some.
    """

    def __init__(self):
        super().__init__(layers=1)
        self.kept = []

    def training_step(self, batch, batch_idx):
        self.kept.append(torch.ones(MIB // 4))
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def leak_case(rank, world_size, folder):
    """A young process, whose malloc may be asked at every step."""
    tracker = CUDAMemoryTracker(
        table=False, leak_window=2, leak_windows=2, leak_growth_mib=4, time_share=0.2
    )
    fit(tracker, tmp_path=folder, model=Leaking(), max_steps=100)
    sound = CUDAMemoryTracker(
        table=False, leak_window=2, leak_windows=2, leak_growth_mib=4, time_share=0.2
    )
    fit(sound, tmp_path=folder, max_steps=60)
    return tracker.leaks, sound.leaks


def test_a_leak_is_named_and_an_ordinary_run_has_none(tmp_path):
    ((leaks, none),) = run_ranks(leak_case, 1, tmp_path)
    assert none == []
    assert "kept[...]" in leaks[0] and "float32[262144]" in leaks[0]
    rate = float(leaks[0].split("grows by ")[1].split(" MiB")[0])
    assert 0.9 < rate < 1.2


class Exploding(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.layers[2].forward = lambda x: torch.empty(2**58, dtype=torch.uint8)
            self.layers[2].register_forward_hook(lambda *_: None)
        return super().training_step(batch, batch_idx)


def test_an_out_of_memory_error_arrives_with_the_report(tmp_path, caplog):
    tracker = CUDAMemoryTracker(table=False)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        fit(tracker, tmp_path=tmp_path, model=Exploding())
    text = "\n".join(getattr(caught.value, "__notes__", [caplog.text]))
    for part in (
        "Out of host memory on rank 0, step 3, forward, in layers.2",
        "268435456.00 GiB",
        "What to try",
    ):
        assert part in text, text
    assert text in caplog.text or "What to try" in caplog.text
    assert tracker.oom_reports[0].phase == "forward"


def test_other_errors_pass_unchanged(tmp_path):
    class Failing(Model):
        def training_step(self, batch, batch_idx):
            raise ValueError("mine")

    tracker = CUDAMemoryTracker()
    with pytest.raises(ValueError, match="mine") as caught:
        fit(tracker, tmp_path=tmp_path, model=Failing())
    assert not getattr(caught.value, "__notes__", [])


def test_a_failing_report_hides_nothing(tmp_path, caplog, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    tracker = CUDAMemoryTracker()
    monkeypatch.setattr(Recording, "explain_oom", fail)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fit(tracker, tmp_path=tmp_path, model=Exploding())
    assert "disk full" in caplog.text and "report on an out-of-memory error failed" in caplog.text


def test_the_report_asks_no_other_rank(tmp_path, monkeypatch):
    """They wait in their collectives; any call would hang."""
    from lightning_zero3.callbacks.memory.ranks import RankGatherer

    tracker, called = CUDAMemoryTracker(table=False, every_n_steps=100), []
    for name in (
        "all_gather_object",
        "all_gather_into_tensor",
        "all_reduce",
        "barrier",
        "broadcast",
    ):
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: called.append(args))
    monkeypatch.setattr(RankGatherer, "gather", lambda *args: called.append(args))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fit(tracker, tmp_path=tmp_path, model=Exploding())
    assert tracker.oom_reports and called == []


class Compiled(Model):
    """Whose compiler keeps tensors without memory."""

    def __init__(self):
        super().__init__(layers=4)
        for layer in self.layers:
            layer.compile(backend="aot_eager")

    def train_dataloader(self):
        return DataLoader(RandomDataset(WIDTH, 8), 2)

    val_dataloader = train_dataloader


def several_stages(rank, world_size, strategy, folder):
    """A validation and two fits of one model, which zero3 has sharded since the first of them."""
    module = Compiled()
    for run in range(2):
        tracker = CUDAMemoryTracker(report=Path(folder, f"{run}.html"))
        runner = trainer(strategy, world_size, callbacks=[tracker], limit_val_batches=1)
        if run == 0:
            runner.validate(module)
        runner.fit(module)
    return Path(folder, "1.html").exists()


@pytest.mark.parametrize("world_size, strategy", [(1, "auto"), (1, "zero3"), (2, "zero3")])
def test_several_stages_in_one_process(world_size, strategy, tmp_path):
    # rank 0 writes it
    assert run_ranks(several_stages, world_size, strategy, tmp_path, timeout=120)[0]


# ---- arguments, YAML
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_share": 0.0}, "time_share.*above 0"),
        ({"time_share": 50}, "time_share.*at most 1"),
        ({"every_n_steps": 0}, "every_n_steps.*at least 1"),
        ({"report_png": True}, "report_png.*report="),
        ({"leak_window": -1}, "leak_window"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CUDAMemoryTracker(**arguments)


def test_from_yaml(tmp_path):
    (tmp_path / "config.yaml").write_text("""
trainer:
  callbacks:
    - class_path: lightning_zero3.callbacks.CUDAMemoryTracker
      init_args: {every_n_steps: 5, reset_peaks: false, time_share: null, report: memory.html, per_unit: true}
    - class_path: lightning_zero3.callbacks.StepTimer
      init_args: {every_n_steps: 5}
""")
    trainer = LightningCLI(
        BoringModel, run=False, args=["--config", str(tmp_path / "config.yaml")]
    ).trainer
    tracker = next(
        callback for callback in trainer.callbacks if isinstance(callback, CUDAMemoryTracker)
    )
    assert (tracker.every_n_steps, tracker.reset_peaks, tracker.time_share) == (
        5,
        False,
        float("inf"),
    )
    assert (tracker.report, tracker.per_unit) == ("memory.html", True)
    assert (
        next(
            callback for callback in trainer.callbacks if isinstance(callback, StepTimer)
        ).every_n_steps
        == 5
    )


# ---- on a GPU
# -------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.gpu
def test_out_of_memory_on_the_gpu(tmp_path):
    class Bursting(Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                torch.empty(2**42, dtype=torch.uint8, device=self.device)
            return super().training_step(batch, batch_idx)

    tracker = CUDAMemoryTracker(table=False, history_entries=1000)
    with pytest.raises(torch.OutOfMemoryError):
        fit(tracker, tmp_path=tmp_path, model=Bursting(), accelerator="gpu", devices=1)
    (report,) = tracker.oom_reports
    assert report.wanted >= 2**42 and report.phase == "forward" and report.largest_free is not None
    assert Path(report.snapshot_path).stat().st_size > 0


def cublas_workspaces():
    """Bytes that a forward and a backward, each in a thread of its own, leave with cuBLAS until a
    run ends.
    """
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    torch.nn.Linear(64, 64, device="cuda")(torch.ones(8, 64, device="cuda")).sum().backward()
    found = torch.cuda.memory_allocated() - before
    torch._C._cuda_clearCublasWorkspaces()
    return found


@needs_cuda
@pytest.mark.gpu
def test_peaks_by_phase_on_the_gpu(tmp_path):
    """Every phase uses an amount of its own above what is allocated around it."""

    class Using(Model):
        def use(self, size):
            torch.empty(size * MIB, dtype=torch.uint8, device=self.device)

        def training_step(self, batch, batch_idx):
            self.use(200)
            return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            self.use(300)

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            self.use(100)

        def validation_step(self, batch, batch_idx):
            self.use(500)

    tracker = CUDAMemoryTracker(table=False, time_share=None)
    options = {
        "accelerator": "gpu",
        "devices": 1,
        "limit_val_batches": 1,
        "val_check_interval": 3,
        "num_sanity_val_steps": 0,
    }
    workspaces, before = cublas_workspaces(), torch.cuda.memory_allocated()
    fit(tracker, tmp_path=tmp_path, model=Using(), **options)
    state = (
        sum(tracker.run_spreads[f"memory/{category}_gib"].high for category in CATEGORIES)
        * GIB
        / MIB
    )
    for phase, used in (
        ("forward", 200),
        ("backward", 300),
        ("optimizer", 100),
        ("validation", 500),
    ):
        peak = tracker.run_spreads[f"memory/peak_{phase}_gib"].high * GIB / MIB - before / MIB
        # activations and the batch
        assert used <= peak <= used + state + workspaces / MIB + 16, phase
