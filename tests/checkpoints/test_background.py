"""Saves in the background: what was there when they began, while training goes on; no error is
lost.
"""

import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpoints.runs import Shuffled
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints import regions, writer
from lightning_zero3.strategies.checkpoints.background import BackgroundSave
from lightning_zero3.strategies.checkpoints.consolidate import consolidate
from lightning_zero3.strategies.checkpoints.storage import damage
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError
from lightning_zero3.strategies.state_dicts.slices import SlicedTensor

STEPS, EVERY = 12, 4
WRITES_AFTER = EVERY + 2  # steps: until then the disk does not answer


class Disk(Callback):
    """A disk that answers after some steps, and perhaps fails on rank 1; notes what there was
    before each step.
    """

    def __init__(self, folder, monkeypatch, kind, fails=False):
        self.folder, self.fails, self.seen, self.copied = Path(folder), fails, [], 0
        self.answers = threading.Event()

        def answer(parts):
            memory = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
            self.copied = sum(storage.nbytes() for storage in memory.values())
            assert self.answers.wait(60)
            if fails and dist.get_rank() == 1:
                raise OSError("the disk is gone")

        if kind == "file":
            write = regions.write_regions

            def write_regions(stage, mine):
                answer([r.values for r in mine if r.values.is_floating_point()])
                return write(stage, mine)

            monkeypatch.setattr(regions, "write_regions", write_regions)
        else:
            write = writer.ShardedSave.write_data

            def write_data(its, plan, planner):
                slices = [t for t in planner.state_dict.values() if isinstance(t, SlicedTensor)]
                answer(part for t in slices for part in t.parts.values())
                return write(its, plan, planner)

            monkeypatch.setattr(writer.ShardedSave, "write_data", write_data)

    def on_train_batch_start(self, trainer, *_):
        there = sorted(self.folder.glob("*.ckpt"))
        self.seen.append([path.name for path in there])
        for path in there if trainer.global_rank == 0 else ():
            with suppress(FileNotFoundError):  # the thread deletes it
                assert damage(path) is None, "a name leads to nothing whole"

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == WRITES_AFTER:
            self.answers.set()


class Save(Callback):
    """Another moment for a save to begin."""

    def __init__(self, hook, disk):
        def save(trainer, *_):
            if hook != "on_train_batch_start" or trainer.global_step == 2:
                disk.answers.set()
                trainer.save_checkpoint(disk.folder / "other.ckpt")
            if hook == "on_train_batch_start" and trainer.global_step == 2:
                raise KeyError("mine")

        setattr(self, hook, save)


def fit(world_size, folder, kind, *callbacks, background=True, keep=-1, **options):
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY, save_top_k=keep, **options)
    checkpoint = CheckpointOptions(kind=kind, background=background)
    strategy = zero3(unit_policy=None, checkpoint=checkpoint)
    options = {
        "max_steps": STEPS,
        "max_epochs": -1,
        "enable_checkpointing": True,
        "use_distributed_sampler": True,
    }
    runner = trainer(strategy, world_size, callbacks=[saver, *callbacks], **options)
    runner.fit(Shuffled())
    return runner


def fail(world_size, folder, kind, hook=None):
    """The error, the number of steps begun, and the warnings of a run with a save that fails on
    rank 1.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        disk = Disk(folder, patch, kind, fails=True)
        with pytest.raises((CheckpointError, KeyError)) as error:
            fit(
                world_size,
                folder,
                kind,
                *([Save(hook, disk)] if hook else []),
                disk,
                keep=0 if hook else -1,
            )
    return (
        repr(error.value),
        len(disk.seen),
        [str(w.message) for w in caught if "gone" in str(w.message)],
    )


def run(rank, world_size, folder, kind):
    fit(world_size, f"{folder}/foreground", kind, background=False)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(f"{folder}/background", patch, kind)
        ledger = fit(world_size, f"{folder}/background", kind, disk).strategy.memory_ledger()
        seen = disk.seen
        assert 0 < disk.copied <= ledger["parameters"] + ledger["optimizer_state"]
        disk = Disk(f"{folder}/one", patch, kind)
        fit(
            world_size,
            f"{folder}/one",
            kind,
            disk,
            keep=1,
            save_last="link",
            enable_version_counter=False,
        )
    hooks = [None, "on_train_end", "on_train_batch_start"]
    return seen, {hook: fail(world_size, f"{folder}/failed {hook}", kind, hook) for hook in hooks}


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_background_saves(kind, tmp_path):
    ranks = run_ranks(run, 2, str(tmp_path), kind, timeout=100)
    names = [f"step={k}.ckpt" for k in range(EVERY, STEPS + 1, EVERY)]
    for seen, _ in ranks:
        assert len(seen) == STEPS and seen[WRITES_AFTER - 1] == [], (
            "training did not go on while the disk did not answer"
        )
    for name in names:  # whenever it was written, what was saved is the state at that step
        files = [tmp_path / moment / name for moment in ("foreground", "background")]
        if kind == "sharded":
            for file in files:
                consolidate(file, file.with_suffix(".pt"))
            files = [file.with_suffix(".pt") for file in files]
        now, then = (torch.load(file, weights_only=True) for file in files)
        assert_same_tensors(then["state_dict"], now["state_dict"])
        ((now,), (then,)) = (states["optimizer_states"] for states in (now, then))
        assert now["state"] and now["state"].keys() == then["state"].keys()
        for number, state in now["state"].items():
            assert_same_tensors(then["state"][number], state)
    one = tmp_path / "one"
    assert {path.name for path in one.iterdir()} == {"last.ckpt", names[-1]}, (
        "superseded ones are removed, later"
    )
    assert (one / "last.ckpt").readlink() == Path(names[-1])

    left = [path for folder in tmp_path.glob("failed*") for path in folder.rglob("*.ckpt")]
    assert not left, "what failed was left behind"
    for _, failed in ranks:  # all ranks are told the same
        told = (
            f"{tmp_path}/failed None/step={EVERY}.ckpt failed on rank 1: OSError: the disk is gone"
        )
        error, steps, others = failed[None]
        assert error == f"CheckpointError('Saving {told}')" and not others
        assert steps == 2 * EVERY, "not told when the next save began"
        error, steps, others = failed["on_train_end"]
        assert (
            "other.ckpt failed on rank 1: OSError: the disk is gone" in error
            and not others
            and steps == STEPS
        )
        error, steps, others = failed["on_train_batch_start"]
        assert error == "KeyError('mine')" and steps <= 3
        assert (
            len(others) == 1
            and "other.ckpt failed on rank 1: OSError: the disk is gone" in others[0]
        )


def end(rank, world_size, folder):
    """How often the thread and its group are ended, in runs with a save in flight."""
    closed, close = [], BackgroundSave.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundSave, "close", lambda its: (closed.append(its), close(its)))
        fit(world_size, f"{folder}/whole", "file")
        disk = Disk(f"{folder}/failed", patch, "file")
        with pytest.raises(KeyError):
            fit(world_size, folder, "file", Save("on_train_batch_start", disk))
    return len(closed), len(set(closed))


def test_an_exception_ends_the_thread(tmp_path):
    assert run_ranks(end, 2, str(tmp_path), timeout=60) == [(2, 2)] * 2


def test_a_thread_leaves_the_filters_of_warnings_alone(tmp_path, monkeypatch):
    seen, write = [], writer.ShardedSave.write_data

    def write_data(its, plan, planner):
        seen.append(warnings.filters)
        return write(its, plan, planner)

    monkeypatch.setattr(writer.ShardedSave, "write_data", write_data)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("a", "b"):
            background = BackgroundSave()
            save = writer.ShardedSave({"state_dict": {"a": torch.ones(3)}}, tmp_path / name)
            background.start(save)
            background.wait()
            background.close()
        assert len(seen) == 2 and all(filters is warnings.filters for filters in seen)
    assert not [str(w.message) for w in caught if "torch.distributed is" in str(w.message)]
