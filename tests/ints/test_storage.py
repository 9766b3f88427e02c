"""Checkpoints on disk: whatever moment a process dies at, a whole one is found and a broken one is
named.
"""

import errno
import os
import re
from contextlib import suppress
from functools import partial

import pytest

from helpers.kills import Died, kill_at
from lightning_zero3.strategies.checkpoints import storage
from lightning_zero3.strategies.checkpoints.manifest import (
    MANIFEST,
    changed,
    damage,
    measure,
    read_manifest,
    write_manifest,
)
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError


def die():
    raise Died


def write(path, step, world_size=2):
    """Save a directory as the strategy does, without tensors."""
    stage = storage.begin(path)
    stage.mkdir()
    files = {}
    for rank in range(world_size):
        file = stage / f"__{rank}_0.distcp"
        file.write_text(f"step {step}, rank {rank}")
        files[file.name] = measure(file)
    write_manifest(stage, files, global_step=step)
    os.utime(stage / MANIFEST, (step, step))
    storage.commit(stage, path)


def step_of(path):
    return read_manifest(path)["global_step"]


def newest(folder):
    """The newest directory that is whole."""
    whole = [path for path in folder.glob("*.ckpt") if damage(path) is None]
    return max(whole, key=lambda path: (path / MANIFEST).stat().st_mtime, default=None)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # a test needs no protection from power cuts
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("name", ["last.ckpt", "step=2.ckpt"])
def test_killed_at_any_moment_a_whole_one_is_left(tmp_path, monkeypatch, name):
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / name, 1)
        with monkeypatch.context() as patch:
            calls = kill_at(patch, number)
            try:
                write(folder / name, 2)
            except Died:
                pass
        found = newest(folder)
        assert found is not None and damage(found) is None and changed(found, 0, 1) is None
        assert step_of(found) in (1, 2)
        # what Lightning looks at
        visible = [path for path in folder.iterdir() if path.suffix == ".ckpt"]
        assert visible and not any(map(damage, visible))
        assert all(path.name.startswith(name.removesuffix(".ckpt")) for path in visible)
        write(folder / name, 3)  # and the next run is not disturbed
        assert step_of(folder / name) == 3
        left = [path for path in folder.iterdir() if path.name != name]
        assert not any(list(path.iterdir()) for path in left)  # an empty folder, of two calls
        if len(calls) < number:
            break
    assert 5 < number < 99, "the last round was not killed"


@pytest.mark.parametrize("before, after", [("file", "file"), ("link", "link"), ("link", "file")])
def test_a_file_or_a_link_is_replaced_in_one_moment(before, after, tmp_path, monkeypatch):
    (tmp_path / "step=1.ckpt").mkdir()
    for number in range(1, 100):
        path = tmp_path / f"{number}.ckpt"
        path.write_text("1") if before == "file" else path.symlink_to("step=1.ckpt")
        stage = storage.begin(path)
        stage.write_text("2") if after == "file" else stage.symlink_to("step=1.ckpt")
        with monkeypatch.context() as patch:
            calls = kill_at(patch, number)
            with suppress(Died):
                storage.commit(stage, path)
        assert path.exists() and not list(tmp_path.glob("*previous*"))
        if len(calls) < number:
            break
    assert 2 < number < 99, "the last round was not killed"
    assert calls.count("rename") == 0


@pytest.mark.parametrize("before, after", [("folder", "file"), ("file", "folder")])
def test_the_other_kind_is_replaced(before, after, tmp_path):
    path = tmp_path / "last.ckpt"
    for step, kind in enumerate((before, after), 1):
        if kind == "folder":
            write(path, step)
        else:
            stage = storage.begin(path)
            stage.write_text(str(step))
            storage.commit(stage, path)
    assert step_of(path) == 2 if after == "folder" else path.read_text() == "2"
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_deleting_is_one_moment(tmp_path, monkeypatch):
    write(tmp_path / "a.ckpt", 1)
    # killed before anything is deleted
    monkeypatch.setattr(storage.shutil, "rmtree", lambda *_, **__: None)
    storage.remove(tmp_path / "a.ckpt")
    assert newest(tmp_path) is None and not list(tmp_path.glob("*.ckpt"))


def test_a_full_disk_keeps_nothing_that_could_be_deleted(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    write(path, 1)
    stage = storage.make_folder(path)
    (stage / "__0_0.distcp").write_text("half of")

    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "mkdir", refuse)
        storage.discard(stage)  # of a save that failed
    assert not stage.exists() and step_of(path) == 1
    stage = storage.make_folder(path)
    write_manifest(stage, {}, global_step=2)
    monkeypatch.setattr(os, "mkdir", refuse)
    storage.commit(stage, path)  # there was room for it, and for nothing else
    assert step_of(path) == 2 and [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_broken_ones_are_named(tmp_path):
    bad = tmp_path / "bad.ckpt"

    def broken(harm, world_size=4):
        storage.remove(bad)
        write(bad, 9, world_size)
        harm()
        return bad

    shard = bad / "__2_0.distcp"
    cases = {
        r"incomplete: __2_0.distcp has 0 of 14 bytes": shard.unlink,
        r"incomplete: __2_0.distcp has 3 of 14 bytes": lambda: shard.write_text("ste"),
        r"manifest.json is damaged": lambda: (bad / MANIFEST).write_text("{"),
        r"another version": lambda: (bad / MANIFEST).write_text('{"version": 7}'),
    }
    for expected, harm in cases.items():
        assert re.search(expected, damage(broken(harm)))
    broken(lambda: shard.write_text("step 9, rank 3"))
    assert damage(bad) is None
    assert [changed(bad, part, 3) for part in range(3)].count(None) == 2
    assert (
        changed(bad, 0, 1)
        == "damaged: __2_0.distcp does not have the checksum that it was written with"
    )


def test_a_link_leads_to_a_whole_checkpoint_at_any_moment(tmp_path, monkeypatch):
    link, old, new = (tmp_path / f"{name}.ckpt" for name in ("last", "step=1", "step=2"))
    write(old, 1)
    storage.point(link, old)
    assert link.is_symlink() and step_of(link) == 1
    write(new, 2)
    with monkeypatch.context() as patch, pytest.raises(Died):
        remove = storage.remove
        patch.setattr(storage, "remove", lambda path: die() if path == old else remove(path))
        storage.retire(old, [link])
    assert step_of(link) == 2
    storage.retire(old, [link])
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=2.ckpt"}


def test_links_of_the_users_own_stay(tmp_path):
    old, new = tmp_path / "step=1.ckpt", tmp_path / "step=2.ckpt"
    for step, path in enumerate((old, new), 1):
        write(path, step)
    users, others = tmp_path / "paper.ckpt", tmp_path / "other.ckpt"
    for link in (users, others):
        link.symlink_to(old.name)
    storage.retire(others, [users])  # a link goes, what it leads to stays
    assert os.readlink(users) == old.name and old.exists()
    storage.retire(old, [])
    assert os.readlink(users) == old.name and not old.exists()


def test_what_the_disk_did_not_take_is_an_error(tmp_path, monkeypatch):
    """And the file that had the name stays; a file system that has no fsync is none."""

    def fail(number, descriptor):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "one.ckpt"
    path.write_text("before")
    stage = storage.begin(path)
    stage.write_text("after")
    monkeypatch.setattr(os, "fsync", partial(fail, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        storage.commit(stage, path)
    assert path.read_text() == "before"
    monkeypatch.setattr(os, "fsync", partial(fail, errno.EINVAL))
    storage.commit(stage, path)
    assert path.read_text() == "after"


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious").write_text("x")
    with pytest.raises(CheckpointError, match=r"run is a folder with other files.\nWrite to"):
        storage.begin(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "precious"]


def test_of_two_jobs_with_one_name_the_one_that_began_last_writes_it(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_text("before")
    first = storage.begin(path)
    first.write_text("first")
    second = storage.begin(path)
    second.write_text("second, not yet whole")
    with pytest.raises(CheckpointError, match=r"Another job writes .*last.ckpt"):
        storage.commit(first, path)
    assert path.read_text() == "before"
    storage.commit(second, path)
    assert path.read_text() == "second, not yet whole"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_job_that_begins_in_the_middle_of_a_commit_leaves_a_whole_checkpoint(
    kind, tmp_path, monkeypatch
):
    """Of two jobs with one name the first fails, or is through, whenever the second begins."""
    outcomes = []
    for number in range(1, 100):
        path = tmp_path / str(number) / "last.ckpt"
        path.parent.mkdir()
        write(path, 1) if kind == "folder" else path.write_text("1")
        stage = storage.begin(path)
        if kind == "folder":
            stage.mkdir()
            (stage / "a").write_text("x")
            write_manifest(stage, {"a": measure(stage / "a")}, global_step=2)
        else:
            stage.write_text("2")
        with monkeypatch.context() as patch:
            calls = begin_at(patch, number, path)
            try:
                storage.commit(stage, path)
                outcomes.append("2")
            except (CheckpointError, FileNotFoundError):
                outcomes.append("1")
        found = newest(path.parent) if kind == "folder" else path
        if kind == "folder":
            assert found is not None and changed(found, 0, 1) is None
        assert (str(step_of(found)) if kind == "folder" else path.read_text()) == outcomes[-1]
        if len(calls) < number:
            break
    assert set(outcomes) == {"1", "2"}


def begin_at(monkeypatch, number, path):
    """Let another job begin to write ``path`` before the file operation with this number."""
    calls = []

    def meeting(operation):
        def call(*args, **kwargs):
            calls.append(operation.__name__)
            if len(calls) == number:
                storage.begin(path)
            return operation(*args, **kwargs)

        return call

    for name in ("rename", "replace", "fsync"):
        monkeypatch.setattr(os, name, meeting(getattr(os, name)))
    return calls


def test_another_jobs_unfinished_checkpoint_is_taken_away_before_it_is_deleted(
    tmp_path, monkeypatch
):
    """It might be committed half deleted."""
    path = tmp_path / "last.ckpt"
    first = storage.make_folder(path)
    (first / MANIFEST).write_text("{}")
    found = []
    monkeypatch.setattr(
        storage.shutil, "rmtree", lambda folder, **_: found.append((first.exists(), folder.name))
    )
    storage.begin(path)
    assert [there for there, _ in found] == [False] and found[0][1].startswith(".zero3-removed-")


def test_an_empty_folder_is_no_complete_checkpoint(tmp_path):
    (tmp_path / "last.ckpt").mkdir()
    assert storage.damage(tmp_path / "last.ckpt") == "incomplete: it is empty"


def test_what_a_strangers_link_leads_to_is_not_taken_away(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.ckpt").write_text("x")
    (tmp_path / ".zero3-unfinished-0").symlink_to(data)
    storage.begin(tmp_path / "a.ckpt")
    assert (tmp_path / ".zero3-unfinished-0").is_symlink() and (data / "a.ckpt").exists()


BROKEN = {
    "a list": "[]",
    "no files": '{"version": 1}',
    "brackets": "[" * 100_000,
    "a file that is a number": '{"version": 1, "files": 3}',
    "a count that is none": '{"version": 1, "files": {"a": {"bytes": 1e300, "crc32": 0}}}',
    "no count": '{"version": 1, "files": {"a": {"x\\u001b[2J": 1}}}',
    "a name outside": '{"version": 1, "files": {"../x": {"bytes": 1, "crc32": 1}}}',
    "a name that writes": '{"version": 1, "files": {"/x\\u001b[2J": {"bytes": 1, "crc32": 1}}}',
    "junk": "\x00\x01",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_manifest_is_told(what, tmp_path):
    (tmp_path / "manifest.json").write_text(BROKEN[what])
    told = storage.damage(tmp_path)
    assert "is damaged: " in told and "\x1b" not in told


@pytest.mark.parametrize("where", ["bad.ckpt", "bad.ckpt/manifest.json"])
def test_a_fifo_is_no_checkpoint(where, tmp_path):
    if "/" in where:
        (tmp_path / "bad.ckpt").mkdir()
    os.mkfifo(tmp_path / where)
    assert "no file" in storage.damage(tmp_path / "bad.ckpt")
