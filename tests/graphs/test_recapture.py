"""What makes a captured step out of date is noticed, and leads to a capture of the new one: never to a wrong number."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from helpers.recorded import Net, assert_same_run, fit
from lightning_zero3.callbacks import CUDAGraphStep


class At(Callback):
    """Does something to the module at one batch."""

    def __init__(self, change, step=9):
        self.change, self.step = change, step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.change(pl_module)


class Watching(CUDAGraphStep):
    def on_train_end(self, trainer, pl_module):
        self.recaptures, self.captured = self._runner.recaptures, self._runner.captured
        self.replays = self._runner.replays
        super().on_train_end(trainer, pl_module)


def unfreeze(module):
    module.frozen.requires_grad_(True)


def freeze(module):
    module.net[0].weight.requires_grad_(False)


def less_dropout(module):
    module.net[3].p = 0.05


def no_training_mode(module):
    module.net[1].eval()


def other_memory(module):
    module.head.weight.data = module.head.weight.data * 0.5


def other_activation(module):
    module.net[2] = nn.SiLU()


def hook(module):
    module.head.register_forward_hook(lambda m, args, output: output * 0.5)


def replaced_buffer(module):
    module.net[1].running_mean = module.net[1].running_mean + 1


CHANGES = [unfreeze, freeze, less_dropout, no_training_mode, other_memory, other_activation, hook, replaced_buffer]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_module_leads_to_a_new_capture(change):
    callback = Watching(software=True, strict=True)
    mine = fit(Net(optimizer="sgd"), callback, At(change), limit_val_batches=0)
    assert (callback.recaptures, callback.captured) == (1, 1) and callback.replays > 10
    assert_same_run(mine, fit(Net(optimizer="sgd"), At(change), limit_val_batches=0))


def in_place(module):
    module.load_state_dict({k: v * 0.9 for k, v in module.state_dict().items()})


def other_rate(module):
    module.trainer.optimizers[0].param_groups[0]["lr"] = 0.003


def other_accumulation(module):
    module.trainer.accumulate_grad_batches = 2


def cleared(module):
    module.zero_grad()


def own_counter(module):
    module.seen = getattr(module, "seen", 0) + 1


@pytest.mark.parametrize("change", [in_place, other_rate, other_accumulation, cleared, own_counter], ids=lambda f: f.__name__)
def test_a_change_that_graphs_follow_needs_no_new_capture(change):
    callback = Watching(software=True, strict=True)
    mine = fit(Net(), callback, At(change), limit_val_batches=0)
    assert callback.recaptures == 0
    assert_same_run(mine, fit(Net(), At(change), limit_val_batches=0))


class Annealed(Net):
    """A number that lives where no guard looks, and changes from epoch to epoch."""

    weights = {"loss": 1.0}

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * self.weights["loss"]}

    def on_train_epoch_start(self):
        self.weights["loss"] = 1.0 / (1 + self.trainer.current_epoch)


def test_a_number_that_changes_with_the_epoch_is_found_in_its_first_step():
    callback = Watching(software=True, strict=True)
    mine = fit(Annealed(), callback, max_epochs=3, limit_val_batches=0)
    assert callback.recaptures == 2
    assert_same_run(mine, fit(Annealed(), max_epochs=3, limit_val_batches=0))


class Restless(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[3].p = 0.1 + 0.3 * torch.rand(()).item()


def test_a_step_that_keeps_changing_ends_in_eager_steps():
    with pytest.warns(UserWarning, match="not the same|A Python number that changes|went out of date"):
        mine = fit(Restless(), CUDAGraphStep(software=True))
    assert_same_run(mine, fit(Restless()))
