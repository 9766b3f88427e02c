"""Values that each rank gives a weight, or a gradient, for itself: told before they are put
together, and only then.
"""

import os

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from helpers.parity import full_state, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import DivergenceError


class Layers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch):
        return self.net(batch * (1 + self.global_rank)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.randn(16, 4, generator=torch.Generator().manual_seed(1)), batch_size=1
        )

    @torch.no_grad()
    def store_own(self):
        self.net[1].weight.copy_(torch.full((4, 4), 1.0 + self.global_rank))


class StoredThenModified(Layers):
    def on_train_batch_start(self, batch, batch_idx):
        self.store_own()
        with self.trainer.strategy.gathered(self.net[1], modify=True), torch.no_grad():
            self.net[1].weight.mul_(1)


class StoredThenReadAndStored(Layers):
    @torch.no_grad()
    def on_train_batch_start(self, batch, batch_idx):
        self.store_own()
        with self.trainer.strategy.gathered(self.net[1]):
            value = self.net[1].weight.clone()
        self.net[1].weight.copy_(value)


class StoredAtTheEndAndSaved(Layers):
    def on_train_end(self):
        self.store_own()
        self.trainer.save_checkpoint("never.ckpt")


class StoredAtTheEndAndCollected(Layers):
    def on_train_end(self):
        self.store_own()
        self.trainer.strategy.full_state_dict()


class StoredAtTheEndAndExported(Layers):
    def on_train_end(self):
        self.store_own()
        self.trainer.strategy.save_weights("never")


class ClearedBetweenMicroBatches(Layers):
    def on_after_backward(self):
        if self.global_rank == 0 and self.trainer.fit_loop.batch_idx % 2 == 0:
            self.optimizers().zero_grad()


class OneClearedBetweenMicroBatches(Layers):
    def on_after_backward(self):
        if self.trainer.fit_loop.batch_idx % 2 == 0:
            self.net[self.global_rank].bias.grad = None


class GradientAssignedThenSaved(Layers):
    def on_after_backward(self):
        self.net[1].bias.grad = torch.full((4,), 1.0 + self.global_rank)

    def on_train_batch_end(self, *_):
        self.trainer.save_checkpoint("never.ckpt")  # in the middle of a window


class GradientAssignedThenMoved(Layers):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.later = nn.Linear(4, 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch))
        self.net[1].bias.grad = torch.full((4,), 1.0 + self.global_rank)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.optimizers().optimizer.add_param_group({"params": list(self.later.parameters())})


REFUSED = {
    GradientAssignedThenSaved: (r"a value assigned as gradient to parameter 'net\.1\.bias'"),
    GradientAssignedThenMoved: (r"a value assigned as gradient to parameter 'net\.1\.bias'"),
    StoredThenModified: "a value stored to parameter 'net.1.weight'",
    StoredThenReadAndStored: "a value stored to parameter 'net.1.weight'",
    StoredAtTheEndAndSaved: "a value stored to parameter 'net.1.weight'",
    StoredAtTheEndAndCollected: "a value stored to parameter 'net.1.weight'",
    StoredAtTheEndAndExported: "a value stored to parameter 'net.1.weight'",
    ClearedBetweenMicroBatches: (
        r"rank 0 came to 0 gradients in all, when a backward began, rank 1 to 4 gradients"
    ),
    OneClearedBetweenMicroBatches: (
        r"rank 0 came to no gradients of \['net\.[01]\.bias'\] in all, when a backward began"
    ),
}


class ClippedByHand(Layers):
    """What all ranks have assigned; rank 0 looks at more of what is gathered."""

    def on_before_optimizer_step(self, optimizer):
        parameters = list(self.parameters())
        for p in parameters:
            p.grad = p.grad * 0.5
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad = p.grad / max(float(norm), 1.0)
        weights = [layer.weight.grad.sum() for layer in self.net]
        if self.global_rank == 0:
            assert all(map(torch.isfinite, [self.net[1].bias.grad.sum(), *weights]))


class ReadByRankZero(Layers):
    """More of a unit whose gradients all have gathered; then they are clipped, and cleared by the
    module.
    """

    def on_after_backward(self):
        self.net[0].weight.grad.norm()
        if self.global_rank == 0:
            self.net[0].bias.grad.norm()

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, 0.01, "norm")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % 2:
            self.zero_grad()


class ClearedOnAll(Layers):
    """Those of a batch that all leave out."""

    def on_after_backward(self):
        if self.trainer.fit_loop.batch_idx % 4 == 0:
            self.zero_grad()


class InterruptedAtAStep(Layers):
    """Rank 1's optimizer has stepped, and rank 0's has not."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        for what in (closure, optimizer.optimizer.step)[: 1 + self.global_rank]:
            what()
        raise KeyError("interrupted")


class Interrupted(Layers):
    """In the third backward, on rank 0 later than on rank 1: the weights are still those of one
    model.
    """

    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch)
        loss = self.net[1](hidden).square().mean()
        if batch_idx == 2:
            (loss if self.global_rank else hidden).register_hook(self.interrupt)
        return loss

    def interrupt(self, grad):
        raise KeyError("interrupted")


def _save_on_exception(rank, world_size, folder):
    saver = OnExceptionCheckpoint(folder)
    fitted = trainer("zero3", world_size, callbacks=[saver], enable_checkpointing=None)
    with pytest.raises(KeyError, match="interrupted"):
        fitted.fit(Interrupted())
    parted = OnExceptionCheckpoint(folder, "parted")
    fitted = trainer("zero3", world_size, callbacks=[parted], enable_checkpointing=None)
    with (
        pytest.raises(KeyError, match="interrupted"),
        pytest.warns(
            UserWarning, match="saves nothing: The ranks ran different things.* group 0 of SGD"
        ),
    ):
        fitted.fit(InterruptedAtAStep())
    return os.path.exists(saver.ckpt_path), os.path.exists(parted.ckpt_path)


class FailsWithItsOwn(Layers):
    """Each rank has written values of its own when an exception ends the step, on all alike."""

    def training_step(self, batch, batch_idx):
        self.store_own()
        raise KeyError("interrupted")


def _fail(rank, world_size, folder):
    saver = OnExceptionCheckpoint(folder, "own")
    fitted = trainer("zero3", world_size, callbacks=[saver], enable_checkpointing=None)
    with (
        pytest.raises(KeyError, match="interrupted"),
        pytest.warns(
            UserWarning, match="nothing: The ranks ran .* a value written to parameter 'net.1"
        ),
    ):
        fitted.fit(FailsWithItsOwn())
    return os.path.exists(saver.ckpt_path)


def _go_on(rank, world_size, how):
    """Rank 0 alone loads other weights after `fit`; then the model is used once more."""
    module = Layers()
    _fit(module, zero3(unit_policy=["Linear"]), world_size)
    if rank == 0:
        module.net.load_state_dict(
            {name: torch.ones(p.shape) for name, p in module.net.named_parameters()}
        )
    apart = "compare what all have written .* before a forward outside of a step"
    told = apart if how == "forward" else "a value stored to parameter 'net.0.bias'"
    with pytest.raises(DivergenceError, match=told):
        if how == "forward":
            module.net(torch.ones(1, 4))
        else:
            trainer("zero3", world_size, max_epochs=1).fit(module)


class LoadedByRankZero(Layers):
    def on_train_end(self):
        if self.global_rank == 0:
            self.store_own()


def _fit(module, strategy, world_size):
    fitted = trainer(
        strategy,
        world_size,
        max_epochs=1,
        accumulate_grad_batches=2 if module.automatic_optimization else 1,
    )
    fitted.fit(module)
    return fitted


def _refuse(rank, world_size):
    for kind, text in REFUSED.items():
        with pytest.raises(DivergenceError, match=text):
            _fit(kind(), zero3(unit_policy=["Linear"]), world_size)


def _train(rank, world_size, kind):
    found = []
    for strategy in ("ddp", zero3(unit_policy=["Linear"]), "zero3"):
        module = kind()
        found.append(full_state(_fit(module, strategy, world_size)))
    return found


def test_what_is_not_alike_is_told_before_it_is_put_together():
    run_ranks(_refuse, 2)


def test_an_exception_saves_what_is_one_model(tmp_path):
    assert run_ranks(_save_on_exception, 2, str(tmp_path)) == [(True, False)] * 2


def test_what_a_failed_step_has_written_is_compared(tmp_path):
    assert run_ranks(_fail, 2, str(tmp_path)) == [False, False]


@pytest.mark.parametrize("how", ["fit", "forward"])
def test_what_one_rank_stores_after_fit_is_told(how):
    run_ranks(_go_on, 2, how)


def test_what_one_rank_stores_at_the_end_does_not_come_back_from_a_launcher():
    with pytest.raises(Exception, match="a value stored to parameter 'net.1.weight'"):
        trainer("zero3_notebook", 2, max_epochs=1).fit(LoadedByRankZero())


@pytest.mark.parametrize("kind", [ClippedByHand, ReadByRankZero, ClearedOnAll])
def test_what_is_alike_trains_as_ddp(kind):
    theirs, *ours = run_ranks(_train, 2, kind)[0]
    for state in ours:
        assert state.keys() == theirs.keys() and len(theirs) == 4
        for name, value in theirs.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)
