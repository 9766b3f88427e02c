"""SIGTERM and SIGUSR1 to one rank: all ranks stop or save after the same batch, and a resumed run
ends where it would have.
"""

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader

from helpers.ranks import run_ranks
from lightning_zero3.strategies.checkpoints import storage
from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.launch import signals

BATCHES, EPOCHS = 6, 2


class Model(pl.LightningModule):
    """Gets `signum` on `ranks` at each of `when`: ("forward", "backward", "validate" or "save", how
    many before).
    """

    def __init__(self, signum=None, ranks=(), *when):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.signum, self.ranks, self.when = signum, ranks, list(when)
        self.losses, self.validated, self.saved = [], 0, 0

    def maybe_signal(self, *now):
        if self.global_rank in self.ranks and now in self.when:
            self.when.remove(now)
            os.kill(os.getpid(), self.signum)

    def training_step(self, batch, batch_idx):
        self.maybe_signal("forward", len(self.losses))
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self):
        self.maybe_signal("backward", len(self.losses) - 1)

    def validation_step(self, batch, batch_idx):
        self.maybe_signal("validate", self.validated)
        self.validated += 1
        self.net(batch)

    def on_save_checkpoint(self, checkpoint):
        self.maybe_signal("save", self.saved)
        self.saved += 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def train_dataloader(self):
        samples = torch.randn(
            2 * BATCHES * self.trainer.world_size, 3, generator=torch.Generator().manual_seed(1)
        )
        return DataLoader(samples, batch_size=2, shuffle=True)

    def val_dataloader(self):
        return DataLoader(torch.ones(8 * self.trainer.world_size, 3), batch_size=2)


def fit(model, folder, size, ckpt_path=None, **options):
    callbacks = [
        OnExceptionCheckpoint(folder),
        *(make(folder) for make in options.pop("callbacks", ())),
    ]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="zero3",
        max_epochs=EPOCHS,
        default_root_dir=folder,
        callbacks=callbacks,
        **{**quiet, "num_sanity_val_steps": 0, **options},
    )
    stopped = False
    try:
        trainer.fit(model, ckpt_path=ckpt_path)
    except SIGTERMException:
        stopped = True
    assert stopped == trainer.received_sigterm
    if stopped:
        return stopped, {}
    with trainer.strategy.gathered():
        return stopped, {name: p.detach().clone() for name, p in model.named_parameters()}


def saver(folder):
    return ModelCheckpoint(Path(folder, "saves"), "{step}", every_n_train_steps=2, save_top_k=-1)


CASES = {  # who gets SIGTERM and when; options of the Trainer; batches trained until all stop
    "another rank, forward": (-1, ("forward", 2), {}, 3),
    "rank 0, backward": (0, ("backward", 1), {}, 2),
    "last batch of an epoch": (-1, ("forward", BATCHES - 1), {"limit_val_batches": 0}, BATCHES),
    "between steps of a window": (-1, ("forward", 0), {"accumulate_grad_batches": 3}, 3),
    "validation": (-1, ("validate", 1), {}, BATCHES),
    "saving": (-1, ("save", 0), {"callbacks": (saver,)}, 2),
}


def stop_and_resume(rank, size, folder):
    found = {}
    for name, (who, when, options, _) in CASES.items():
        folder_of_case = str(Path(folder, name.replace(" ", "_")))
        whole = Model()
        _, expected = fit(whole, folder_of_case, size, **options)
        first = Model(signal.SIGTERM, [who % size], when)
        stopped, _ = fit(first, folder_of_case, size, **options)
        rest = Model()
        _, state = fit(
            rest, folder_of_case, size, Path(folder_of_case, "on_exception.ckpt"), **options
        )
        same = (
            all(torch.equal(state[key], value) for key, value in expected.items())
            and len(expected) == 4
        )
        found[name] = (
            stopped,
            len(first.losses),
            first.losses + rest.losses == whole.losses,
            same,
            first.validated,
        )
    return found


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.variant)])
def test_sigterm_stops_all_ranks_after_the_same_batch_and_the_run_can_go_on(size, tmp_path):
    for found in run_ranks(stop_and_resume, size, str(tmp_path), timeout=100):
        for name, (*_, batches) in CASES.items():
            assert found[name][:4] == (True, batches, True, True), (name, found[name])
        assert found["validation"][4] == 2  # at the batch in which it came
    # What was being saved is whole; the run without the signal has taken its name.
    assert storage.damage(tmp_path / "saving/saves/step=2-v1.ckpt") is None


def requeue(rank, size, folder, apart):
    slurm = {
        "JOB_ID": 77,
        "NTASKS": size,
        "NTASKS_PER_NODE": size,
        "PROCID": rank,
        "LOCALID": rank,
        "NODEID": 0,
        "STEP_ID": 0,
    }
    os.environ.update(
        {f"SLURM_{name}": str(value) for name, value in slurm.items()},
        PATH=f"{folder}/bin:{os.environ['PATH']}",
    )
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME"):
        os.environ.pop(name, None)
    if apart:
        signals._ONE_REQUEST_S = -1.0  # as if the signals came minutes apart
    # SLURM signals every process, and may do so again: one request.
    first = Model(signal.SIGUSR1, range(size), ("backward", 2), ("save", 0), ("backward", 5))
    stopped, expected = fit(first, folder, size)
    rest = Model()
    _, state = fit(rest, folder, size)  # as the requeued job: the same command
    same = all(torch.equal(state[key], value) for key, value in expected.items())
    return (
        stopped,
        len(first.losses),
        first.losses[-len(rest.losses) :] == rest.losses,
        len(rest.losses),
        same,
    )


@pytest.mark.parametrize("apart", [False, True])
def test_sigusr1_in_slurm_saves_once_for_each_request_and_requeues(tmp_path, apart):
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin/scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    scontrol.chmod(0o755)
    total = BATCHES * EPOCHS
    for stopped, trained, same_losses, resumed, same_state in run_ranks(
        requeue, 2, str(tmp_path), apart, timeout=100
    ):
        assert (stopped, trained, same_losses, same_state) == (False, total, True, True)
        # asked in the third and sixth batch
        assert resumed == total - (6 if apart else 3)
    assert (tmp_path / "calls").read_text() == "requeue 77\n" * (1 + apart)
    assert (
        sorted(path.name for path in tmp_path.glob("hpc_*"))
        == ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"][: 1 + apart]
    )


@pytest.mark.parametrize(("seconds", "asked"), [(9, False), (11, True)])
def test_a_signal_is_another_request_after_ten_seconds(monkeypatch, seconds, asked):
    clock = iter((100.0, 100.0 + seconds))
    monkeypatch.setattr(signals, "time", Mock(monotonic=lambda: next(clock)))
    # saves and requeues
    monkeypatch.setattr(_SignalConnector, "_slurm_sigusr_handler_fn", lambda *args: None)
    strategy = Mock(_communicator=LocalCollectives())
    connector = signals.AgreedSignals(Mock(training=True, strategy=strategy))
    connector._needs_requeue = True
    connector.between_batches()
    assert not connector._needs_requeue
    connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
    assert connector._needs_requeue is asked


class Counted(Model):
    """Notes the batches that were trained on."""

    def __init__(self, hook=None):
        super().__init__()
        self.hook, self.trained = hook, []

    def training_step(self, batch, batch_index):
        self.trained.append(batch[0, 0].item())
        return super().training_step(batch, batch_index)


class Interrupts(pl.Callback):
    """As Ctrl-C in the middle of the fourth batch of an epoch."""

    def __init__(self, hook):
        def interrupt(trainer, *args):
            if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 4:
                raise KeyboardInterrupt

        setattr(self, hook, interrupt)


def interrupted(rank, world_size, folder, hook):
    data = DataLoader(torch.arange(24.0).view(8, 3).repeat_interleave(world_size, 0), batch_size=1)

    def fit(module, *callbacks, **options):
        runner = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy="zero3",
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        runner.fit(module, data, **options)
        return runner

    whole, first, rest = Counted(), Counted(), Counted()
    fit(whole)
    saver = OnExceptionCheckpoint(folder)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(first, Interrupts(hook), saver)
    runner = fit(rest, ckpt_path=saver.ckpt_path)
    return whole.trained, first.trained, rest.trained, runner.global_step


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_backward", "on_train_batch_end"]
)
def test_the_batch_that_was_interrupted_is_trained_on(hook, tmp_path):
    for whole, first, rest, steps in run_ranks(interrupted, 2, str(tmp_path), hook, timeout=60):
        assert steps == len(whole) == 8
        begun = 4 if hook == "on_before_backward" else 3  # that batch runs twice
        done = 4 if hook == "on_train_batch_end" else 3
        assert first == whole[: max(begun, done)] and rest == whole[done:]


def stopped_after_new_callbacks(rank, world_size):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="zero3",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    trainer.callbacks = [pl.Callback()]
    trainer.fit_loop.max_epochs = 2
    model = Model(signal.SIGTERM, [world_size - 1], ("forward", 2))
    with pytest.raises(SIGTERMException):
        trainer.fit(model)
    return len(model.losses)


def test_sigterm_stops_a_run_whose_trainer_has_got_other_callbacks():
    assert run_ranks(stopped_after_new_callbacks, 2, timeout=60) == [3, 3]
