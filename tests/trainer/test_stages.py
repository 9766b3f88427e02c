"""The watch in every stage: it names what one rank does alone, and by the stage that the user called."""

import re
import time
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import DivergenceError, WatchOptions


class Model(pl.LightningModule):
    """Runs ``act`` on one rank alone in one hook."""

    def __init__(self, hook="", act=None):
        super().__init__()
        self.net, self.mean = nn.Linear(4, 1), MeanMetric()
        if hook:
            setattr(self, hook, lambda *_: act(self))

    def training_step(self, batch, batch_index):
        self.mean.update(batch)
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_index):
        self.mean.update(self.net(batch))

    def test_step(self, batch, batch_index):
        self.mean.update(self.net(batch))

    def predict_step(self, batch, batch_index):
        self.mean.update(self.net(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def run(world_size, stage, hook, act):
    strategy = zero3(unit_policy=["Linear"], watch=WatchOptions(slow=3))
    runner = trainer(strategy, world_size, limit_val_batches=1.0)
    loader = DataLoader(torch.ones(4, 4), batch_size=1)
    loaders = [loader, loader] if stage == "fit" else [loader]
    getattr(runner, stage)(Model(hook, act), *loaders)


def compute_alone(module):
    if module.trainer.is_global_zero:
        module.mean.compute()


def meet_alone(module):
    if module.trainer.is_global_zero:
        dist.barrier()


def wait(rank, world_size, stage, hook, act):
    run(world_size, stage, hook, act)


@pytest.mark.parametrize(
    "stage, hook, act, where",
    [
        ("validate", "on_validation_epoch_end", compute_alone, r"validation, between batches .*"),
        (
            "fit",
            "on_validation_epoch_end",
            compute_alone,
            r"validation, between batches .*, step 3",
        ),
        ("test", "on_test_epoch_end", meet_alone, r"test, between batches .*"),
        pytest.param(
            *("predict", "on_predict_epoch_end", meet_alone, r"predict, between batches .*"),
            marks=pytest.mark.variant,
        ),
        pytest.param(
            *("fit", "on_train_epoch_end", compute_alone, r"the loop between steps .*, step 3"),
            marks=pytest.mark.variant,
        ),
    ],
)
def test_a_collective_of_one_rank_is_told(stage, hook, act, where, capsys):
    with pytest.raises(AssertionError) as error:
        run_ranks(wait, 2, stage, hook, act, timeout=60)
    output = f"{error.value}{capsys.readouterr().out}"
    told = next(line for line in output.splitlines() if "for ever: " in line)
    rank_0 = rf"rank 0 (is )?in {where} \(.*test_stages.py:\d+ in {act.__name__}\)"
    assert re.search(rank_0, told), told
    assert re.search(rf"rank 1 (is )?in {where} \(.*test_stages.py:\d+ in run\)", told), told
    if hook != "on_train_epoch_end":  # where ranks wait on, and are told so
        assert ('`ckpt_path="last"`' in output) == (stage == "fit")


def doze(module):
    if module.global_rank == 1:
        time.sleep(6)


def be_slow(rank, world_size, stage, hook):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(world_size, stage, hook, doze)
    return [str(warning.message) for warning in told]


def told_of_slow(stage, hook):
    said = run_ranks(be_slow, 2, stage, hook, timeout=90)[0]
    return next((text for text in said if "holds the others up" in text), "")


def test_a_slow_rank_of_a_test_is_named():
    told = told_of_slow("test", "on_test_batch_end")
    assert told.startswith("Rank 1 ") and "most often in test, between" in told
    assert "step" not in told.replace("test_stages", "")


def test_a_rank_that_is_slow_before_its_first_batch_is_named():
    told = told_of_slow("fit", "on_train_epoch_start")  # where the loop asks for the first batch
    assert told.startswith("Rank 1 ") and "most often in the loop between steps (loading" in told
    assert "it is at step 0 now" in told


def fail(rank, world_size):
    run(world_size, "validate", "on_validation_batch_end", lambda module: 1 // module.global_rank)


def test_errors_of_an_evaluation_name_its_stage(capsys):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_ranks(fail, 2, timeout=60)
    output = capsys.readouterr().out
    assert "Rank 0 raised 'ZeroDivisionError" in output and "in validation, between" in output
    assert "set-up" not in output and "`ckpt_path" not in output


def stop_alone(rank, world_size, hook):
    def stop(module):
        if module.global_rank == 1:
            module.trainer.should_stop = True

    module = Model(hook, stop)
    runner = trainer(zero3(unit_policy=["Linear"]), world_size, max_epochs=3, limit_val_batches=1.0)
    loader = DataLoader(torch.ones(4, 4), batch_size=1)
    runner.fit(module, loader, loader)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_epoch_end"])
def test_ranks_that_decide_differently_about_stopping(hook):
    with pytest.raises(AssertionError) as error:
        run_ranks(stop_alone, 2, hook, timeout=60)
    text = str(error.value)
    said = re.findall(r"In step \d: The ranks run different things: .*", text)
    assert said and all(" rank 1 " in line for line in said)
    assert "`should_stop` by a rank's own data" in text


def run_alone(rank, world_size):
    def forward(module):
        if module.global_rank == 0:
            module.net(torch.ones(4))

    with pytest.raises(DivergenceError) as error:
        run(world_size, "fit", "on_train_batch_end", forward)
    return str(error.value).splitlines(), forward.__code__.co_firstlineno + 2


def test_an_error_is_what_happened_what_to_do_and_where_this_rank_is():
    for rank, (lines, number) in enumerate(run_ranks(run_alone, 2, timeout=60)):
        assert re.match(
            f"In step \\d: The ranks .* rank {rank} is about to .*, rank {1 - rank} to ", lines[0]
        )
        assert lines[1].startswith("All ranks must") and max(map(len, lines[:2])) < 300
        # rank 1 is in Lightning's loop
        assert lines[2:] == [f"Rank 0 is at {__file__}:{number} in forward."][rank:]
