"""What makes a captured step out of date is noticed, and leads to a capture of the new one: never
to a wrong number.
"""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader

from helpers import recorded
from helpers.recorded import CLASSES, Counting, Net, assert_same_run, fit
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

pytestmark = pytest.mark.usefixtures("device")


class Does(Callback):
    """Changes something at some steps."""

    def __init__(self, changes, every=6):
        self.changes = {5 + every * k: change for k, change in enumerate(changes)}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        change = self.changes.pop(trainer.global_step, None)
        if change is not None:
            change(pl_module)


class HasRate(Net):
    lr = 0.01

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


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


def assigned(module):
    """Other parameters, of which the optimizer is told."""
    state = {
        name: value * 0.9 if value.is_floating_point() else value.clone()
        for name, value in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    [optimizer] = module.trainer.optimizers
    optimizer.param_groups[0]["params"] = list(module.parameters())
    optimizer.state.clear()


def other_activation(module):
    module.net[2] = nn.SiLU()


def another_layer(module):
    module.net.append(nn.Tanh())


def checkpointing(module):
    module.checkpointed = True


def other_dtype(module):
    module.head.weight.data = module.head.weight.data.double().float()


def hook(module):
    module.head.register_forward_hook(lambda m, args, output: output * 0.5)


def replaced_buffer(module):
    module.net[1].running_mean = module.net[1].running_mean + 1


CHANGES = [
    [unfreeze, less_dropout, other_activation, hook, freeze],
    [checkpointing, other_memory, no_training_mode, replaced_buffer, another_layer],
    [other_dtype, assigned],
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes[0].__name__)
def test_a_change_of_the_module_leads_to_a_new_capture(changes):
    callback, options = (
        Counting(software=True, strict=True),
        {"limit_val_batches": 0, "max_epochs": 4},
    )
    mine = fit(Net(optimizer="sgd"), callback, Does(changes), **options)
    assert (callback.recaptures, callback.captured) == (len(changes), 1) and callback.replays > 10
    assert_same_run(mine, fit(Net(optimizer="sgd"), Does(changes), **options))


def shift(value):
    return torch.full((CLASSES,), value, device=recorded.DEVICE)


class Settings(Net):
    """Computes with numbers, tensors and functions that are kept in all kinds of places."""

    gamma = 1.0

    def __init__(self):
        super().__init__(optimizer="sgd")
        self.save_hyperparameters({"beta": 1.0})
        self.weights, self.config, self.activation = (
            [1.0, 2.0],
            SimpleNamespace(delta=1.0),
            torch.tanh,
        )
        self.shift, self.shifts = shift(0.0), [shift(0.0)]

    def forward(self, x):
        scores = (
            self.activation(super().forward(x)) * self.weights[0] * self.hparams.beta
            + self.shift
            + self.shifts[0]
        )
        scores = scores * (self.later if hasattr(self, "later") else 1.0)
        return scores * self.config.delta * self.gamma


SETTINGS = [
    [
        lambda m: m.weights.__setitem__(0, 0.5),
        lambda m: m.hparams.update(beta=0.5),
        lambda m: setattr(m.config, "delta", 0.5),
        lambda m: setattr(m, "activation", torch.sigmoid),
        lambda m: setattr(m, "shift", shift(1.0)),
    ],
    [
        lambda m: m.shifts.__setitem__(0, shift(1.0)),
        lambda m: setattr(type(m), "gamma", 0.5),
        lambda m: setattr(m, "later", 0.5),
    ],
]


def fit_settings(changes, *callbacks):
    """And leave nothing behind."""
    module = Settings()
    try:
        return fit(module, *callbacks, Does(changes), limit_val_batches=0, max_epochs=4)
    finally:
        Settings.gamma = 1.0


@pytest.mark.parametrize("changes", SETTINGS, ids=["attributes", "settings"])
def test_what_a_step_computes_with_is_noticed_wherever_it_is_kept(changes):
    callback = Counting(software=True, strict=True)
    mine = fit_settings(changes, callback)
    assert (callback.recaptures, callback.captured) == (len(changes), 1) and callback.replays > 10
    assert_same_run(mine, fit_settings(changes))


class Kinds(Net):
    """The first batch of an epoch has another shape; batches hold constants that are equal and not
    the same.
    """

    constants = (True, 1, 1.0, 0.0, -0.0)

    def training_step(self, batch, batch_idx):
        output = super().training_step({k: batch[k] for k in "xy"}, batch_idx)
        loss = output["loss"] * self.trainer.factor if len(batch["x"]) == 4 else output["loss"]
        return {
            "loss": loss,
            "of": torch.ones(2, dtype=torch.int64, device=self.device) * batch["constant"],
            "inverse": 1 / (loss * 0 * batch["constant"]),
        }

    def on_train_epoch_start(self):
        self.trainer.factor = 1.0 / (1 + self.trainer.current_epoch)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)

        def batch(rows, constant):
            return {
                "x": torch.randn(rows, 12, generator=generator),
                "y": torch.arange(rows),
                "constant": constant,
            }

        return DataLoader(
            [batch(3, 1), *(batch(4, c) for c in self.constants for _ in range(5))], batch_size=None
        )


def test_every_shape_is_looked_at_in_each_epoch_and_constants_are_told_apart():
    options = {"limit_val_batches": 0, "max_epochs": 3}
    callback = Counting(software=True, strict=True, max_graphs=6)
    mine = fit(Kinds(), callback, **options)
    assert callback.recaptures == 2 and callback.replays > 10
    assert_same_run(mine, fit(Kinds(), **options))


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


def optimizer_state(module):
    module.trainer.optimizers[0].load_state_dict(module.trainer.optimizers[0].state_dict())


def test_changes_that_graphs_follow_need_no_new_capture():
    changes = [in_place, other_rate, optimizer_state, cleared, own_counter, other_accumulation]
    callback, options = (
        Counting(software=True, strict=True),
        {"limit_val_batches": 0, "max_epochs": 3},
    )
    mine = fit(Net(), callback, Does(changes, every=3), **options)
    assert (callback.recaptures, callback.captured) == (0, 1) and callback.replays > 8
    assert_same_run(mine, fit(Net(), Does(changes, every=3), **options))


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


LIGHTNINGS = {
    "schedules": lambda: [
        Thaw(),
        GradientAccumulationScheduler({1: 2}),
        EMAWeightAveraging(decay=0.9),
    ],
    "averages": lambda: [
        StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
        LearningRateFinder(num_training_steps=8),
    ],
    "batch size": lambda: [BatchSizeFinder("power", steps_per_trial=2, init_val=2, max_trials=2)],
    "pruning": lambda: [
        ModelPruning("l1_unstructured", [], amount=0.5, use_lottery_ticket_hypothesis=False)
    ],
}


@pytest.mark.parametrize("case", LIGHTNINGS)
def test_beside_lightnings_own_callbacks(case, tmp_path):
    callback, options = (
        Counting(software=True),
        {"limit_val_batches": 0, "max_epochs": 3, "default_root_dir": tmp_path},
    )
    mine, reference = (
        fit(HasRate(), *LIGHTNINGS[case](), *extra, **options) for extra in ([callback], [])
    )
    assert callback.replays > 5 or case == "pruning"  # which computes its weights anew in hooks
    assert_same_run(mine, reference)


class Annealed(Net):
    """A number that changes from epoch to epoch."""

    weights = {"loss": 1.0}

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * self.weights["loss"]}

    def on_train_epoch_start(self):
        self.weights["loss"] = 1.0 / (1 + self.trainer.current_epoch)


def test_a_number_that_changes_with_the_epoch_is_noticed():
    callback = Counting(software=True, strict=True)
    # each capture pays
    options = {
        "max_epochs": 8,
        "limit_val_batches": 0,
    }
    mine = fit(Annealed(batch_size=2), callback, **options)
    assert callback.recaptures == 7
    assert_same_run(mine, fit(Annealed(batch_size=2), **options))


class Scaled(Net):
    """A hook of the backward, which on a GPU runs in a thread of autograd's, reads a number."""

    alpha = 1.0

    def forward(self, x):
        scores = super().forward(x)
        if scores.requires_grad:
            scores.register_hook(lambda gradient: gradient * self.alpha)
        return scores


def other_alpha(module):
    module.alpha = 0.5


def test_a_number_that_a_backward_reads():
    callback = Counting(software=True, strict=True)
    mine = fit(Scaled(), callback, Does([other_alpha]))
    assert callback.recaptures == 1 and callback.replays > 8
    assert_same_run(mine, fit(Scaled(), Does([other_alpha])))


class Restless(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.net[3].p = 0.1 + 0.3 * torch.rand(()).item()


def test_a_step_that_keeps_changing_ends_in_eager_steps():
    callback = Counting(software=True)
    with pytest.warns(UserWarning, match=r"went out of date 6 times.* `net\.3\.p` changed"):
        mine = fit(Restless(), callback, max_epochs=3)
    assert callback.replays == 6  # each in the step of its capture
    assert_same_run(mine, fit(Restless(), max_epochs=3))


class NeverTheSame(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step % 3 == 0:  # after each capture
            pl_module.net[3].p = 0.1 + 0.001 * trainer.global_step


def test_a_step_that_changes_after_each_capture_is_given_up():
    message = (
        "Its graphs went out of date 6 times, each time before they had paid; the last time,"
        " `net.3.p` changed"
    )
    with pytest.raises(GraphCaptureError, match=message):
        fit(Net(), NeverTheSame(), Counting(software=True, strict=True, warmup=2), max_epochs=3)
