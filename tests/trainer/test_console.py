"""What a run prints by default: the lines of `ddp`, less those that tell nobody anything."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

SCRIPT = """
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import lightning_zero3


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_index):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_index):
        self.log("loss", self.net(batch).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


if __name__ == "__main__":
    pl.seed_everything(1)
    module, callbacks = Model(), []
    if sys.argv[2:]:
        from lightning_zero3.callbacks import (
            AllocatorConfig, CUDABackendConfig, CUDAGraphStep, CUDAMemoryTracker, ModelExport, StepTimer
        )
        module.example_input_array = torch.ones(2, 4)
        module.forward = module.net.forward
        callbacks = [AllocatorConfig(expandable_segments=True), CUDABackendConfig(tf32_matmul=True),
                     CUDAMemoryTracker(report="memory.html"), StepTimer(), ModelExport(every="end"), CUDAGraphStep(software=True)]
    runner = pl.Trainer(strategy=sys.argv[1], devices=2, accelerator="cpu", max_epochs=2, callbacks=callbacks)
    data = DataLoader(torch.ones(8, 4), batch_size=2)
    runner.fit(module, data, data)
    runner.validate(module, data)
    runner.test(module, data)
"""


LATE = "Not all of 2 ranks have come"  # told after 20 s, which a busy machine takes to start


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """How often each line was printed, by strategy; progress bars left out."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    found = {}
    for together in (("zero3", "ddp"), ("zero3 callbacks",)):
        processes = {
            strategy: subprocess.Popen(
                [sys.executable, "script.py", *strategy.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env=environ,
            )
            for strategy in together
        }
        for strategy, process in processes.items():
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            # of warnings the text, without the line of the program that follows
            lines = [re.sub(r"^/\S+:\d+: ", "", line.rstrip()) for line in output.splitlines()]
            found[strategy] = Counter(
                re.sub(r"\d+\.\d+", "NUMBER", line)
                for line in lines
                if line
                and not line.startswith(("  ", LATE))
                and "━" not in line
                and "─" not in line
            )
    return found


def test_one_line_is_ours(printed):
    ours = printed["zero3"] - printed["ddp"]
    assert len(ours) == 1, ours
    [(line, count)] = ours.items()
    assert line.startswith("zero3: 2 ranks on 1 node, gloo, by ") and count == 1
    assert line.endswith("; 1 unit") and len(line) < 80


def test_lines_of_ddp_that_are_missing(printed):
    """They are from every rank, or about samples that `ddp` evaluates twice."""
    missing = printed["ddp"] - printed["zero3"]
    expected = ["Initializing distributed", "-----", "distributed_backend", "All distributed proc"]
    expected += ["Using `DistributedSampler` with the dataloaders"]
    assert all(line.startswith(tuple(expected)) for line in missing), missing


def test_callbacks_add_no_warning(printed):
    """And their lines fit into 80 columns, but for those of Lightning, and of long paths."""
    added = printed["zero3 callbacks"] - printed["zero3"]
    assert not [line for line in added if "Warning" in line or "deprecated" in line], added
    names = ("AllocatorConfig", "CUDABackendConfig", "CUDAMemoryTracker", "CUDAGraphStep", "peak")
    for name in (*names, "ModelExport"):
        assert any(line.startswith(name) for line in added), name
    assert [line for line, n in added.items() if n > 1 and line.startswith(names)] == []
    wide = [line for line in added if len(line) > 80 and not line.startswith(("💡", "Model"))]
    assert wide == []
