"""Broken checkpoints and failing disks: an error on all ranks, nothing loaded halfway, nothing
lost.
"""

import gc
import os
import pickle
import resource
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from checkpoints.runs import Whole, flip, full_weights, train
from helpers.models import Recipe
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints import single_file
from lightning_zero3.strategies.checkpoints.index import read_index
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError
from lightning_zero3.strategies.state_dicts.slices import SavedTensor

RECIPE = Recipe(optimizer="adamw", steps=2)


def flip_tensor(file: Path):
    with zipfile.ZipFile(file) as archive:
        largest = max(
            archive.infolist(), key=lambda record: record.file_size * ("/data/" in record.filename)
        )
        flip(file, file.read_bytes().index(archive.read(largest)))


def truncate(file: Path):
    file.write_bytes(file.read_bytes()[:-100])


HARM = {
    "flipped": lambda folder: flip(folder / "__1_0.distcp"),
    "flipped index": lambda folder: flip(folder / ".metadata"),
    "flipped trainer state": lambda folder: flip(folder / "meta.pt"),
    "truncated": lambda folder: truncate(folder / "__0_0.distcp"),
    "missing": lambda folder: (folder / "__1_0.distcp").unlink(),
    "no index": lambda folder: (folder / ".metadata").unlink(),
    "no manifest, missing": lambda folder: [
        (folder / name).unlink() for name in ("manifest.json", "__1_0.distcp")
    ],
    "file, truncated": truncate,
    "file, flipped": flip_tensor,
}
EXPECTED = {
    "flipped": (
        r"failed on rank \d: damaged: __1_0.distcp does not have the checksum that it was written"
        r" with$"
    ),
    "flipped index": "damaged: .metadata does not have the checksum",
    "flipped trainer state": "damaged: meta.pt does not have the checksum",
    "truncated": "incomplete: __0_0.distcp has ",
    "missing": "incomplete: __1_0.distcp has 0 of ",
    "no index": "it has no .metadata and is no checkpoint in torch's distributed format",
    "no manifest, missing": "incomplete: __1_0.distcp has 0 of ",
    "file, truncated": "file, truncated.ckpt failed on rank 0: incomplete: the end of the file is missing",
    "file, flipped": "damaged: '.*/data/[0-9]+' does not have the checksum it was written with",
}


def make(rank, world_size, folder):
    for name, kind in (("good", "sharded"), ("file", "file")):
        strategy = zero3(checkpoint=CheckpointOptions(kind=kind))
        train(world_size, Whole(RECIPE), 1, write=f"{folder}/{name}.ckpt", strategy=strategy)


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
        kind = name.partition(",")[0]
        copy = shutil.copytree if kind != "file" else shutil.copy
        copy(tmp_path / ("file.ckpt" if kind == "file" else "good.ckpt"), tmp_path / f"{name}.ckpt")
        harm(tmp_path / f"{name}.ckpt")
    errors = run_ranks(load_all, 2, str(tmp_path), timeout=100)
    assert errors[0] == errors[1]
    for name, expected in EXPECTED.items():
        with pytest.raises(CheckpointError, match=expected):
            raise CheckpointError(errors[0].get(name, "no error"))


def single_files(folder):
    """The same content, by `torch.save` and as we write it."""
    content = {
        "epoch": 3,
        "state_dict": {
            "a": torch.arange(50.0),
            "b": torch.ones(3, 2).t(),
            "none": torch.empty(0, 2),
        },
    }
    torch.save(content, folder / "theirs.ckpt")
    saved = {
        k: SavedTensor(k, v.shape, v.dtype, "cpu", read_into=lambda target, v=v: target.copy_(v))
        for k, v in content["state_dict"].items()
    }
    single_file.FileSave({**content, "state_dict": saved}, folder / "ours.ckpt").write()
    return content


def test_any_zip_tool_can_check_what_we_write(tmp_path):
    content = single_files(tmp_path)
    theirs, ours = (zipfile.ZipFile(tmp_path / f"{name}.ckpt") for name in ("theirs", "ours"))
    assert ours.testzip() is None
    assert [r.CRC for r in ours.infolist() if "/data/" in r.filename] == [
        r.CRC for r in theirs.infolist() if "/data/" in r.filename
    ]
    loaded = single_file.load(tmp_path / "ours.ckpt", weights_only=True)
    assert_same_tensors(loaded["state_dict"], content["state_dict"])


@pytest.mark.parametrize("name", ["theirs", "ours"])
def test_no_flipped_bit_of_a_single_file_is_loaded(name, tmp_path):
    expected, file = single_files(tmp_path), tmp_path / f"{name}.ckpt"
    whole, refused = file.read_bytes(), 0
    for position in range(0, len(whole), 5):
        file.write_bytes(
            whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :]
        )
        try:
            loaded = single_file.load(file, weights_only=True)
        except CheckpointError as error:
            assert str(file) in str(error)
            refused += 1
        else:  # what was hit is padding, or says what nobody reads
            assert loaded["epoch"] == expected["epoch"]
            assert_same_tensors(loaded["state_dict"], expected["state_dict"])
    assert refused > len(whole) / 20


def test_files_without_checksums_are_loaded(tmp_path):
    old, without = tmp_path / "old.ckpt", tmp_path / "without.ckpt"
    torch.save({"a": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, without)
    finally:
        torch.serialization.set_crc32_options(True)
    for file in (old, without):
        assert torch.equal(single_file.load(file, weights_only=True)["a"], torch.ones(3))


def content(path):
    return {file.name: file.read_bytes() for file in (path.iterdir() if path.is_dir() else [path])}


def fill_disk(rank, world_size, folder):
    """A rank that writes may write no more than a kilobyte at the second save."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for kind, full_for in (("sharded", 1), ("file", 1)):
        path = Path(folder, f"{kind}.ckpt")
        runner = trainer(zero3(checkpoint=CheckpointOptions(kind=kind)), world_size)
        runner.fit(Whole(RECIPE))
        runner.save_checkpoint(path)
        before = content(path)
        gc.collect()  # the store of an earlier Trainer writes to its file when it goes
        if rank == full_for:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        with pytest.raises(
            CheckpointError, match=f"Saving .*{kind}.ckpt failed on rank {full_for}: .*"
        ):
            runner.save_checkpoint(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert content(path) == before
        runner.save_checkpoint(path)  # there is room again
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path):
    assert run_ranks(fill_disk, 2, str(tmp_path), timeout=60) == [["file.ckpt", "sharded.ckpt"]] * 2


def save_in_vain(rank, world_size, folder):
    """Of a user who may not write to the folder; after the run has begun, as root may always."""
    for kind in ("sharded", "file"):
        path = Path(folder, f"{kind}.ckpt")
        runner = trainer(zero3(checkpoint=CheckpointOptions(kind=kind)), world_size)
        runner.fit(Whole(RECIPE))
        runner.save_checkpoint(path)
        before = content(path)
        dist.barrier()
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # nobody
        with pytest.raises(
            CheckpointError, match=rf"Saving .*{kind}.ckpt failed on rank 0: PermissionError"
        ):
            runner.save_checkpoint(path)
        dist.barrier()
        os.seteuid(os.getuid())
        os.chmod(folder, 0o755)
        assert content(path) == before
        runner.save_checkpoint(path)  # it may be written to again
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_read_only_folder_keeps_the_checkpoint_before(tmp_path):
    for parent in (tmp_path, *tmp_path.parents) if os.geteuid() == 0 else ():
        parent.chmod(parent.stat().st_mode | 0o055)  # nobody gets there
    found = run_ranks(save_in_vain, 2, str(tmp_path), timeout=60)
    assert found == [["file.ckpt", "sharded.ckpt"]] * 2


class Payload:
    """What a pickle can make of loading: here, a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


class ByAttribute(pickle.Pickler):
    """As Python 3.11.0 to 3.11.3 pickle members of enumerations."""

    def reducer_override(self, obj):
        by_name = isinstance(obj, _MEM_FORMAT_ENCODING)
        return (getattr, (type(obj), obj.name)) if by_name else NotImplemented


def test_members_of_enumerations_may_be_pickled_as_attributes(tmp_path):
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    expected = dcp.FileSystemReader(tmp_path).read_metadata()
    with open(tmp_path / ".metadata", "wb") as file:
        ByAttribute(file).dump(expected)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_index(tmp_path).state_dict_metadata == expected.state_dict_metadata


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


@pytest.mark.parametrize("options", [{"kind": "sharded"}, {"background": True}, {"kind": "both"}])
def test_what_would_be_ignored_is_refused(options):
    with pytest.raises(ValueError, match=r"would never be used|choose 'file' or 'sharded'"):
        trainer(
            zero3(checkpoint=CheckpointOptions(**options), checkpoint_io=AsyncCheckpointIO())
        ).fit(Whole(RECIPE))


def save_elsewhere(rank, world_size):
    """To a file system of fsspec's, which lives in this process."""
    module = Whole(RECIPE)
    saver = ModelCheckpoint("memory://runs", save_last=True)
    with pytest.raises(
        ValueError,
        match=r"ModelCheckpoint\(dirpath='memory://runs'\): .*CheckpointOptions\(\)",
    ):
        strategy = zero3(checkpoint=CheckpointOptions(kind="sharded"))
        trainer(strategy, callbacks=[saver], enable_checkpointing=True).fit(module)
    assert not module.losses, "training began"
    runner = trainer(zero3(), callbacks=[saver], enable_checkpointing=True)
    runner.fit(module)
    assert saver.last_model_path == "memory://runs/last.ckpt"
    result = train(world_size, Whole(RECIPE), 2, read="memory://runs/last.ckpt")
    whole = train(world_size, Whole(RECIPE), 2)
    assert result.losses == whole.losses[len(module.losses) :]


class Unavailable(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        raise OSError(f"503: {path}")


def fail_elsewhere(rank, world_size):
    """The run goes on where a store takes no checkpoint and the error is caught."""
    module, errors = Whole(RECIPE), []

    class Saves(Callback):
        def on_train_batch_end(self, trainer, *_):
            try:
                trainer.save_checkpoint("memory://runs/x.ckpt")
            except CheckpointError as error:
                errors.append(str(error))

    runner = trainer(zero3(checkpoint_io=Unavailable()), world_size, callbacks=[Saves()])
    runner.fit(module)
    return errors


def test_a_store_that_fails_is_an_error_on_all_ranks():
    first, second = run_ranks(fail_elsewhere, 2, timeout=60)
    assert first == second and len(first) > 1
    assert (
        first[0]
        == "Saving memory://runs/x.ckpt failed on rank 0: OSError: 503: memory://runs/x.ckpt"
    )


def test_object_stores_take_single_files_only():
    run_ranks(save_elsewhere, 1, timeout=60)
