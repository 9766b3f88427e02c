"""Ray Train makes the processes and their group, and its environment says which is which; workers
die, hosts go and come, and the run goes on with the next sample.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from checkpoints.runs import full_weights
from helpers.parity import assert_same_tensors, assert_tensors_close, trainer, zero3
from helpers.ranks import run_ranks
from trainer import ray_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_train.py"

SCRIPT = """
import sys
import lightning.pytorch as pl, ray, torch
import lightning_zero3
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment
from ray.train.torch import TorchConfig, TorchTrainer

def train(config):
    sys.path.insert(0, config["tests"])
    from trainer.test_ray import Counts
    for name, plugins in (("end", [RayLightningEnvironment()]), ("group", None)):
        runner = pl.Trainer(
            devices="auto", accelerator="cpu", strategy="zero3", plugins=plugins,
            max_epochs=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        )
        runner.fit(Counts())
        world = runner.strategy.world
        assert (runner.world_size, world.local_world_size, world.num_nodes) == (2, 2, 1)
        runner.save_checkpoint(f"{config['folder']}/{name}.ckpt")

if __name__ == "__main__":
    tests, folder = sys.argv[1:]
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"tests": tests, "folder": folder},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=folder),
    ).fit()
"""


class Counts(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
        )

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return DataLoader(
            torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=4
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(rank, world_size):
    runner = trainer(
        zero3(unit_policy=None), world_size, max_epochs=2, use_distributed_sampler=True
    )
    runner.fit(Counts())
    return full_weights(runner)


def run(folder, program, *arguments, timeout=280):
    """Run a program in ``folder``; return what it and its workers said."""
    pytest.importorskip("ray", reason="pip install 'ray[train]'")
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=folder,
        env={**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_two_workers_train_as_two_processes(tmp_path):
    Path(tmp_path, "script.py").write_text(SCRIPT)
    run(tmp_path, "script.py", str(Path(__file__).parents[1]), str(tmp_path))
    (whole, _) = run_ranks(train, 2, timeout=60)
    for name in ("end", "group"):  # who is who is the plugin's, and the process group's
        found = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"]
        assert_same_tensors(found, whole)


def undisturbed(rank, world_size):
    runner = trainer(
        "zero3", world_size, max_epochs=ray_program.EPOCHS, use_distributed_sampler=True
    )
    runner.fit(module := ray_program.Counts())
    losses = [loss for _, _, loss in module.said]
    return {name: value.clone() for name, value in module.state_dict().items()}, losses


def last_attempts(folder):
    """Step -> number of ranks, all ranks' samples and mean loss, in the last attempt at it."""
    lines = [json.loads(x) for file in folder.glob("said.*") for x in file.read_text().splitlines()]
    found = {}
    for step in sorted({line["step"] for line in lines}):
        attempts = {}
        for line in lines:
            if line["step"] == step:
                attempts.setdefault(line["attempt"], []).append(line)
        last = sorted(attempts[max(attempts)], key=lambda line: line["rank"])
        assert [line["rank"] for line in last] == list(range(last[0]["ranks"]))
        samples = [sample for line in last for sample in line["samples"]]
        found[step] = len(last), samples, sum(line["loss"] for line in last) / len(last)
    return found


@pytest.mark.parametrize("name", ["killed", "elastic"])
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_the_next_sample(tmp_path, name):
    said = run(tmp_path, ray_program.__file__, str(tmp_path), name, timeout=590)
    steps = last_attempts(tmp_path)
    per_epoch = ray_program.SAMPLES // ray_program.BATCH
    for epoch in range(ray_program.EPOCHS):
        samples = [s for k in range(per_epoch) for s in steps[epoch * per_epoch + k][1]]
        assert sorted(samples) == list(range(ray_program.SAMPLES))
    (whole, first), (_, second) = run_ranks(undisturbed, 2, timeout=60)
    losses = [sum(pair) / 2 for pair in zip(first, second, strict=True)]
    assert [steps[k][2] for k in range(12)] == pytest.approx(losses, rel=1e-5)
    (end, *others) = [torch.load(file) for file in sorted(tmp_path.glob("end.*"))]
    for other in others:
        assert_same_tensors(other, end)
    found = [steps[k][0] for k in range(12)]
    if name == "killed":
        assert found == [2] * 12
        assert_same_tensors(end, whole)
        assert "Rank 1 died without a word" in said  # of the other worker, and in Ray's error
    else:
        # A checkpoint counts when Ray has heard of it, which may be after the next one.
        assert found[0] == found[-1] == 2 and found[5:8] == [1, 1, 1] and found[8:] == [2] * 4
        assert_tensors_close(end, whole)
    metrics, kept = json.loads((tmp_path / "result").read_text())
    assert metrics == {"epoch": 1, "step": 12} and kept == ["checkpoint_000000012"]
    assert [x.name for x in (tmp_path / "run").glob("checkpoint_0*")] == kept


def test_the_example(tmp_path):
    said = run(tmp_path, EXAMPLE)
    begun = re.findall(r"a worker begins with (\S+)", said)
    assert begun[0] == "None" and begun[-1] in ("checkpoint_000000005", "checkpoint_000000010")
    assert "Rank 1 died without a word" in said
    assert "ended at step 20; checkpoints: checkpoint_000000015, checkpoint_000000020" in said
