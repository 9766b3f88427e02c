"""A captured run and an eager run are the same, in everything that Lightning promises."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from helpers import recorded
from helpers.one_line import Small, train
from helpers.recorded import CLASSES, Counting, Frees, Net, assert_same, assert_same_run, fit, half
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep, CUDAMemoryTracker
from lightning_zero3.callbacks.memory.figures import GIB

pytestmark = pytest.mark.usefixtures("device")


def epochs():
    return 19 if recorded.DEVICE == "cuda" else 2  # 209 steps, where they are fast


BY_VALUE = {"gradient_clip_algorithm": "value"}
CASES = {
    "plain": ({}, {"max_epochs": epochs}),
    "accumulation, clipping by value": (
        {},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.01, **BY_VALUE},
    ),
    "ragged last batch": ({"batch_size": 8}, {"accumulate_grad_batches": 4, "max_epochs": 5}),
    "validation in the middle, double": (
        {},
        {"val_check_interval": 3, "accumulate_grad_batches": 2, "precision": "64-true"},
    ),
    "momentum, scheduler, clipping by norm": (
        {"optimizer": "sgd", "scheduled": True},
        {"gradient_clip_val": 0.1},
    ),
    "bf16-mixed, activation checkpointing": ({"checkpointed": True}, {"precision": "bf16-mixed"}),
    "16-mixed": ({}, {"plugins": half, "gradient_clip_val": 0.1}),
}


@pytest.mark.parametrize("strategy", ["auto", Zero3Strategy], ids=["one device", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_a_captured_run_is_the_eager_run(case, strategy):
    arguments, options = CASES[case]
    reference = fit(Net(**arguments), Frees(), strategy=strategy, **options)
    callback = Counting(software=True, strict=True)
    mine = fit(Net(**arguments), callback, Frees(), strategy=strategy, **options)
    assert callback.replays >= 5
    # a shape that comes once an epoch, as that of a ragged last batch, never is
    assert callback.captured == 1
    assert_same_run(mine, reference)


class TwoHeads(Net):
    """Batches of another length, which each second one has, have a head of their own."""

    def __init__(self):
        super().__init__(batch_size=8)
        self.other = nn.Linear(16, CLASSES)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.turn = self.trainer.training and not getattr(self, "turn", False)
        return (
            batch
            if self.turn or not self.trainer.training
            else {name: value[:4] for name, value in batch.items()}
        )

    def forward(self, x):
        return (self.head if len(x) == 8 else self.other)(self.net(x))


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_shapes_train_layers_of_their_own(strategy):
    reference = fit(TwoHeads(), strategy=strategy, max_epochs=6)
    callback = Counting(software=True, strict=True)
    mine = fit(TwoHeads(), callback, strategy=strategy, max_epochs=6)
    assert callback.captured == 2
    assert_same_run(mine, reference)


class Attention(nn.Module):
    """Of a batch to itself, with a mask: in an eager fp32 step on a GPU the seed of its dropout
    lies on the host.
    """

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x):  # [batch, 16]
        query, key, value = self.projection(x).view(1, len(x), 2, 24).transpose(1, 2).chunk(3, -1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
        dropout = 0.1 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        return mixed.transpose(1, 2).reshape(x.shape)


class Attends(Net):
    def __init__(self):
        super().__init__(batch_size=8)
        self.net[2] = Attention()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_attention_with_a_mask_and_dropout(precision):
    callback = Counting(software=True, strict=True)
    mine = fit(Attends(), callback, precision=precision, max_epochs=3)
    assert callback.replays >= 5
    assert_same_run(mine, fit(Attends(), precision=precision, max_epochs=3))


def pads(self, batch, batch_idx, loss):
    packed = batch["p"]
    hidden, lengths = pad_packed_sequence(packed._replace(data=self.layer(packed.data)))
    return loss + hidden[-1].square().sum()  # of those that are the longest


def test_packed_sequences_of_other_lengths_are_other_shapes():
    def batch(*lengths):
        return {"x": torch.randn(4, 3), "p": pack_sequence([torch.randn(n, 3) for n in lengths])}

    batches = [batch(*lengths) for lengths in ((3, 3, 1), (3, 2, 2)) * 6]
    mine, reference, callback = Small(pads, batches), Small(pads, batches), Counting(software=True)
    train(mine, callback, max_epochs=3)
    train(reference, max_epochs=3)
    assert callback.captured == 2 and callback.replays > 10
    assert_same(mine.state_dict(), reference.state_dict())


class RunsAgain(Net):
    """Its optimizer runs each step several times, and a validation runs a step of training."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.training_step(batch, batch_idx)["loss"])


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_a_step_that_runs_again_in_its_micro_batch_or_in_a_validation_is_eager_then(strategy):
    callback = Counting(software=True, strict=True)
    mine = fit(RunsAgain(), callback, strategy=strategy, max_epochs=3)
    assert callback.replays == 3 * 11 - 3 - 3 - 2
    assert_same_run(mine, fit(RunsAgain(), strategy=strategy, max_epochs=3))


class KeepsSums(Net):
    """Writes into tensors that are no buffers: in an attribute, in a dict, in a namespace."""

    def __init__(self):
        super().__init__()
        zeros = torch.zeros(CLASSES, device=recorded.DEVICE)
        self.confusion, self.averages = zeros, {"scores": zeros.clone()}
        self.kept, self.read = SimpleNamespace(largest=zeros.clone()), []

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        scores = output["scores"].detach()
        self.confusion.scatter_add_(0, scores.argmax(1), torch.ones_like(scores[:, 0]))
        self.averages["scores"].mul_(0.9).add_(scores.mean(0))
        self.kept.largest.data.add_(scores.amax(0))
        return output

    def on_train_epoch_end(self):
        kept = self.confusion, self.averages["scores"], self.kept.largest
        self.read.append([tensor.clone() for tensor in kept])


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_tensors_that_a_step_writes_into_are_written_once_in_a_micro_batch(strategy):
    callback = Counting(software=True, strict=True)
    mine = fit(KeepsSums(), callback, strategy=strategy)
    reference = fit(KeepsSums(), strategy=strategy)
    assert callback.replays > 10
    assert_same(mine.module.read, reference.module.read)
    assert_same_run(mine, reference)


class PrintsAtTheEnd(Net):
    """Of the last batch of an epoch, which is smaller: no graph holds that."""

    def training_step(self, batch, batch_idx):
        if len(batch["x"]) < self.batch_size:
            print("the last batch", batch["x"].sum().item())
        return super().training_step(batch, batch_idx)


def test_what_a_shape_does_that_is_never_captured_is_no_problem_of_others(capsys):
    callback = Counting(software=True, strict=True)
    mine = fit(PrintsAtTheEnd(batch_size=8), callback, max_epochs=5)
    assert callback.replays > 10 and capsys.readouterr().out.count("the last batch") == 5
    assert_same_run(mine, fit(PrintsAtTheEnd(batch_size=8), max_epochs=5))


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return self(batch["x"])

    predict_dataloader = Net.val_dataloader


def _predictions(strategy, *callbacks):
    """What a run predicts after two epochs, and after two more."""
    run = fit(Predicts(), *callbacks, strategy=strategy)
    early = run.trainer.predict(run.module)
    run.go_on(max_epochs=4)
    return early, run.trainer.predict(run.module)


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_prediction_runs_eagerly_beside_it(strategy):
    callback = Counting(software=True, strict=True)
    mine, reference = _predictions(strategy, callback), _predictions(strategy)
    assert callback.replays > 5
    assert len(mine[0]) == len(mine[1]) == 11
    assert_same(mine, reference)


def test_the_program_of_a_step_runs_until_it_is_verified_and_at_the_start_of_each_epoch():
    module, calls = Net(), array("q")
    step = module.training_step
    module.training_step = lambda batch, batch_idx: (
        calls.append(batch_idx) or step(batch, batch_idx)
    )
    fit(module, CUDAGraphStep(software=True, warmup=3, verify=2, strict=True))
    assert list(calls) == [0, 1, 2, 3, 4, 5, 0]  # eager, captured, verified


def test_checkpoints_are_the_same_and_resume_to_the_same(tmp_path):
    def save(name):
        return ModelCheckpoint(
            tmp_path / name, every_n_train_steps=7, save_top_k=-1, filename="{step}"
        )

    def run(*callbacks, **options):
        return fit(Net(scheduled=True), *callbacks, accumulate_grad_batches=2, **options)

    callback = Counting(software=True)
    run(save("eager"), enable_checkpointing=True)
    run(save("graph"), callback, enable_checkpointing=True)
    assert callback.replays > 10
    eager, graph = (
        torch.load(tmp_path / name / "step=7.ckpt", weights_only=False)
        for name in ("eager", "graph")
    )
    for each in (eager, graph):
        each.pop("callbacks")  # paths
    assert_same(graph, eager, "checkpoint")
    path = str(tmp_path / "graph" / "step=7.ckpt")
    assert_same_run(run(callback, max_epochs=4, ckpt_path=path), run(max_epochs=4, ckpt_path=path))
    assert callback.replays > 20


@pytest.mark.parametrize("tracker_first", [True, False])
def test_the_memory_tracker_counts_static_inputs(tracker_first):
    tracker, graphs = CUDAMemoryTracker(table=False), CUDAGraphStep(software=True)
    fit(Net(), *((tracker, graphs) if tracker_first else (graphs, tracker)), max_epochs=1)
    found = tracker.run_spreads["memory/graph_inputs_gib"].high * GIB
    assert found == 4 * 12 * 4 + 4 * 8  # a batch of 4 rows of 12 floats, and their labels
    assert graphs.graph_input_nbytes == 0  # a later run of this trainer has none


def test_views_of_weights_are_looked_for_while_there_are_no_graphs():
    """The engine of `zero3` knows whether there are."""
    known = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            known.append(trainer.strategy.engine.pool.is_captured)
            if trainer.global_step == 8:
                pl_module.net[3].p = 0.05

    mine = fit(Net(), CUDAGraphStep(software=True, strict=True), Looks(), strategy="zero3")
    # The fourth and, as a number changes, the 13th are captured; the first of an epoch is the 12th.
    eager = [*range(3), *range(8, 8 + 4)]
    assert [k for k, is_captured in enumerate(known) if not is_captured] == eager
    assert not mine.trainer.strategy.engine.pool.is_captured


def test_after_a_fit_everything_is_as_before():
    callback = Counting(software=True)
    mine = fit(Net(), callback)
    first, strategy = callback.replays, mine.trainer.strategy
    assert "training_step" not in vars(strategy) and "backward" not in vars(
        strategy.precision_plugin
    )
    assert "log" not in vars(mine.module)
    reference = fit(Net())
    for run in (mine, reference):
        torch.manual_seed(13)
        run.go_on(max_epochs=4)
    # Of 22 micro-batches: three are watched before the capture, three after it are verified, and
    # the first of the second epoch.
    assert first == callback.replays == 15
    assert_same_run(mine, reference)
