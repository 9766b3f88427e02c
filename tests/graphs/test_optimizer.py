"""The optimizer's update as a second graph: exact with schedulers and clipping, and refused by name
where it cannot be.
"""

import sys

import pytest
import torch
from lightning.pytorch import Callback

from helpers import recorded
from helpers.recorded import Net, assert_same_run, fit, half
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs import optimizer
from lightning_zero3.callbacks.graphs.fingerprint import state_of
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

pytestmark = pytest.mark.usefixtures("device")


class Stepped(Net):
    """With an optimizer and a scheduler to try."""

    def __init__(self, make, schedule=None, **arguments):
        super().__init__(**arguments)
        self.make, self.schedule = make, schedule

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


class Counting(CUDAGraphStep):
    def on_train_end(self, trainer, pl_module):
        self.updates = [optimizer.replays for optimizer in self._runner.parts[1:]]
        super().on_train_end(trainer, pl_module)
        assert "step" not in vars(trainer.optimizers[0]) or hasattr(
            trainer.optimizers[0].step, "_wrapped_by_lr_sched"
        )


class At(Callback):
    def __init__(self, step, change):
        self.step, self.change = step, change

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.change(trainer.optimizers[0])


def rate():
    return torch.tensor(0.01, device=recorded.DEVICE)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=rate(), weight_decay=0.1, fused=True, capturable=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=rate(), momentum=0.9, fused=True)


def capturable(parameters):
    return torch.optim.Adam(parameters, lr=rate(), capturable=True)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=200, cycle_momentum=False
    )


def load_own_state(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def more_decay(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.2


def both_ways(callback, arguments, *callbacks, **options):
    reference = fit(Stepped(*arguments, batch_size=8), *callbacks, **options)
    mine = fit(Stepped(*arguments, batch_size=8), callback, *callbacks, **options)
    assert_same_run(mine, reference)


@pytest.mark.parametrize("strategy", ["auto", Zero3Strategy], ids=["one device", "zero3"])
def test_an_update_in_a_graph_follows_schedules_accumulation_and_clipping(strategy):
    callback = Counting(software=True, strict=True, optimizer=True)
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 4}
    both_ways(callback, (adamw, cosine), strategy=strategy, **options)
    assert callback.updates[0] > 8  # of 12


def test_fused_optimizers_that_take_the_loss_scale_are_left_eager():
    callback = Counting(software=True, optimizer=True)
    with pytest.warns(
        UserWarning, match=r"out of date 6 times.* `found_inf`, by which 16-mixed tells"
    ):
        both_ways(callback, (adamw, cosine), plugins=half)
    assert callback.updates == [0]


def test_with_zero3_the_scaler_has_unscaled_before():
    callback = Counting(software=True, strict=True, optimizer=True)
    both_ways(callback, (adamw, cosine), strategy=Zero3Strategy, plugins=half)
    assert callback.updates[0] > 5


@pytest.mark.parametrize("arguments", [(sgd,), (capturable, cycle)], ids=["sgd", "capturable"])
def test_other_optimizers(arguments, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(
            sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *_: ["cpu"]
        )
    callback = Counting(software=True, strict=True, optimizer=True)
    both_ways(callback, arguments)
    assert callback.updates[0] > 5


def test_what_puts_an_update_out_of_date_is_noticed():
    callback = Counting(software=True, strict=True, optimizer=True)
    both_ways(callback, (adamw,), At(9, load_own_state), At(13, more_decay), max_epochs=3)
    # one before the first capture, and one at each change
    assert callback.updates[0] == 18 - 1 - 2


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=rate()),
            {},
            r"SGD, as it was made, has no step that a graph can hold: .*`fused=True`",
        ),
        (
            lambda p: torch.optim.NAdam(p, lr=rate()),
            {},
            r"NAdam, as it was made, has no step that a graph can hold.* leave out",
        ),
    ],
    ids=["python", "no option"],
)
def test_optimizers_that_cannot_be_captured_are_refused_by_name(make, options, message):
    with pytest.raises(GraphCaptureError, match=message):
        fit(Stepped(make), CUDAGraphStep(software=True, strict=True, optimizer=True), **options)


def cycled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200)


def number(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)


def on_the_cpu(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), fused=True, capturable=True)


def test_a_learning_rate_on_the_cpu_is_a_number_to_a_gpu(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(optimizer, "state_of", lambda value, device: state_of(value, cuda))
    test_a_number_that_changes_in_each_step_leaves_the_update_eager(on_the_cpu, cosine, "lr")


@pytest.mark.parametrize(
    ("make", "schedule", "name"), [(adamw, cycled, "betas"), (number, cosine, "lr")]
)
def test_a_number_that_changes_in_each_step_leaves_the_update_eager(make, schedule, name):
    callback = Counting(software=True, optimizer=True)
    message = rf"out of date 6 times, .* `{name}` of param group 0 changed\. .*torch\.tensor\("
    with pytest.warns(UserWarning, match=message):
        both_ways(callback, (make, schedule))
    assert callback.updates == [0]


def test_a_learning_rate_that_stays_may_be_a_number():
    callback = Counting(software=True, strict=True, optimizer=True)
    both_ways(callback, (number,))
    assert callback.updates[0] > 5
