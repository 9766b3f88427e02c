"""Callbacks of Lightning's that own weights or param groups: interrupted, resumed, and their files
read by other strategies.
"""

import pickle
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from helpers.models import Lit, Recipe
from helpers.parity import assert_tensors_close, full_state, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.adapters.lightning_callbacks import adapt
from lightning_zero3.strategies.checkpoints.consolidate import consolidate

EPOCHS, RESUME_AFTER = 4, 1


class Backbone(Lit):
    """A model of which one half is frozen at first."""

    def __init__(self, recipe):
        super().__init__(recipe, lambda module: {})
        self.backbone = self.net.blocks

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.net.loss(batch).item())


SGD = Recipe(steps=2, pass_frozen=False)
ADAM = Recipe(steps=2, pass_frozen=False, optimizer="adamw")
KINDS = {
    "average": (SGD, WeightAveraging),
    "ema": (ADAM, lambda: EMAWeightAveraging(decay=0.8)),
    "swa": (
        SGD,
        lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2),
    ),
    "finetuning": (ADAM, lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1)),
    "pruning": (
        ADAM,
        lambda: ModelPruning(
            "l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=lambda epoch: epoch < 1
        ),
    ),
}


# Statistics are each rank's own: two ranks of ddp are the reference.
NORM = Recipe(steps=2, net="norm")
NORM_KINDS = {
    "average": (NORM, WeightAveraging),
    "average of weights": (NORM, lambda: WeightAveraging(use_buffers=False)),
    "swa": (NORM, lambda: StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)),
}


def sharded(recipe):
    return zero3(unit_policy=["Block"] if recipe.net == "lm" else None)


def fit_all(rank, world_size, strategy, folder, read=None, kinds=KINDS, val_batches=1):
    """Losses and final weights of every kind of run, from the start or from the files in
    ``read``.
    """
    found = {}
    for kind, (recipe, callback) in kinds.items():
        module = Backbone(recipe) if recipe.net == "lm" else Lit(recipe, lambda module: {})
        saver = ModelCheckpoint(folder / kind, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        runner = trainer(
            sharded(recipe) if strategy == "zero3" else strategy,
            world_size,
            max_epochs=EPOCHS,
            callbacks=[callback(), saver],
            enable_checkpointing=True,
            limit_val_batches=val_batches,
        )
        runner.fit(
            module, ckpt_path=None if read is None else read / kind / f"epoch={RESUME_AFTER}.ckpt"
        )
        average = getattr(runner.callbacks[0], "_average_model", None)
        if strategy == "zero3" and average is not None:
            assert sum(p.numel() for p in average.parameters()) == sum(
                c.values.numel() for u in runner.strategy.engine.units for c in u.chunks
            )
        state = full_state(runner)
        found[kind] = module.losses, {k: v.clone() for k, v in state.items()}
    return found


def in_one(*args):
    return run_ranks(fit_all, 1, "auto", *args)


def in_two(*args):
    return run_ranks(fit_all, 2, "zero3", *args)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    one, two, rest, joined = folder / "one", folder / "two", folder / "rest", folder / "joined"
    whole = in_one(one), in_two(two)
    for kind in KINDS:  # one device is to read it
        consolidate(
            two / kind / f"epoch={RESUME_AFTER}.ckpt", joined / kind / f"epoch={RESUME_AFTER}.ckpt"
        )
    return {
        "whole": whole,
        "one rank": (in_one(rest), run_ranks(fit_all, 1, "zero3", rest)),
        "resumed": (in_one(rest, one), in_two(rest, two)),
        "the other's file": (in_one(rest, one), in_two(rest, one)),
        "our file": (in_one(rest, one), in_one(rest, joined)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", ["whole", "one rank", "resumed", "the other's file", "our file"])
def test_as_in_one_process(run, kind, runs):
    expected, found = runs[run]
    losses, state = expected[0][kind]
    assert len(losses) >= 3 * (EPOCHS - RESUME_AFTER - 1)
    mean = sum(torch.tensor(rank[kind][0]) for rank in found) / len(found)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert_tensors_close(found[0][kind][1], state)


def fit_tickets(rank, world_size, strategy, **options):
    """Weights of a run whose ranks initialize other values each."""
    module = Backbone(ADAM)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(rank)
    tickets = ModelPruning("l1_unstructured", amount=0.2, **options)
    runner = trainer(
        sharded(ADAM) if strategy == "zero3" else strategy, world_size, callbacks=[tickets]
    )
    runner.fit(module)
    return {name: value.clone() for name, value in full_state(runner).items()}


def resample_tickets(rank, world_size, strategy):
    def fill(layer):
        torch.nn.init.constant_(layer.weight, 7.0 + rank)
        if layer.bias is not None:  # else whatever was in the memory
            torch.nn.init.zeros_(layer.bias)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.nn.Linear, "reset_parameters", fill)
        return fit_tickets(rank, world_size, strategy, resample_parameters=True)


def test_a_lottery_ticket_starts_from_the_values_of_rank_0():
    (expected,) = run_ranks(fit_tickets, 1, "auto")
    found, *_ = run_ranks(fit_tickets, 2, "zero3")
    assert any((value == 0).any() for value in expected.values())
    assert_tensors_close(found, expected)
    (expected,) = run_ranks(resample_tickets, 1, "auto")
    found, *_ = run_ranks(resample_tickets, 2, "zero3")
    assert any((value == 7).any() for value in expected.values())
    assert_tensors_close(found, expected)


class FindsRatesLater(LearningRateFinder):
    def on_fit_start(self, runner, module):
        pass

    def on_train_epoch_start(self, runner, module):
        if runner.current_epoch == 1:
            self.before = [p.detach().clone() for p in module.parameters()]
            self.lr_find(runner, module)
            self.after = [p.detach().clone() for p in module.parameters()]


def find_rates_beside_an_average(rank, world_size):
    """The finder saves a checkpoint, and restores it, inside of a run."""
    finder = FindsRatesLater(num_training_steps=3, update_attr=False, early_stop_threshold=None)
    callbacks = [EMAWeightAveraging(decay=0.9), finder]
    runner = trainer(sharded(ADAM), world_size, max_epochs=2, callbacks=callbacks)
    module = Backbone(ADAM)
    module.lr = 0.01
    runner.fit(module)
    assert_tensors_close(dict(enumerate(finder.after)), dict(enumerate(finder.before)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_that_is_restored_inside_of_a_run_restores_the_average(world_size):
    run_ranks(find_rates_beside_an_average, world_size)


def fit_norms(rank, world_size, strategy, folder, val_batches):
    return fit_all(rank, world_size, strategy, folder, kinds=NORM_KINDS, val_batches=val_batches)


@pytest.mark.parametrize("val_batches", [0, 1])
def test_buffers_are_averaged_as_by_ddp(val_batches, tmp_path):
    """Without a validation, which clears gradients, SWA's last epoch, without backward, steps on
    those of the one before.
    """
    expected, *_ = run_ranks(fit_norms, 2, "ddp", tmp_path / "ddp", val_batches)
    found, *_ = run_ranks(fit_norms, 2, "zero3", tmp_path / "zero3", val_batches)
    for kind, (_, state) in expected.items():
        assert any("running_mean" in name for name in state)
        assert_tensors_close(found[kind][1], state, where=kind)


class Tells(ModelCheckpoint):
    def on_exception(self, trainer, pl_module, exception):
        self.told = exception


class Masked(torch.nn.Module):
    """Names that look like those of torch's pruning."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.w_orig = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("w", torch.ones(1))


def test_nothing_is_gathered_or_agreed_on_where_nothing_is_done():
    saver = Tells()
    pruning = ModelPruning(
        "l1_unstructured", apply_pruning=False, use_lottery_ticket_hypothesis=False
    )
    adapt([saver, pruning])
    nothing = SimpleNamespace(strategy=None)
    saver.on_exception(nothing, None, error := ValueError())
    assert saver.told is error
    module = Masked()
    pruning.setup(nothing, module, "validate")
    pruning._run_pruning(0)
    checkpoint = {"state_dict": dict(module.state_dict())}
    pruning.on_save_checkpoint(nothing, module, checkpoint)
    assert checkpoint["state_dict"].keys() == module.state_dict().keys()


class Rounds(pl.LightningModule):
    """Weights, many of which are the same in bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(64, 64)
        torch.nn.init.uniform_(self.layer.weight, 1.0, 1.1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 64), batch_size=1)


def prune_repeatedly(rank, world_size, strategy, precision):
    module = Rounds()
    pruning = ModelPruning(
        "l1_unstructured",
        [(module.layer, "weight")],
        amount=0.3,
        use_global_unstructured=False,
        make_pruning_permanent=False,
    )
    trainer(strategy, world_size, max_epochs=3, precision=precision, callbacks=[pruning]).fit(
        module
    )
    return module.layer.weight_mask


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_masks_are_of_the_weights_in_full_precision(precision):
    expected, *_ = run_ranks(prune_repeatedly, 2, "ddp", precision)
    assert 0.3 < expected.mean() < 0.4
    for mask in run_ranks(prune_repeatedly, 2, "zero3", precision):
        assert torch.equal(mask, expected)


class OwnAverage(StochasticWeightAveraging):
    """A user's own."""


def test_adapted_callbacks_are_pickled_as_the_classes_that_the_user_wrote():
    callbacks = [ModelCheckpoint(save_top_k=-1), OwnAverage(swa_lrs=0.1)]
    adapt(callbacks)
    restored = pickle.loads(pickle.dumps(callbacks))
    assert [type(callback) for callback in restored] == [ModelCheckpoint, OwnAverage]
    assert restored[0].save_top_k == -1 and vars(restored[1]).keys() == vars(callbacks[1]).keys()


class KeepsItsCallback(pl.LightningModule):
    """`save_hyperparameters` puts the callback into every checkpoint."""

    def __init__(self, callback):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 1)
        self.callback = callback

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def train_dataloader(self):
        return torch.ones(2, 2)

    def configure_callbacks(self):
        return [self.callback]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_checkpoint_holds_a_callback_among_the_hyperparameters(tmp_path):
    callback = ModelCheckpoint(tmp_path, filename="a", save_top_k=-1)
    strategy = zero3(unit_policy=["Linear"])
    run = trainer(strategy, max_steps=1, enable_checkpointing=True)
    run.fit(KeepsItsCallback(callback))
    content = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert type(content["hyper_parameters"]["callback"]) is ModelCheckpoint


CALLED = []


class OwnEma(EMAWeightAveraging):
    def setup(self, *args, **kwargs):
        CALLED.append("EMA's setup")
        super().setup(*args, **kwargs)

    def on_load_checkpoint(self, *args):
        CALLED.append("EMA's on_load_checkpoint")
        super().on_load_checkpoint(*args)


class OwnSwa(StochasticWeightAveraging):
    """An average of its own, transferred by half."""

    def setup(self, *args, **kwargs):
        CALLED.append("SWA's setup")
        super().setup(*args, **kwargs)

    @staticmethod
    def update_parameters(average, model, count, average_function):
        StochasticWeightAveraging.update_parameters(average, model, count + 2, average_function)

    @staticmethod
    def transfer_weights(source, target):
        for mine, theirs in zip(source.parameters(), target.parameters(), strict=True):
            theirs.detach().lerp_(mine.detach(), 0.5)


class OwnPruning(ModelPruning):
    def on_save_checkpoint(self, *args):
        CALLED.append("pruning's on_save_checkpoint")
        super().on_save_checkpoint(*args)

    def apply_pruning(self, amount):
        super().apply_pruning(amount / 2)


OWN_KINDS = {
    "plain swa": KINDS["swa"],
    "ema": (ADAM, lambda: OwnEma(decay=0.8)),
    "swa": (SGD, lambda: OwnSwa(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=2)),
    "pruning": (
        ADAM,
        lambda: OwnPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False),
    ),
}


def fit_own(rank, world_size, strategy, folder):
    CALLED.clear()
    first = fit_all(rank, world_size, strategy, folder / "first", None, OWN_KINDS)
    resumed = fit_all(rank, world_size, strategy, folder / "then", folder / "first", OWN_KINDS)
    return first, resumed, sorted(set(CALLED))


def test_what_a_user_overrides_is_called(tmp_path):
    *expected, overrides = run_ranks(fit_own, 1, "auto", tmp_path / "one")[0]
    assert len(overrides) == 4
    state, plain = (expected[0][kind][1] for kind in ("swa", "plain swa"))
    assert not torch.allclose(*(next(iter(values.values())) for values in (state, plain)))
    everyone = run_ranks(fit_own, 2, "zero3", tmp_path / "two")
    assert all(called == overrides for *_, called in everyone)
    for run, references in enumerate(expected):
        for kind, (losses, state) in references.items():
            mean = sum(torch.tensor(rank[run][kind][0]) for rank in everyone) / 2
            torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
            assert_tensors_close(everyone[0][run][kind][1], state)
