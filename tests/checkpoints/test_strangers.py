"""Checkpoints and folders of strangers: what a file can do is to be refused."""

import io
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import stat
import zipfile
import zlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from helpers.parity import trainer
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions, Zero3Strategy
from lightning_zero3.__main__ import main
from lightning_zero3.strategies.checkpoints import single_file, storage
from lightning_zero3.strategies.checkpoints.index import read_index
from lightning_zero3.strategies.checkpoints.manifest import INDEX, MANIFEST
from lightning_zero3.strategies.checkpoints.sharded import ShardedCheckpoint
from lightning_zero3.strategies.checkpoints.weights import open_weights
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLASSES = [
    *(cls for cls in vars(dcp_metadata).values() if isinstance(cls, type)),
    _StorageInfo,
    pathlib.Path,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    torch.Size,
    torch.dtype,
]
MODULES = [pathlib, os, pickle, torch, torch.serialization, dcp_metadata]


def fit(folder, kind="sharded"):
    strategy = Zero3Strategy(checkpoint=CheckpointOptions(kind=kind))
    runner = trainer(strategy, max_steps=1, num_sanity_val_steps=0)
    runner.fit(BoringModel())
    runner.save_checkpoint(folder)
    return runner


def sharded(rank, world_size, folder):
    fit(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A sharded checkpoint, written by another process."""
    folder = tmp_path_factory.mktemp("stranger") / "model.ckpt"
    run_ranks(sharded, 1, folder)
    return folder


def copy(checkpoint, to, index):
    """The checkpoint with another index, whose checksum is right."""
    to.mkdir()
    for file in checkpoint.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / INDEX).write_bytes(index)
    manifest = json.loads((to / "manifest.json").read_text())
    manifest["files"][INDEX] = {"bytes": len(index), "crc32": zlib.crc32(index)}
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


def named(module, name):
    return b"c" + f"{module}\n{name}\n".encode()


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def snapshot():
    """Attributes of classes and modules that an index can name, by identity."""
    owners = [*CLASSES, *MODULES]
    return {
        (str(owner), name): value for owner in owners for name, value in list(vars(owner).items())
    }


def assert_unchanged(before):
    after = snapshot()
    assert after.keys() == before.keys()
    assert [key for key, value in before.items() if after[key] is not value] == []


def test_an_index_that_sets_attributes_of_a_class_is_refused(checkpoint, tmp_path, capsys):
    mine = tmp_path / "notes.txt"
    mine.write_text("years of work")
    path = named("pathlib", "PosixPath")
    pairs = b"".join(
        text(key) + path + text(str(value)) + b"\x85R"
        for key, value in (("name", mine), ("parent", tmp_path))
    )
    index = b"\x80\x04" + path + b"N}(" + pairs + b"u\x86b0" + (checkpoint / INDEX).read_bytes()
    before, bad = snapshot(), copy(checkpoint, tmp_path / "bad.ckpt", index)
    assert main(["consolidate", str(bad), str(tmp_path / "out.ckpt")]) == 1
    assert INDEX in capsys.readouterr().err
    assert_unchanged(before)
    assert mine.read_text() == "years of work" and not (tmp_path / "out.ckpt").exists()


META, FILESYSTEM = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
REFUSED = {
    "a call of a function": named("os", "system") + text("true") + b"\x85R.",
    "a call of a method": named("builtins", "getattr")
    + named("torch", "Size")
    + text("x")
    + b"\x86R.",
    "a state for a class": named(META, "Metadata") + b"}" + text("a") + b"K\x01sb.",
    "a state for a function": named("torch.serialization", "_get_layout")
    + b"}"
    + text("a")
    + b"K\x01sb.",
    "an attribute of no field": named(META, "Metadata") + b")\x81}" + text("open") + b"K\x01sb.",
    "an item of a class": named(META, "_MEM_FORMAT_ENCODING") + text("a") + b"K\x01s.",
    "an instance of another class": named("collections", "OrderedDict") + b")\x81.",
    "a name in a module of a module": named("torch.os", "system") + b".",
    "an extension": b"\x82\x01.",
    "persistent data": b"Pa\n.",
    "nothing": b"",
    "a number": b"K\x01.",
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_indexes_are_refused(what, tmp_path):
    before = snapshot()
    (tmp_path / INDEX).write_bytes(b"\x80\x04" + REFUSED[what])
    with pytest.raises(CheckpointError, match="is no index as torch writes it"):
        read_index(tmp_path)
    assert_unchanged(before)


def placed_in(checkpoint, file):
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = file
    return pickle.dumps(metadata)


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "..", "", "a/b", "a\0b"])
def test_names_of_files_stay_in_the_folder(file, checkpoint, tmp_path):
    (tmp_path / INDEX).write_bytes(placed_in(checkpoint, file))
    with pytest.raises(CheckpointError, match="which is no name of a file in the folder"):
        read_index(tmp_path)


def too_long_a_list(metadata):
    metadata.planner_data[next(iter(metadata.planner_data))] = ("state_dict", 300_000_000)


def size_without_chunks(metadata):
    kind = next(k for k in metadata.state_dict_metadata.values() if hasattr(k, "chunks"))
    kind.size, kind.chunks = torch.Size([10**12]), []


def one_chunk_four_times(metadata):
    kind = next(k for k in metadata.state_dict_metadata.values() if hasattr(k, "chunks"))
    size = torch.Size([len(kind.size) * 4 or 4])
    part = dcp_metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([size[0] // 4]))
    kind.size, kind.chunks = size, [part] * 4


def more_than_the_file_has(metadata):
    kind = next(k for k in metadata.state_dict_metadata.values() if hasattr(k, "chunks"))
    size = torch.Size([2**40] * len(kind.size))
    kind.size, kind.chunks = (
        size,
        [dcp_metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


def chunk_without_a_place(metadata):
    index = next(i for i in metadata.storage_data if i.offset is not None)
    del metadata.storage_data[index]


def two_in_one_place(metadata):
    first, second = list(metadata.storage_data.values())[:2]
    second.relative_path, second.offset = first.relative_path, first.offset


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (too_long_a_list, "is no path"),
        (size_without_chunks, "has chunks of 0 of 1,000,000,000,000 elements"),
        (one_chunk_four_times, r"has chunks of \d of \d elements"),
        (more_than_the_file_has, r"bytes for a chunk of [\d,]{16,} bytes"),
        (chunk_without_a_place, "has 0 bytes for a chunk of"),
        (two_in_one_place, "has two values at byte"),
    ],
)
def test_claims_are_compared_with_each_other(change, words, checkpoint, tmp_path):
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    change(metadata)
    (tmp_path / INDEX).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=words):
        read_index(tmp_path)


def deflate(file, begin=0, end=None):
    """Compress the records of a zip file, or of one in a part of a file, and say how long it is."""
    data = file.read_bytes()
    whole = zipfile.ZipFile(io.BytesIO(data[begin:end]))
    small = io.BytesIO()
    with zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as archive:
        for record in whole.infolist():
            archive.writestr(record.filename, whole.read(record))
    file.write_bytes(data[:begin] + small.getvalue() + (b"" if end is None else data[end:]))
    return len(small.getvalue())


def write_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("what", ["meta.pt", "shard"])
def test_records_are_as_large_as_the_place_they_take(what, checkpoint, tmp_path, capsys):
    bad = copy(checkpoint, tmp_path / "bad.ckpt", (checkpoint / INDEX).read_bytes())
    if what == "shard":
        metadata = pickle.loads((bad / INDEX).read_bytes())
        places = metadata.storage_data.values()
        last = max(places, key=lambda place: (place.relative_path, place.offset))
        last.length = deflate(bad / last.relative_path, last.offset, last.offset + last.length)
        (bad / INDEX).write_bytes(pickle.dumps(metadata))
    else:
        deflate(bad / "meta.pt")
    write_manifest(bad)
    assert main(["consolidate", str(bad), str(tmp_path / "out.ckpt")]) == 1
    assert "is compressed" in capsys.readouterr().err
    # What the command has made is gone.
    assert [file.name for file in tmp_path.iterdir()] == ["bad.ckpt"]


def test_a_file_has_no_compressed_records(tmp_path, capsys):
    bomb = tmp_path / "bad.ckpt"
    torch.save({"state_dict": {"a": torch.zeros(1 << 22)}}, bomb)
    assert deflate(bomb) < 1 << 16
    assert main(["inspect", str(bomb)]) == 1 and "is compressed" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="is compressed"):
        open_weights(bomb, weights_only=True)


def test_names_do_not_write_to_the_terminal(checkpoint, tmp_path, capsys):
    name = "a\x1b[2J\r\nlast.ckpt: complete \u202eb"
    torch.save({"epoch": name, "state_dict": {name: torch.ones(2)}}, tmp_path / "it.ckpt")
    bad = copy(checkpoint, tmp_path / f"{name}.ckpt", (checkpoint / INDEX).read_bytes())
    (bad / name).write_text("x")
    for path, lines in ((tmp_path / "it.ckpt", 4), (bad, None), (tmp_path, 2)):
        assert main(["inspect", str(path)]) == 0
        printed = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in printed)
        assert "a\\x1b[2J\\r\\nlast.ckpt: complete \\u202eb" in printed
        assert "\nlast.ckpt" not in printed and printed.count("\n") == (
            lines or printed.count("\n")
        )
    assert main(["inspect", str(tmp_path / f"{name}none")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


LOOP = b"\x80\x02]q\x00h\x00a"  # a list that has itself as its item, without the end


def pickled(content):
    """A file of torch.save whose pickle is another one."""
    whole, other = io.BytesIO(), io.BytesIO()
    torch.save({}, whole)
    with zipfile.ZipFile(whole) as read, zipfile.ZipFile(other, "w") as write:
        for record in read.infolist():
            data = content if record.filename.endswith("data.pkl") else read.read(record)
            write.writestr(record.filename, data)
    return other.getvalue()


def change_manifest(**items):
    def change(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, **items}))

    return change


def with_file(name, content):
    def change(folder):
        (folder / name).write_bytes(content)
        write_manifest(folder)

    return change


MALFORMED = {
    "a list for an index": with_file(INDEX, b"]."),
    "a list in itself for an index": with_file(INDEX, LOOP + b"."),
    "a list in itself in the trainer's state": with_file("meta.pt", pickled(LOOP + b".")),
    "a list for the trainer's state": with_file("meta.pt", pickled(b"].")),
    "junk for the trainer's state": with_file("meta.pt", b"junk"),
    "a count that is none": change_manifest(files={INDEX: {"bytes": 1e300, "crc32": 0}}),
    "a number for the files": change_manifest(files=3),
    "junk for a manifest": lambda folder: (folder / "manifest.json").write_text("junk"),
    "a list for a manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "brackets for a manifest": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
}
FILES = {
    "junk": b"junk",
    "nothing": b"",
    "a list": pickled(b"]."),
    "a list in itself": pickled(LOOP + b"."),
    "a dict of a list in itself": pickled(b"\x80\x02}X\n\x00\x00\x00state_dict" + LOOP[2:] + b"s."),
    "a beginning": pickled(b"].")[:50],
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_checkpoint_is_one_sentence(what, checkpoint, tmp_path, capsys):
    bad = copy(checkpoint, tmp_path / "bad.ckpt", (checkpoint / INDEX).read_bytes())
    MALFORMED[what](bad)
    if "trainer" not in what:  # which `inspect` does not read
        assert main(["inspect", str(bad)]) == 1
        said = capsys.readouterr()
        assert (said.out + said.err).count("\n") == 1
    assert main(["consolidate", str(bad), str(tmp_path / "out.ckpt")]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and str(bad) in said.err and said.out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["bad.ckpt"]


@pytest.mark.parametrize("what", FILES)
def test_a_malformed_file_is_one_sentence(what, tmp_path, capsys):
    bad = tmp_path / "bad.ckpt"
    bad.write_bytes(FILES[what])
    assert main(["inspect", str(bad)]) == 1
    said = capsys.readouterr()
    assert (said.out + said.err).count("\n") == 1 and str(bad) in said.out + said.err


def test_errors_do_not_write_to_the_terminal():
    error = CheckpointError("a\x1b[2J\rb\u202ec\n  hint \u00fc")
    assert str(error) == "a\\x1b[2J\\rb\\u202ec\n  hint \u00fc"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "meta.pt", INDEX, "manifest.json"]
)
def test_a_fifo_in_the_place_of_a_file_is_an_error(name, checkpoint, tmp_path, capsys):
    bad = copy(checkpoint, tmp_path / "bad.ckpt", (checkpoint / INDEX).read_bytes())
    if name != "manifest.json":
        (bad / "manifest.json").unlink()  # it has names of files and sizes
    (bad / name).unlink(missing_ok=True)
    os.mkfifo(bad / name)
    if "safetensors" in name:
        with pytest.raises(CheckpointError, match="is no file"):
            open_weights(bad, weights_only=True)
    else:
        assert main(["consolidate", str(bad), str(tmp_path / "out.ckpt")]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_a_safetensors_index_names_files_of_its_folder_alone(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="is no file in its folder"):
        open_weights(tmp_path, weights_only=True)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_of_torch_is_read_as_torch_reads_it(protocol, checkpoint, tmp_path):
    expected = dcp.FileSystemReader(checkpoint).read_metadata()
    (tmp_path / INDEX).write_bytes(pickle.dumps(expected, protocol))
    found = read_index(tmp_path)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data
    assert found.planner_data == expected.planner_data


SNIPPETS = [
    named("pathlib", "PosixPath"),
    named(META, "Metadata"),
    named(META, "MetadataIndex"),
    named(META, "_MEM_FORMAT_ENCODING"),
    named(FILESYSTEM, "_StorageInfo"),
    named("torch", "Size"),
    named("torch", "float32"),
    text("name"),
    text("sizes"),
    *(bytes([code]) for code in b"}])(0NRb\x81\x85\x86\x87\x94seau.2"),
    b"h\x00",
    b"K\x07",
    b"N}(X\x04\x00\x00\x00nameK\x01u\x86b",
]


def mutate(data, rng):
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.randint(1, 8)]
        elif kind == 2:
            data[place:place] = b"".join(rng.choices(SNIPPETS, k=rng.randint(1, 5)))
        else:
            other = rng.randrange(len(data))
            data[place:place] = data[other : other + rng.randint(1, 40)]
    return bytes(data)


def test_two_thousand_mutated_indexes_change_nothing(checkpoint, tmp_path):
    """Each is an error of ours, or has the right types; classes, modules and functions stay."""
    whole, rng, before = (checkpoint / INDEX).read_bytes(), random.Random(1), snapshot()
    read = 0
    for _ in range(2000):
        (tmp_path / INDEX).write_bytes(mutate(whole, rng))
        try:
            assert type(read_index(tmp_path)) is dcp_metadata.Metadata
            read += 1
        except CheckpointError:
            pass
    assert_unchanged(before)
    assert 0 < read < 1000


def test_each_row_of_the_guides_table_has_its_test():
    table = (ROOT / "docs" / "understand" / "files-of-others.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    tests = {name for name in globals() if name.startswith("test_")}
    tests |= {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    told = [name for *_, names in rows for name in re.findall("`(.*?)`", names)]
    assert len(rows) >= 13 and set(told) <= tests
    assert [row[0] for row in rows if "`" not in row[-1]] == [rows[-1][0]]  # what a file can do


class Code:
    """Runs when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("what", ["file", "meta.pt", "value in a shard"])
def test_no_file_runs_code_unless_it_is_trusted(what, checkpoint, tmp_path, capsys):
    bad, mark = tmp_path / "bad.ckpt", tmp_path / "mark"
    content = io.BytesIO()
    torch.save({"epoch": Code(mark), "state_dict": {}}, content)
    if what == "file":
        bad.write_bytes(content.getvalue())
        with pytest.raises(CheckpointError):
            open_weights(bad, weights_only=True)
    else:
        metadata = pickle.loads((checkpoint / INDEX).read_bytes())
        copy(checkpoint, bad, (checkpoint / INDEX).read_bytes())
        if what == "meta.pt":
            (bad / "meta.pt").write_bytes(content.getvalue())
        else:
            kinds = metadata.state_dict_metadata
            plain = next(i for i in metadata.storage_data if not hasattr(kinds[i.fqn], "chunks"))
            place = metadata.storage_data[plain]
            file = bad / place.relative_path
            place.offset, place.length = file.stat().st_size, len(content.getvalue())
            file.write_bytes(file.read_bytes() + content.getvalue())
            (bad / INDEX).write_bytes(pickle.dumps(metadata))
        write_manifest(bad)
        assert main(["consolidate", str(bad), str(tmp_path / "out.ckpt")]) == 1
    main(["inspect", str(bad)])
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="weights_only|UnpicklingError"):
        trainer("zero3", 1, max_steps=1).fit(BoringModel(), ckpt_path=bad)
    assert not mark.exists()
    strategy = Zero3Strategy(checkpoint=CheckpointOptions(weights_only=False))
    with pytest.raises(Exception):  # noqa: B017  # what the code returns is nobody's state
        trainer(strategy, 1, max_steps=1).fit(BoringModel(), ckpt_path=bad)
        raise ValueError
    assert mark.exists()  # the code does run where it is let


# ---- folders that others may write to -------------------------------------------------------------


def test_a_file_that_is_exchanged_while_it_is_written_is_not_unpickled(tmp_path, monkeypatch):
    mark, stage = tmp_path / "mark", tmp_path / "stage"
    code, save = Code(mark), torch.save

    def save_and_exchange(*args, **kwargs):
        save(*args, **kwargs)
        stage.unlink()
        save({"state_dict": code}, stage)

    monkeypatch.setattr(torch, "save", save_and_exchange)
    single_file.FileSave.reserve(None, {"state_dict": {"a": torch.ones(3)}}, stage)
    assert not mark.exists()


def test_a_file_that_is_there_is_not_written_to(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("x")
    (tmp_path / "stage").symlink_to(mine)
    with pytest.raises(FileExistsError):
        single_file.FileSave.reserve(None, {"a": torch.ones(3)}, tmp_path / "stage")
    assert mine.read_text() == "x"


def test_what_is_reserved_is_what_torch_loads(tmp_path):
    shared = torch.arange(12.0)
    tree = {
        "a": shared[2:8].view(2, 3).t(),
        "b": [shared, torch.tensor(3, dtype=torch.int64)],
        "empty": torch.empty(0, 4),
        "nested": {"half": torch.ones(5, dtype=torch.bfloat16), "text": "x"},
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    }
    single_file.FileSave(tree, tmp_path / "file").write()
    found = torch.load(tmp_path / "file", weights_only=True)
    assert torch.equal(found["a"], tree["a"]) and torch.equal(found["b"][0], shared)
    assert found["a"].untyped_storage()._cdata == found["b"][0].untyped_storage()._cdata
    assert found["b"][1] == 3 and found["empty"].shape == (0, 4)
    assert torch.equal(found["nested"]["half"], tree["nested"]["half"])
    assert found["conjugated"].tolist() == [1 - 2j, 3 + 1j]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask()


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_links_in_the_place_of_our_folders_are_not_followed(kind, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    (mine / "last.ckpt").mkdir(parents=True)
    (mine / "last.ckpt" / "precious").write_text("x")
    theirs.mkdir()
    for name in (".unfinished", ".zero3-unfinished-0", ".zero3-removed-0"):
        (theirs / name).symlink_to(mine)
    for _ in range(2):  # the second replaces the first, which is removed
        fit(theirs / "last.ckpt", kind)
    assert storage.damage(theirs / "last.ckpt") is None
    assert (mine / "last.ckpt" / "precious").read_text() == "x"
    assert [file.name for file in mine.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_links_in_a_directory_are_refused(has_manifest, checkpoint, tmp_path):
    bad = tmp_path / "bad.ckpt"
    shutil.copytree(checkpoint, bad)
    if not has_manifest:
        (bad / MANIFEST).unlink()
    shard = next(bad.glob("*.distcp"))
    shard.unlink()
    shard.symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=f"{shard.name} .*is a link"):
        ShardedCheckpoint(bad)


@pytest.mark.parametrize("what", ["a FIFO", "a file", "a folder of another user's"])
@pytest.mark.parametrize("name", [".zero3-unfinished-0", ".zero3-removed-0"])
def test_what_others_put_in_the_place_of_our_folders_is_in_nobodys_way(name, what, tmp_path):
    path, other = tmp_path / "a.ckpt", tmp_path / name
    if what == "a FIFO":
        os.mkfifo(other)
    elif what == "a file":
        other.write_text("x")
    else:
        if os.geteuid():
            pytest.skip("only root can give a folder to another user")
        other.mkdir(0o700)
        os.chown(other, 12345, -1)
    for _ in range(2):
        stage = storage.make_folder(path)
        (stage / MANIFEST).write_text("{}")
        storage.commit(stage, path)
    assert {file.name for file in tmp_path.iterdir()} <= {"a.ckpt", name}


def test_a_previous_one_of_the_users_own_is_kept(tmp_path):
    path, users = tmp_path / "last.ckpt", tmp_path / "last.previous.ckpt"
    users.write_text("mine")
    for text_ in ("one", "two"):
        stage = storage.begin(path)
        stage.write_text(text_)
        storage.commit(stage, path)
    assert users.read_text() == "mine" and path.read_text() == "two"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "last.previous.ckpt"]


def test_an_unfinished_checkpoint_is_closed_and_a_complete_one_is_open(tmp_path):
    stage = storage.make_folder(tmp_path / "a.ckpt")
    assert stat.S_IMODE(stage.parent.stat().st_mode) == 0o700
    storage.commit(stage, tmp_path / "a.ckpt")
    assert stat.S_IMODE((tmp_path / "a.ckpt").stat().st_mode) == 0o777 & ~umask()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_complete_checkpoint_may_be_replaced(tmp_path):
    path = tmp_path / "a.ckpt"
    storage.commit(storage.make_folder(path), path)
    os.chown(path, 12345, -1)
    storage.commit(storage.make_folder(path), path)
    assert path.stat().st_uid == 0 and [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def test_only_what_this_package_deletes_is_deleted(tmp_path):
    (tmp_path / ".removed").mkdir()
    for left in ("removed-0", "unfinished-0/b.ckpt", "unfinished-1/a.ckpt"):
        (tmp_path / f".zero3-{left}").mkdir(parents=True)
    (tmp_path / "a.ckpt").mkdir()
    storage.remove(tmp_path / "a.ckpt")
    left = {".removed", ".zero3-unfinished-0", ".zero3-unfinished-1"}
    assert {path.name for path in tmp_path.iterdir()} == left
    stage = storage.begin(tmp_path / "a.ckpt")
    left = {".removed", ".zero3-unfinished-0", stage.parent.name}
    assert {path.name for path in tmp_path.iterdir()} == left
