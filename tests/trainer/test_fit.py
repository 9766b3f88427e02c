"""What a LightningModule can call while it trains, validates, tests and predicts, and the ways to
launch it.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MeanMetric

from helpers.models import Lit, NormNet, Recipe, TinyLm, make, part, signals, tokens
from helpers.parity import (
    RTOL,
    assert_tensors_close,
    fit_here,
    full_state,
    local_gradients,
    trainer,
    zero3,
)
from helpers.ranks import run_ranks

WORLD_SIZES = [1, 2, 3, 4]


# ---- evaluation ------------------------------------------------------------------------------


def strategy_for(kind):
    return zero3() if kind == "zero3" else kind


def evaluate(rank, world_size, kind):
    """All four loops, before and after training, with one Trainer each."""
    module = Lit(Recipe(steps=3), local_gradients if kind == "auto" else lambda module: {})
    found = {}
    for when in ("before", "after"):
        if when == "after":
            trainer(strategy_for(kind), world_size, limit_val_batches=2).fit(module)
        runner = trainer(strategy_for(kind), world_size, limit_val_batches=1.0)
        (found[when, "validate"],) = runner.validate(module, verbose=False)
        (found[when, "test"],) = runner.test(module, verbose=False)
        found[when, "predict"] = torch.stack(runner.predict(module))
        again = trainer(strategy_for(kind), world_size, limit_val_batches=1.0)
        found[when, "predict again"] = torch.stack(again.predict(module))
    return found


@cache
def evaluated_alone():
    return evaluate(0, 1, "auto")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_fit_validate_test_predict(world_size):
    reference = evaluated_alone()
    assert reference["before", "test"]["val_loss"] > reference["after", "test"]["val_loss"] + 0.01
    everyone = run_ranks(evaluate, world_size, "zero3", timeout=60)
    for key, expected in reference.items():
        if key[1].startswith("predict"):
            joined = torch.cat([run[key] for run in everyone], 1)
            assert_tensors_close(joined, expected)
        else:
            for run in everyone:
                assert run[key] == pytest.approx(expected, rel=RTOL)


class LeavesOut(Lit):
    """Every second micro-batch, which Lightning allows on one rank: the optimizer does not step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


def leave_out(rank, world_size, strategy):
    fitted = trainer(strategy, world_size, max_epochs=2)
    fitted.fit(LeavesOut(Recipe(optimizer="adamw"), lambda module: {}))
    return fitted.global_step, full_state(fitted)


def test_a_step_without_a_loss_on_one_rank():
    (steps, expected), (ours, state) = (
        run_ranks(leave_out, 1, strategy)[0] for strategy in ("auto", "zero3")
    )
    assert ours == steps > 0 and state.keys() == expected.keys()
    for name, value in expected.items():
        assert_tensors_close(state[name], value)


# ---- what modules call -----------------------------------------------------------------------


class Talkative(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make(TinyLm)
        self.accuracy = Accuracy("multiclass", num_classes=13)
        self.mean = MeanMetric()
        self.seen = {}

    def training_step(self, batch, batch_idx):
        loss = self.net.loss(batch)
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log(
            "sum",
            float(self.global_rank + batch_idx),
            sync_dist=True,
            reduce_fx="sum",
            on_epoch=True,
        )
        self.log("max", float(self.global_rank), sync_dist=True, reduce_fx="max", on_epoch=True)
        self.log("own", float(self.global_rank))
        self.log("zero only", 5.0, rank_zero_only=True)
        self.mean(loss.detach())
        self.log("metric", self.mean, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.accuracy(self.net(inputs).flatten(0, 1), targets.flatten())
        self.log("accuracy", self.accuracy)

    def on_train_epoch_end(self):
        rank, world_size = self.global_rank, self.trainer.world_size
        strategy = self.trainer.strategy
        mine = torch.tensor([float(rank), 1.0])
        self.print("printed once")
        strategy.barrier()
        strategy.barrier("named")
        self.seen = {
            # Clones: like that of ddp, it works in place.
            "sum": strategy.reduce(mine.clone(), reduce_op="sum").tolist(),
            "mean": strategy.reduce(mine.clone()).tolist(),
            "not a tensor": strategy.reduce(3.5),
            "all_gather": self.all_gather(mine).tolist(),
            "all_gather dict": self.all_gather({"x": rank, "y": [mine]})["x"].tolist(),
            "broadcast": strategy.broadcast({"from": rank, "tensor": mine}, src=world_size - 1)[
                "from"
            ],
            "broadcast from 0": strategy.broadcast(f"rank {rank}"),
            "one says yes": (
                strategy.reduce_boolean_decision(rank == 0, all=True),
                strategy.reduce_boolean_decision(rank == 0, all=False),
            ),
            "all say yes": strategy.reduce_boolean_decision(True, all=True),
            "none says yes": strategy.reduce_boolean_decision(False, all=False),
            "who": (
                rank,
                world_size,
                self.local_rank,
                strategy.is_global_zero,
                self.trainer.is_global_zero,
            ),
        }
        x = torch.ones(2, requires_grad=True)
        (self.all_gather(x, sync_grads=True) * (rank + 1)).sum().backward()
        self.seen["all_gather gradient"] = x.grad.tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(
            [part(b, self.global_rank, self.trainer.world_size) for b in tokens(3)], batch_size=None
        )

    val_dataloader = train_dataloader


def talk(rank, world_size, kind):
    module = Talkative()
    runner = trainer(strategy_for(kind), world_size, limit_val_batches=1.0)
    runner.fit(module)
    return module.seen, {name: value.item() for name, value in runner.callback_metrics.items()}


@cache
def talked_alone():
    return talk(0, 1, "auto")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_logging_and_communication(world_size, capsys):
    everyone = run_ranks(talk, world_size, "zero3", timeout=60)
    assert capsys.readouterr().out.count("printed once") == 1
    ddp = run_ranks(talk, world_size, "ddp", timeout=60)
    _, alone = talked_alone()
    total = world_size * (world_size - 1) / 2
    for rank, (seen, metrics) in enumerate(everyone):
        assert seen == {
            "sum": [total, world_size],
            "mean": [total / world_size, 1.0],
            "not a tensor": 3.5,
            "all_gather": (
                [[float(r), 1.0] for r in range(world_size)]
                if world_size > 1
                else seen["all_gather"]
            ),
            "all_gather dict": (
                list(range(world_size)) if world_size > 1 else seen["all_gather dict"]
            ),
            "broadcast": world_size - 1,
            "broadcast from 0": "rank 0",
            "one says yes": (world_size == 1, True),
            "all say yes": True,
            "none says yes": False,
            "who": (rank, world_size, rank, rank == 0, rank == 0),
            "all_gather gradient": seen["all_gather gradient"],
        }
        assert seen == ddp[rank][0]
        assert metrics == pytest.approx(ddp[rank][1], rel=RTOL)
        # Means over the joined batch are the means over ranks; sums count every rank.
        for name in ("mean", "mean_step", "mean_epoch", "metric", "metric_epoch", "accuracy"):
            assert metrics.get(name) == pytest.approx(alone.get(name), rel=RTOL)
        assert metrics["accuracy"] > 0
        assert metrics["sum"] == pytest.approx(
            sum(r + step for r in range(world_size) for step in range(3))
        )
        assert metrics["max"] == world_size - 1
        assert metrics["own"] == rank


# ---- buffers ---------------------------------------------------------------------------------


class Buffered(pl.LightningModule):
    def __init__(self, rank):
        super().__init__()
        self.net = make(NormNet)
        self.register_buffer("start", torch.full((3,), float(rank)))
        self.register_buffer("transient", torch.full((2,), float(rank)), persistent=False)
        self.found = {}

    def training_step(self, batch, batch_idx):
        return self.net.loss(batch)

    def on_train_start(self):
        self.found["at start"] = (self.start.tolist(), self.transient.tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(
            [part(b, self.global_rank, self.trainer.world_size) for b in signals(3)],
            batch_size=None,
        )


def run_buffers(rank, world_size):
    module = Buffered(rank)
    trainer(zero3(unit_policy=None), world_size).fit(module)
    norm = module.net.input_norm
    return {
        **module.found,
        "mean": norm.running_mean,
        "var": norm.running_var,
        "count": norm.num_batches_tracked,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_are_rank_0s(world_size):
    for found in run_ranks(run_buffers, world_size, timeout=60):
        assert found["at start"] == ([0.0] * 3, [0.0] * 2)
        # The first norm sees the data as it is: its statistics are those of rank 0's part, as under
        # ddp.
        mean, var = torch.zeros(3), torch.ones(3)
        for x, _ in (part(batch, 0, world_size) for batch in signals(3)):
            mean = 0.9 * mean + 0.1 * x.mean((0, 2))
            var = 0.9 * var + 0.1 * x.var((0, 2))
        torch.testing.assert_close(found["mean"], mean)
        torch.testing.assert_close(found["var"], var)
        assert found["count"] == 3


# ---- launches --------------------------------------------------------------------------------

RECIPE = Recipe(steps=4)

SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import lightning_zero3
from helpers.models import Lit, Recipe
from helpers.parity import full_state, trainer
from helpers.ranks import meet_only_where_nobody_else_can

def no_gradients(module):
    return {{}}

if {strategy!r} == "zero3":
    meet_only_where_nobody_else_can()

def main():
    module = Lit(Recipe(steps=4), no_gradients)
    runner = trainer({strategy!r}, 2)
    runner.fit(module)
    state = full_state(runner) if module.losses else module.state_dict()
    out = {{"losses": module.losses, "world_size": runner.world_size, "pid": os.getpid(), "rank": runner.global_rank}}
    out["port"] = os.environ.get("MASTER_PORT")
    out["state"] = {{name: value.tolist() for name, value in state.items()}}
    with open({folder!r} + "/" + str(runner.global_rank) + ".json", "w") as file:
        json.dump(out, file)

if __name__ == "__main__":
    main()
"""


@cache
def launched_alone():
    return fit_here(RECIPE, "auto", 1, {})


def launch(folder, strategy):
    script = folder / "script.py"
    script.write_text(
        SCRIPT.format(
            tests=str(Path(__file__).resolve().parents[1]), strategy=strategy, folder=str(folder)
        )
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )
    return run, [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What the processes of each strategy wrote: beside each other, as most of their time is
    starting.
    """
    strategies = ("zero3", "zero3_spawn")
    folders = map(tmp_path_factory.mktemp, strategies)
    with ThreadPoolExecutor(len(strategies)) as pool:
        done = dict(zip(strategies, pool.map(launch, folders, strategies), strict=True))
    assert not any(run.returncode for run, _ in done.values()), [
        (run.stdout, run.stderr) for run, _ in done.values()
    ]
    return {strategy: wrote for strategy, (_, wrote) in done.items()}


def test_processes_that_run_the_script(launched):
    """Started by the first one; those that torchrun starts train in `faults/test_elastic.py`."""
    ranks = launched["zero3"]
    assert [(r["rank"], r["world_size"]) for r in ranks] == [(0, 2), (1, 2)]
    assert ranks[0]["pid"] != ranks[1]["pid"]
    alone = launched_alone()
    means = [sum(step) / 2 for step in zip(*(r["losses"] for r in ranks), strict=True)]
    assert means == pytest.approx(alone.losses, rel=RTOL)
    state = {
        name.removeprefix("net."): torch.tensor(value) for name, value in ranks[0]["state"].items()
    }
    assert_tensors_close(state, alone.state)
    assert ranks[1]["state"] == {}


def test_spawned_processes_give_the_weights_back(launched):
    """The process that called `fit` did not train, but has the trained weights afterwards."""
    (parent,) = launched["zero3_spawn"]
    assert parent["losses"] == [] and not parent["port"]  # another fit gets a port of its own
    state = {
        name.removeprefix("net."): torch.tensor(value) for name, value in parent["state"].items()
    }
    assert_tensors_close(state, launched_alone().state)
