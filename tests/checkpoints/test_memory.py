"""What saving and loading cost in memory: the growth of a process's own pages, as the kernel counts
them, against the bounds.
"""

import ctypes
import json
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.callbacks import ModelExport
from lightning_zero3.strategies.checkpoints.consolidate import consolidate

WIDTH, DEPTH, MIB = 640, 12, 2**20
UNIT = 4 * WIDTH * (WIDTH + 1)  # bytes: fp32 weight and bias of a layer
MODEL = DEPTH * UNIT
SLACK = (
    14 * MIB
    # Python's objects, pickles, blocks of files that are read; with all of the model and Adam's
    # state: 56 MiB
)


class Model(LightningModule):
    def __init__(self, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.width, self.layers = width, self.make_layers(width)

    def make_layers(self, width):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def train_dataloader(self):
        return DataLoader(torch.ones(4, self.width))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def anonymous():
    """Bytes of pages that are no file's and that no other process shares."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def growth(into, name):
    """Note by how much the process grows at most, looked at all the time."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(
        -3,
        2**17,
        # M_MMAP_THRESHOLD, which else grows: what is freed is the kernel's again at once, and not
        # counted
    )
    libc.malloc_trim(0)  # else it would grow into memory that training gave back
    before, peak, over = anonymous(), [0], threading.Event()

    def look():
        while not over.wait(0.0005):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        peak[0] = max(peak[0], anonymous())
        over.set()
        thread.join()
        into[name] = max(0, peak[0] - before)


class Save(Callback):
    def __init__(self, found, name, folder):
        self.found, self.name, self.path = found, name, f"{folder}/{name}.ckpt"

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            with growth(self.found, self.name):
                trainer.save_checkpoint(self.path)
                trainer.strategy.finish_saving()


def save(rank, world_size, folder):
    found = {}
    kinds = {"background": {"background": True}, "file": {}, "sharded": {"kind": "sharded"}}
    for name, options in kinds.items():
        strategy = zero3(unit_policy=["Linear"], checkpoint=CheckpointOptions(**options))
        trainer(strategy, world_size, callbacks=[Save(found, name, folder)]).fit(Model())
    ledger = strategy.memory_ledger()
    return found, ledger["parameters"] + ledger["optimizer_state"]


def read(rank, world_size, folder):
    found = {}
    with growth(found, "consolidate"):
        consolidate(Path(folder, "sharded.ckpt"), Path(folder, "one.ckpt"))
    return found


class OnMeta(Model):
    """A model four times as large, without memory until its shards are read from a folder."""

    def __init__(self, folder):
        with torch.device("meta"):
            super().__init__(2 * WIDTH)
        self.folder = folder

    def configure_model(self):
        self.trainer.strategy.load_weights(self.folder)


class UntilFitStarts(Callback):
    def __init__(self, found):
        self.found, self.stack = found, ExitStack()

    def setup(self, trainer, module, stage):
        self.stack.enter_context(growth(self.found, "load"))

    def on_fit_start(self, trainer, module):
        self.stack.close()
        self.found |= trainer.strategy.memory_ledger()


def load(rank, world_size, folder):
    found = {}
    # What a first run imports is not the folder's.
    for module, callbacks in ((Model(8), []), (OnMeta(folder), [UntilFitStarts(found)])):
        strategy = zero3(unit_policy=["Linear"])
        trainer(strategy, world_size, callbacks=callbacks).fit(module)
    return found


@pytest.mark.variant
def test_loading_a_folder_needs_memory_for_shards_and_a_unit(tmp_path):
    """As Hugging Face writes it: several files, and an index of them."""
    state = Model(2 * WIDTH).state_dict()
    unit = sum(state[f"layers.0.{name}"].nbytes for name in ("weight", "bias"))
    files = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    index = {name: files[number % 2] for number, name in enumerate(state)}
    for file in files:
        save_file({n: t for n, t in state.items() if index[n] == file}, tmp_path / file)
    Path(tmp_path, "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for found in run_ranks(load, 2, str(tmp_path), timeout=60):
        shards = found["parameters"]  # beside them, training's own buffers are made at set-up
        assert 0.49 * DEPTH * unit < shards < 0.51 * DEPTH * unit
        assert found["load"] - found["unsharded_units"] - found["reduce_buffer"] <= shards + unit


def test_bounds(tmp_path):
    for found, shards in run_ranks(save, 2, str(tmp_path), timeout=150):
        assert 1.4 * MODEL < shards < 1.6 * MODEL
        assert found["file"] <= UNIT + SLACK
        assert found["sharded"] <= UNIT + SLACK
        assert shards / 2 < found["background"] <= shards + SLACK, "more than one copy, or none"
    [found] = run_ranks(read, 1, str(tmp_path), timeout=100)
    assert found["consolidate"] <= 2 * UNIT + SLACK


class Exported(Model):
    """A model four times as large."""

    def __init__(self):
        super().__init__(2 * WIDTH)
        self.example_input_array = torch.ones(2, 2 * WIDTH)

    def forward(self, x):
        return self.layers(x)


class Export(ModelExport):
    """Notes what its parts cost."""

    def __init__(self, found, **options):
        super().__init__(every="end", **options)
        self.found = found

    def prepare(self, runner):
        with growth(self.found, "check"):
            super().prepare(runner)

    def export(self, runner):
        with growth(self.found, "weights"):
            super().export(runner)


def export(rank, world_size, folder):
    found = {}
    with tempfile.NamedTemporaryFile(suffix=".pt2") as file:  # what is imported is not the model's
        program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
        torch.export.save(program, file.name)
    strategy = zero3(unit_policy=["Linear"])
    callbacks = [Export(found, dirpath=folder)]
    trainer(strategy, world_size, callbacks=callbacks).fit(Exported())
    return found


def test_exporting_holds_less_than_a_unit_beside_the_shards(tmp_path):
    unit = 4 * 2 * WIDTH * (2 * WIDTH + 1)
    for found in run_ranks(export, 2, tmp_path):
        assert max(found["check"], found["weights"]) < unit + SLACK, found
    assert (tmp_path / "model.pt2").stat().st_size > DEPTH * unit > 3 * (unit + SLACK)
