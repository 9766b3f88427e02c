"""One file that all ranks write at once: what each of them writes, what a hook adds, and what is
refused of a file that somebody else made.
"""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import platform
import random
import re
import struct
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints.runs import Shuffled, Whole, full_weights, train
from helpers.models import Recipe
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints import regions, single_file, zip_file
from lightning_zero3.strategies.checkpoints.weights import WeightsSave
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

RECIPE = Recipe(tied=True, optimizer="adamw", frozen=("blocks.1",), steps=2)


def written(rank, world_size, path, options):
    """The file's bytes that this rank wrote, and the full weights."""
    pieces, write = [], regions.write_regions

    def write_regions(stage, mine):
        pieces.extend(write(stage, mine))
        return pieces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "write_regions", write_regions)
        result = train(world_size, Whole(RECIPE), 1, write=path, strategy=zero3(**options))
    return sum(piece.size for piece in pieces), result.weights


@pytest.mark.parametrize("options", [{}, {"shard_size": 2}], ids=["one replica", "two replicas"])
def test_every_rank_writes_its_share_and_no_byte_is_written_twice(options, tmp_path):
    path = tmp_path / "a.ckpt"
    ranks = run_ranks(written, 4, str(path), options, timeout=60)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        size = sum(r.file_size for r in archive.infolist() if "/data/" in r.filename)
    shares = [share for share, _ in ranks]
    assert sum(shares) == size
    tensors = [t for t in ranks[0][1].values() if t.numel()]
    # rank 0 has buffers and random states of all ranks, too
    assert max(shares[1:]) < 0.4 * sum(shares[1:])
    assert min(shares) > sum(t.nbytes for t in tensors) / 8
    loaded = torch.load(path, weights_only=True, mmap=True)["state_dict"]
    assert_same_tensors(dict(loaded), ranks[0][1])
    assert loaded["net.head.weight"].data_ptr() == loaded["net.embed.weight"].data_ptr()


class Hidden:
    """An object that has a tensor, of which the checkpoint does not know."""

    def __init__(self, tensor):
        self.tensor = tensor


class Hooked(Shuffled):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["added"] = {"list": [torch.arange(5), "text"], "hidden": Hidden(torch.ones(3))}
        checkpoint["state_dict"]["net.0.bias"] = torch.full((16,), 7.0)
        checkpoint["state_dict"]["renamed"] = checkpoint["state_dict"].pop("net.3.bias")
        checkpoint["again"] = checkpoint["state_dict"]["net.3.weight"]

    def on_load_checkpoint(self, checkpoint):
        self.added = checkpoint["added"]
        checkpoint["state_dict"]["net.3.bias"] = checkpoint["state_dict"].pop("renamed")


def hook(rank, world_size, path):
    options = {"unit_policy": None, "checkpoint": CheckpointOptions(weights_only=False)}
    first = trainer(zero3(**options), world_size, max_epochs=1)
    first.fit(Hooked())
    first.save_checkpoint(path)
    module = Hooked()
    again = trainer(zero3(**options), world_size, max_epochs=1)
    again.fit(module, ckpt_path=path)
    return full_weights(first), full_weights(again), module.added


def test_hooks_add_replace_and_rename_tensors(tmp_path):
    path = tmp_path / "a.ckpt"
    (saved, loaded, added), *_ = run_ranks(hook, 2, str(path))
    assert_same_tensors(loaded, {**saved, "net.0.bias": torch.full((16,), 7.0)})
    assert (
        added["list"][0].tolist() == [0, 1, 2, 3, 4] and added["hidden"].tensor.tolist() == [1] * 3
    )
    read = torch.load(path, weights_only=False)
    assert torch.equal(read["again"], saved["net.3.weight"])
    # as torch saves a state dict: versions of modules are in it
    assert read["state_dict"]._metadata["net.0"] == {"version": 1}


def test_checksums_of_pieces_are_the_checksum_of_the_whole():
    chance = random.Random(3)
    content = chance.randbytes(5000)
    for count in (1, 2, 7, 300):
        cuts = [0, *sorted(chance.sample(range(1, 5000), count - 1)), 5000]
        joined = 0
        for start, stop in zip(cuts, cuts[1:], strict=False):
            part = content[start:stop]
            joined = zip_file._join_two(joined, zip_file.Piece(start, len(part), zlib.crc32(part)))
        assert joined == zlib.crc32(content)


def test_a_byte_that_no_rank_wrote_is_an_error(tmp_path, monkeypatch):
    write = regions.write_regions
    monkeypatch.setattr(regions, "write_regions", lambda stage, mine: write(stage, mine[:-1]))
    with pytest.raises(CheckpointError, match=r"byte [\d,]+, of the record .*/data/\d', was"):
        single_file.FileSave({"a": torch.ones(3), "b": torch.zeros(4)}, tmp_path / "a.ckpt").write()
    assert list(tmp_path.rglob("*.ckpt")) == []


# ---- files of others ---------------------------------------------------------------------------


def repack(file, change):
    """Write the records of a file anew, in another way."""
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    change(file, records)


def compressed(file, records):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def twice(file, records):
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in [*records.items(), *list(records.items())[-1:]]:
            archive.writestr(name, content)


def overlapping(file, records):
    """The directory says of a record that it is longer than it is."""
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"data/0") - len(file.stem) - 1 - 46
    assert content[entry : entry + 4] == b"PK\1\2"
    for field in (20, 24):  # compressed size, size
        content[entry + field : entry + field + 4] = (800).to_bytes(4, "little")
    file.write_bytes(content)


def outside(file, records):
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"data/1") - len(file.stem) - 1 - 46
    for field in (20, 24):
        content[entry + field : entry + field + 4] = (1 << 31).to_bytes(4, "little")
    file.write_bytes(content)


@pytest.mark.parametrize(
    "change, said",
    [
        (compressed, "is compressed or encrypted"),
        (twice, "two of its records have one name"),
        (overlapping, "reaches into what follows it"),
        (outside, "reaches into what follows it"),
    ],
)
def test_what_torch_does_not_write_is_refused(change, said, tmp_path):
    file = tmp_path / "a.ckpt"
    torch.save({"a": torch.ones(64), "b": torch.zeros(64)}, file)
    assert single_file.load(file, weights_only=True)["a"].sum() == 64
    repack(file, change)
    with pytest.raises(CheckpointError, match=f"Loading {file} failed: .*{said}"):
        single_file.load(file, weights_only=True)


def test_what_a_callback_keeps_is_not_mapped(tmp_path):
    """It would keep a deleted file's bytes on the disk. Large tensors are read when they are used."""
    path = tmp_path / "a.ckpt"
    large, small, sparse = torch.zeros(1 << 20), torch.arange(3.0), torch.eye(3).to_sparse()
    callbacks = {"c": {"large": large, "small": [small, (small, {"s": small})], "sparse": sparse}}
    torch.save({"state_dict": {"w": large}, "callbacks": callbacks, "optimizer_states": []}, path)
    content = single_file.load(path, weights_only=True)
    assert str(path) in Path("/proc/self/maps").read_text()
    kept = content.pop("callbacks")["c"]
    kept.pop("large")
    del content
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(kept["small"][1][1]["s"], small)


# ---- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def as_nobody():
    """Root may write to any folder, so it becomes somebody else for the time of a test."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


def test_a_folder_that_may_not_be_written_to(as_nobody):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o500)
        with pytest.raises(CheckpointError, match=f"Saving {folder}/a.ckpt failed: Permission"):
            single_file.FileSave({"a": torch.ones(3)}, Path(folder, "a.ckpt"))
        assert not os.listdir(folder)
        os.chmod(folder, 0o700)


FALLOCATE = {"x86_64": 285, "aarch64": 47}  # Linux' number of it


def refuse_fallocate():
    """Answer as CephFS, BeeGFS and older NFS do, for the rest of this process."""
    load, jump, answer = 0x20, 0x15, 0x06  # of seccomp: the call's number; if it is another
    refused, allowed = 0x00050000 | errno.EOPNOTSUPP, 0x7FFF0000
    number = FALLOCATE[platform.machine()]
    program = [(load, 0, 0, 0), (jump, 0, 1, number), (answer, 0, 0, refused)]
    code = b"".join(struct.pack("HBBI", *line) for line in [*program, (answer, 0, 0, allowed)])
    memory = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", 4, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # gain no rights
    assert libc.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())


def save_without_room(rank, world_size, folder):
    refuse_fallocate()
    begun, state = reads(), {"a": torch.ones(1 << 22)}
    single_file.FileSave(state, Path(folder, "a.ckpt")).write()
    WeightsSave(state, Path(folder, "weights")).write()
    # nothing was looked at page by page
    assert reads() - begun < 500


def reads():
    """How many system calls of this process have read."""
    text = Path("/proc/self/io").read_text()
    return int(re.search(r"syscr: (\d+)", text)[1])


@pytest.mark.skipif(platform.machine() not in FALLOCATE, reason="another number of fallocate")
def test_a_file_system_that_gives_no_room_in_advance(tmp_path):
    run_ranks(save_without_room, 1, str(tmp_path))
    for state in (
        torch.load(tmp_path / "a.ckpt", weights_only=True),
        load_file(tmp_path / "weights" / "model.safetensors"),
    ):
        assert torch.equal(state["a"], torch.ones(1 << 22))


def test_two_jobs_that_write_one_name(tmp_path):
    """The second deletes what the first has begun, which is told; its own is complete."""
    path = tmp_path / "a.ckpt"
    first = single_file.FileSave({"a": torch.zeros(3)}, path)
    second = single_file.FileSave({"a": torch.ones(3)}, path)
    second.write()
    with pytest.raises(CheckpointError, match=f"Saving {path} failed"):
        first.write()
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(3))


# ---- large ---------------------------------------------------------------------------------------


def test_more_than_4_gib(tmp_path):
    """Tensors above 2 GiB, of which every 2**22nd element says its place; the rest needs no
    memory.
    """
    path, count, step = tmp_path / "a.ckpt", 2**29 + 2**20, 2**22
    tensors = {name: torch.zeros(count) for name in ("a", "b")}
    for value in tensors.values():
        value[::step] = torch.arange(len(value[::step]), dtype=torch.float32)
    single_file.FileSave(tensors, path).write()
    assert path.stat().st_size > 2**32
    for loaded in (single_file.load(path, weights_only=True), torch.load(path, mmap=True)):
        for name, value in tensors.items():
            assert loaded[name].shape == (count,)
            assert torch.equal(loaded[name][::step], value[::step])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("refused", ["nowhere", "by open", "by write"])
def test_large_blocks_are_written_directly_where_that_is_possible(refused, tmp_path, monkeypatch):
    """Runs that begin and end within pages, larger and smaller than a block."""
    values = torch.arange(5_000_003, dtype=torch.float32).view(torch.uint8)
    sizes = [17, 3 << 20, 999, (9 << 20) + 5]
    parts = values[: sum(sizes)].split(sizes)
    offsets = [sum(sizes[:k]) + 13 * (k + 1) for k in range(len(sizes))]
    expected = bytearray(offsets[-1] + sizes[-1])
    for offset, part in zip(offsets, parts, strict=True):
        expected[offset : offset + len(part)] = part.numpy().tobytes()
    (tmp_path / "file").write_bytes(bytes(len(expected)))
    directly, pwrite, o_direct = [], os.pwrite, os.O_DIRECT
    try:
        os.close(os.open(tmp_path / "file", os.O_RDWR | o_direct))
    except OSError:
        pytest.skip("this file system has no direct writes")

    def watched(descriptor, block, offset):
        is_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & o_direct)
        if is_direct and refused == "by write":
            raise OSError(errno.EINVAL, "Invalid argument")
        written = pwrite(descriptor, block, offset)
        directly.append((is_direct, written))
        return written

    monkeypatch.setattr(os, "pwrite", watched)
    if refused == "by open":
        monkeypatch.delattr(os, "O_DIRECT")  # as on systems that have none
    pieces = regions.write_regions(
        tmp_path,
        [
            regions.Region(regions.Place("file", offset), part.size(), (0,), part)
            for offset, part in zip(offsets, parts, strict=True)
        ],
    )
    assert (tmp_path / "file").read_bytes() == expected
    assert pieces == [
        zip_file.Piece(offset, size, zlib.crc32(part.numpy()))
        for offset, size, part in zip(offsets, sizes, parts, strict=True)
    ]
    large = sum(size for is_direct, size in directly if is_direct)
    # the pages within the second run, and a block of the last, whose rest is no large one
    pages = (offsets[1] + sizes[1]) // mmap.PAGESIZE - -(-offsets[1] // mmap.PAGESIZE)
    assert large == (pages * mmap.PAGESIZE + (8 << 20) if refused == "nowhere" else 0)


def test_small_views_of_a_large_tensor_are_copies_of_themselves_alone(tmp_path):
    large, path = torch.arange(1 << 18, dtype=torch.float32), tmp_path / "a.ckpt"
    torch.save({"state_dict": {}, "callbacks": [large[4 * k : 4 * k + 4] for k in range(9)]}, path)
    views = single_file.read(path, True)["callbacks"]
    assert [view[0].item() for view in views] == [4 * k for k in range(9)]
    assert {view.untyped_storage().nbytes() for view in views} == {16}
