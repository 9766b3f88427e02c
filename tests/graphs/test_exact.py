"""A captured run is the eager run, bit by bit, in everything that Lightning promises."""

from array import array

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from helpers.recorded import CLASSES, Net, assert_same, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.memory_ledger import measure


def half():
    # Its first steps overflow, and are skipped.
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3))]


BY_VALUE = {"gradient_clip_algorithm": "value"}
CASES = {
    "plain": ({}, {}),
    "accumulation, clipping by value": ({}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01, **BY_VALUE}),
    "ragged last batch": ({"batch_size": 8}, {"accumulate_grad_batches": 4, "max_epochs": 5}),
    "validation in the middle, double": ({}, {"val_check_interval": 3, "accumulate_grad_batches": 2, "precision": "64-true"}),
    "momentum, scheduler, clipping by norm": ({"optimizer": "sgd", "scheduled": True}, {"gradient_clip_val": 0.1}),
    "bf16-mixed, activation checkpointing": ({"checkpointed": True}, {"precision": "bf16-mixed"}),
    "16-mixed": ({}, {"plugins": half, "gradient_clip_val": 0.1}),
}


class Counting(CUDAGraphStep):
    """Knows how often it replayed."""

    def on_train_end(self, trainer, pl_module):
        self.replays, self.captured = self._runner.replays, self._runner.captured
        super().on_train_end(trainer, pl_module)


@pytest.mark.parametrize("case", CASES)
def test_a_captured_run_is_the_eager_run(case):
    arguments, options = CASES[case]
    reference = fit(Net(**arguments), **options)
    callback = Counting(software=True)
    mine = fit(Net(**arguments), callback, **options)
    assert callback.replays >= 5
    assert callback.captured == 1  # a shape that comes once an epoch, as that of a ragged last batch, never is
    assert_same_run(mine, reference)


ON_ZERO3 = ["accumulation, clipping by value", "ragged last batch", "bf16-mixed, activation checkpointing"]


@pytest.mark.parametrize("case", ON_ZERO3)
def test_zero3_on_one_rank_too(case):
    arguments, options = CASES[case]
    reference = fit(Net(**arguments), **options, strategy=Zero3Strategy())
    callback = Counting(software=True, strict=True)
    mine = fit(Net(**arguments), callback, **options, strategy=Zero3Strategy())
    assert callback.replays >= 5
    assert_same_run(mine, reference)


class TwoHeads(Net):
    """Batches of another length, which each second one has, have a head of their own."""

    def __init__(self):
        super().__init__(batch_size=8)
        self.other = nn.Linear(16, CLASSES)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.turn = self.trainer.training and not getattr(self, "turn", False)
        return batch if self.turn or not self.trainer.training else {name: value[:4] for name, value in batch.items()}

    def forward(self, x):
        return (self.head if len(x) == 8 else self.other)(self.net(x))


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_shapes_train_layers_of_their_own(strategy):
    reference = fit(TwoHeads(), strategy=strategy, max_epochs=6)
    callback = Counting(software=True, strict=True)
    mine = fit(TwoHeads(), callback, strategy=strategy, max_epochs=6)
    assert callback.captured == 2
    assert_same_run(mine, reference)


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return self(batch["x"])

    predict_dataloader = Net.val_dataloader


def _predictions(strategy, *callbacks):
    """What a run predicts after two epochs, and after two more."""
    run = fit(Predicts(), *callbacks, strategy=strategy)
    early = run.trainer.predict(run.module)
    run.trainer.fit_loop.max_epochs = 4
    run.trainer.fit(run.module)
    return early, run.trainer.predict(run.module)


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_prediction_runs_eagerly_beside_it(strategy):
    mine, reference = _predictions(strategy, CUDAGraphStep(software=True, strict=True)), _predictions(strategy)
    assert len(mine[0]) == len(mine[1]) == 11
    assert_same(mine, reference)


def test_the_program_of_a_step_runs_until_the_capture_and_at_the_start_of_each_epoch():
    module, calls = Net(), array("q")  # what holds lists would be noticed to change
    step = module.training_step
    module.training_step = lambda batch, batch_idx: calls.append(batch_idx) or step(batch, batch_idx)
    fit(module, CUDAGraphStep(software=True, warmup=3, strict=True))
    assert list(calls) == [0, 1, 2, 3, 0]


def test_checkpoints_are_the_same_and_resume_to_the_same(tmp_path):
    def save(name):
        return ModelCheckpoint(tmp_path / name, every_n_train_steps=7, save_top_k=-1, filename="{step}")

    def run(*callbacks, **options):
        return fit(Net(scheduled=True), *callbacks, accumulate_grad_batches=2, **options)

    run(save("eager"), enable_checkpointing=True)
    run(save("graph"), CUDAGraphStep(software=True), enable_checkpointing=True)
    eager, graph = (torch.load(tmp_path / name / "step=7.ckpt", weights_only=False) for name in ("eager", "graph"))
    for each in (eager, graph):
        each.pop("callbacks")  # paths
    assert_same(graph, eager, "checkpoint")
    path = str(tmp_path / "graph" / "step=7.ckpt")
    callback = Counting(software=True)
    assert_same_run(run(callback, max_epochs=4, ckpt_path=path), run(max_epochs=4, ckpt_path=path))
    assert callback.replays > 20


class Ledger(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self.found = measure(trainer, pl_module, "cpu")


def test_the_memory_trackers_ledger_counts_static_inputs():
    ledger = Ledger()
    fit(Net(), ledger, CUDAGraphStep(software=True), max_epochs=1)
    assert ledger.found["graph_inputs"] == 4 * 12 * 4 + 4 * 8  # a batch of 4 rows of 12 floats, and their labels


def test_after_a_fit_everything_is_as_before():
    callback = CUDAGraphStep(software=True)
    run = fit(Net(), callback)
    strategy = run.trainer.strategy
    assert "training_step" not in vars(strategy) and "backward" not in vars(strategy.precision_plugin)
    assert "log" not in vars(run.module)
    run.trainer.fit_loop.max_epochs = 4
    run.trainer.fit(run.module)
    reference = fit(Net())
    reference.trainer.fit_loop.max_epochs = 4
    reference.trainer.fit(reference.module)
    assert_same(run.module.state_dict(), reference.module.state_dict())
