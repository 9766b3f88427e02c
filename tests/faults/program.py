"""What every rank runs: a small model is trained, and at one point of it something goes wrong on
one rank.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from helpers.models import TinyLm, make

SAMPLES, STEPS, FAULT_STEP = 240, 10, 5
CHECKPOINT_EVERY = 2
WITH_WORKERS = ("forward", "validation")  # phases where each rank's loader has a process of its own


def kill(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def crash(folder):
    ctypes.string_at(0)


def leave(folder):
    os._exit(7)


def leave_well(folder):
    os._exit(0)


def fail(folder):
    raise ValueError("sample 17 is broken")


def run_out(folder):
    raise MemoryError("cannot allocate 80 GiB")


def interrupt(folder):
    os.kill(os.getpid(), signal.SIGINT)


def freeze(folder):
    os.kill(os.getpid(), signal.SIGSTOP)


def power_off(folder):
    time.sleep(60)  # until the launcher ends this host


def lose_node(folder):
    os.kill(os.getppid(), signal.SIGKILL)  # its torchrun
    os.kill(os.getpid(), signal.SIGKILL)


def doze(folder):
    time.sleep(7)


def hold(folder):
    ctypes.PyDLL(None).sleep(9)  # with Python's lock, as `json.loads` of gigabytes


def pause(folder):
    while not (folder / "go on").exists():  # the harness stops all ranks, and continues them
        time.sleep(0.02)


def lose_network(folder):
    pause(folder)


KINDS = {
    f.__name__.replace("_", " "): f
    for f in (
        kill,
        crash,
        leave,
        leave_well,
        fail,
        run_out,
        interrupt,
        freeze,
        power_off,
        lose_node,
        lose_network,
        doze,
        hold,
        pause,
    )
}


class Samples(Dataset):
    def __init__(self, trigger):
        self.trigger = trigger
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 13, (SAMPLES, 6), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.trigger("loading")
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Model(pl.LightningModule):
    """Calls ``trigger`` with the name of each phase it comes through."""

    def __init__(self, fault, folder, world_size):
        super().__init__()
        self.net = make(TinyLm)
        self.fault, self.folder, self.world_size = fault, Path(folder), world_size

    def trigger(self, phase):
        fault = self.fault
        if (
            fault is None
            or phase != fault.phase
            or self.global_rank != fault.rank
            or fault.kind not in KINDS
        ):
            return
        if phase not in ("set-up", "loading") and self.global_step != (
            0 if phase == "first step" else FAULT_STEP
        ):
            return
        if phase == "loading" and self.global_step < FAULT_STEP - 1:
            return
        marker = self.folder / "fault"
        if not marker.exists():
            marker.write_text(str(time.time()))
            KINDS[fault.kind](self.folder)

    def setup(self, stage):
        self.trigger("set-up")

    def on_train_start(self):
        with self.file("begun").open("a") as file:
            file.write(f"{self.global_step}\n")
        if self.fault is not None and self.fault.kind == "wait apart":
            self.aside = torch.distributed.new_group()

    def file(self, name):
        return self.folder / f"{name}.{self.global_rank}"

    def training_step(self, batch, batch_idx):
        self.file("workers").write_text(str(len(multiprocessing.active_children())))
        self.trigger("first step")
        if (
            self.fault is not None
            and self.fault.kind == "doze"
            and self.global_step == FAULT_STEP - 2
        ):
            torch.distributed.barrier()
            # all are alike before one dozes, however busy the machine was when they began
            time.sleep(5)
        if self.on_device and self.global_step == FAULT_STEP:
            self.trainer.strategy.engine.collectives.stuck = True
        if self.here("other order"):
            self.net.head(self.net.norm(self.net.embed(batch[0])))
        if self.here("skipped unit"):
            self.net.blocks = self.net.blocks[:-1]
        handle = self.net.blocks[1].register_forward_hook(lambda *_: self.trigger("forward"))
        loss = self.net.loss(batch)
        handle.remove()
        if self.fault is not None and self.fault.phase == "backward":
            loss.register_hook(lambda grad: self.trigger("backward"))
        if self.on_device and self.global_step == FAULT_STEP:
            # as `loss.item()` would wait for the device
            time.sleep(60 * (self.fault.kind == "other order"))
        with self.file("losses").open("a") as file:
            file.write(f"{self.global_step} {loss.item()!r}\n")
        if self.here("skipped step"):
            return None
        return loss

    @property
    def on_device(self):
        return self.fault is not None and self.fault.phase == "device"

    def here(self, kind):
        """Whether this is the place where the ranks are to diverge."""
        fault = self.fault
        if (
            fault is None
            or fault.kind != kind
            or self.global_rank != fault.rank
            or self.global_step != FAULT_STEP
        ):
            return False
        self._mark()
        return True

    def _mark(self):
        (self.folder / "fault").write_text(str(time.time()))

    def on_before_optimizer_step(self, optimizer):
        self.trigger("optimizer step")

    def on_train_batch_end(self, *args):
        self.trigger("callback")
        if self.here("lonely barrier"):
            self.trainer.strategy.barrier()
        if self.here("lonely save"):
            self.trainer.save_checkpoint(self.folder / "lonely.ckpt")
        if self.here("lonely forward"):
            self.net(self.trainer.train_dataloader.dataset[:2][0])
        if self.here("lonely load"):
            self.net.load_state_dict(make(TinyLm).state_dict())
        if (
            self.fault is not None
            and self.fault.kind == "wait apart"
            and self.global_step == FAULT_STEP
        ):
            self.wait_apart((self.fault.rank + 1) % self.world_size)

        if self.here("mute"):
            self.trainer.strategy.watch._number = None  # no beat can be made
            time.sleep(60)

    def wait_apart(self, helper):
        """One rank waits for a message, the others for each other, until the harness lets
        ``helper`` send it.
        """
        if self.global_rank == helper:
            threading.Thread(target=self.help).start()
        if self.here("wait apart"):
            torch.distributed.recv(torch.zeros(1), helper, self.aside)
        torch.distributed.barrier()

    def help(self):
        pause(self.folder)
        torch.distributed.send(torch.zeros(1), self.fault.rank, self.aside)

    def on_train_epoch_end(self):
        if (
            self.fault is not None
            and self.fault.kind == "fewer batches"
            and self.global_rank == self.fault.rank
        ):
            self._mark()

    def validation_step(self, batch, batch_idx):
        self.trigger("validation")
        self.log("val", self.net.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def on_save_checkpoint(self, checkpoint):
        if (
            self.fault is not None
            and self.fault.phase == "checkpoint"
            and self.global_step > CHECKPOINT_EVERY
        ):
            self.fault_in_checkpoint()

    def fault_in_checkpoint(self):
        marker = self.folder / "fault"
        if self.global_rank == self.fault.rank and not marker.exists():
            marker.write_text(str(time.time()))
            KINDS[self.fault.kind](self.folder)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        batch = SAMPLES // STEPS // self.world_size
        samples = Samples(self.trigger)
        if self.fault is None or self.fault.phase not in WITH_WORKERS:
            return DataLoader(samples, batch_size=batch)
        return DataLoader(samples, batch_size=batch, num_workers=1, multiprocessing_context="fork")

    def val_dataloader(self):
        return DataLoader(
            torch.utils.data.Subset(Samples(lambda phase: None), range(12)), batch_size=2
        )


def die_half_way(fault, folder):
    """Trigger ``fault`` when this rank has written half of its part of the second checkpoint."""
    from lightning_zero3.strategies.checkpoints import regions

    saved, write = [], regions.write_regions  # of each step one is saved, and one as "last"

    def write_regions(stage, mine):
        saved.append(stage)
        marker = Path(folder, "fault")
        if len(saved) == 3 and not marker.exists():
            write(stage, mine[: len(mine) // 2])
            marker.write_text(str(time.time()))
            KINDS[fault.kind](folder)
        return write(stage, mine)

    regions.write_regions = write_regions


def run_ahead():
    """As with NCCL, the host does not wait for exchanges, and nobody compares them; from the fault
    on they never end.
    """
    from lightning_zero3.strategies import zero3
    from lightning_zero3.strategies.collectives import GroupCollectives, Pending

    class Door(GroupCollectives):
        stuck = False

        def all_gather(self, buffer, label=0):
            return self.never(buffer, label) if self.stuck else super().all_gather(buffer, label)

        def reduce_scatter(self, buffer, label=0):
            return (
                self.never(buffer[: len(buffer) // self.world_size], label)
                if self.stuck
                else super().reduce_scatter(buffer, label)
            )

        def never(self, result, label):
            self.exchange_log.progress[1] += 1
            self.exchange_log.trace.append(label)
            return Pending((result, ()))

    zero3.make_collectives = lambda group, device: Door(
        group, torch.distributed.new_group(backend="gloo")
    )


def train(folder, fault, devices, nodes=1):
    """One attempt; goes on from the last checkpoint in ``folder`` if there is one."""
    from lightning_zero3 import DataOptions, WatchOptions, Zero3Strategy

    world_size = devices * nodes
    if fault is not None and fault.phase == "writing" and int(os.environ["RANK"]) == fault.rank:
        die_half_way(fault, folder)
    if fault is not None and fault.phase == "device":
        run_ahead()
    saver = ModelCheckpoint(
        Path(folder, "checkpoints"),
        "{step}",
        every_n_train_steps=CHECKPOINT_EVERY,
        save_top_k=-1,
        save_last=True,
    )
    fewer = (
        fault is not None
        and fault.kind == "fewer batches"
        and int(os.environ["RANK"]) == fault.rank
    )
    # longer than a cable is out that comes back
    lost = 20 if fault is not None and fault.kind == "lose network" else 5
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=Zero3Strategy(
            unit_policy=["Block"],
            timeout=timedelta(minutes=5),
            data=DataOptions(seed=1),
            watch=WatchOptions(slow=3, lost=lost, grace=3),
        ),
        callbacks=[saver],
        max_epochs=1,
        val_check_interval=FAULT_STEP,
        limit_val_batches=0 if fault is not None and fault.phase == "device" else 2,
        num_sanity_val_steps=0,
        limit_train_batches=FAULT_STEP if fewer else 1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(fault, folder, world_size), ckpt_path="last")
