"""Broken checkpoints and failing disks: an error on all ranks, nothing loaded halfway, nothing lost."""

import pickle
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoints.runs import Whole, full_weights, train
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from helpers.models import Recipe
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints.errors import CheckpointError

RECIPE = Recipe(optimizer="adamw", steps=2)


def flip(file: Path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path):
    file.write_bytes(file.read_bytes()[:-100])


HARM = {
    "flipped": lambda folder: flip(folder / "__1_0.distcp"),
    "flipped index": lambda folder: flip(folder / ".metadata"),
    "flipped trainer state": lambda folder: flip(folder / "meta.pt"),
    "truncated": lambda folder: truncate(folder / "__0_0.distcp"),
    "missing": lambda folder: (folder / "__1_0.distcp").unlink(),
    "no index": lambda folder: (folder / ".metadata").unlink(),
    "no manifest, missing": lambda folder: [(folder / name).unlink() for name in ("manifest.json", "__1_0.distcp")],
    "full, truncated": None,
}
EXPECTED = {
    "flipped": "damaged: __1_0.distcp does not have the checksum that it was written with",
    "flipped index": "damaged: .metadata does not have the checksum",
    "flipped trainer state": "damaged: meta.pt does not have the checksum",
    "truncated": "damaged: __0_0.distcp has ",
    "missing": r"incomplete: 1 of 2 shards \(__1_0.distcp missing\).* The last complete one in its folder is ",
    "no index": r"incomplete: 2 of 2 shards \(.metadata missing\)",
    "no manifest, missing": "incomplete: __1_0.distcp has 0 of ",
    "full, truncated": "Loading .*full, truncated.ckpt failed.*central directory",
}


def make(rank, world_size, folder):
    train(world_size, Whole(RECIPE), 1, write=f"{folder}/good.ckpt")
    full = zero3(checkpoint=CheckpointOptions(kind="full"))
    train(world_size, Whole(RECIPE), 1, write=f"{folder}/full, truncated.ckpt", strategy=full)


def load_all(rank, world_size, folder):
    """The error of every broken checkpoint, and whether the weights stayed as they were."""
    errors = {}
    module = Whole(Recipe(optimizer="adamw", steps=2, seed=4))
    runner = trainer(zero3(), world_size, limit_val_batches=1)
    runner.validate(module, verbose=False)
    before = full_weights(runner)
    for name in HARM:
        try:
            runner.validate(module, ckpt_path=f"{folder}/{name}.ckpt", verbose=False)
        except CheckpointError as error:
            errors[name] = str(error)
        assert_same_tensors(full_weights(runner), before)
    return errors


def test_every_rank_raises_the_same_error_and_nothing_is_loaded(tmp_path):
    run_ranks(make, 2, str(tmp_path), timeout=60)
    for name, harm in HARM.items():
        if harm is None:
            truncate(tmp_path / f"{name}.ckpt")
        else:
            shutil.copytree(tmp_path / "good.ckpt", tmp_path / f"{name}.ckpt")
            harm(tmp_path / f"{name}.ckpt")
    errors = run_ranks(load_all, 2, str(tmp_path), timeout=100)
    assert errors[0] == errors[1]
    for name, expected in EXPECTED.items():
        with pytest.raises(CheckpointError, match=expected):
            raise CheckpointError(errors[0].get(name, "no error"))


def fill_disk(rank, world_size, folder):
    """Rank 1 may write no more than a kilobyte at the second save."""
    module = Whole(RECIPE)
    runner = trainer(zero3(), world_size)
    runner.fit(module)
    runner.save_checkpoint(f"{folder}/a.ckpt")
    before = {file.name: file.read_bytes() for file in Path(folder, "a.ckpt").iterdir()}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match="Saving .*a.ckpt failed on rank 1: .*"):
        runner.save_checkpoint(f"{folder}/a.ckpt")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = {file.name: file.read_bytes() for file in Path(folder, "a.ckpt").iterdir()}
    assert after == before
    runner.save_checkpoint(f"{folder}/a.ckpt")  # there is room again
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    assert run_ranks(fill_disk, 2, str(tmp_path), timeout=60) == [["a.ckpt"]] * 2


class Payload:
    """What a pickle can make of loading: here, a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


def load_hostile(rank, world_size, folder):
    errors = []
    for name in ("index", "trainer"):
        with pytest.raises(Exception, match=r"weights_only") as error:
            trainer(zero3(), world_size).fit(Whole(RECIPE), ckpt_path=f"{folder}/{name}.ckpt")
        errors.append(str(error.value))
    return errors


def test_loading_runs_no_code(tmp_path):
    run_ranks(make, 1, str(tmp_path), timeout=60)
    ran = tmp_path / "ran"
    for name, file in {"index": ".metadata", "trainer": "meta.pt"}.items():
        shutil.copytree(tmp_path / "good.ckpt", tmp_path / f"{name}.ckpt")
        (tmp_path / f"{name}.ckpt" / "manifest.json").unlink()  # it would have noticed
        if file == "meta.pt":
            torch.save({"epoch": Payload(ran)}, tmp_path / f"{name}.ckpt" / file)
        else:
            (tmp_path / f"{name}.ckpt" / file).write_bytes(pickle.dumps(Payload(ran)))
    run_ranks(load_hostile, 1, str(tmp_path), timeout=60)
    assert not ran.exists()


@pytest.mark.parametrize("options", [{}, {"kind": "full", "background": True}, {"kind": "both"}])
def test_what_would_be_ignored_is_refused(options):
    with pytest.raises(ValueError, match=r"kind='full'|choose 'sharded' or 'full'"):
        trainer(zero3(checkpoint=CheckpointOptions(**options), checkpoint_io=AsyncCheckpointIO())).fit(Whole(RECIPE))
