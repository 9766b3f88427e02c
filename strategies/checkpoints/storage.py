"""Checkpoints on disk: each appears complete or not at all, and disappears in one moment too.

::

    folder/step=8.ckpt              complete
    folder/.zero3-unfinished-0f3a.../step=9.ckpt
                                    being written; moved up when it is complete
    folder/.zero3-removed-77ab...   being deleted
    folder/last.zero3-previous.ckpt the checkpoint before, while a directory `last.ckpt` is replaced
                                    (which takes two steps, and a file one); Lightning's
                                    `ckpt_path="last"` (`ModelCheckpoint._find_last_checkpoints`)
                                    finds it there

Others may write to the folder, too. So nobody can know the names of what is written or deleted
there, and what earlier saves and deletions have left is deleted without following links.
"""

from __future__ import annotations

import errno
import os
import shutil
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from ..state_dicts.collective_errors import CheckpointError
from . import manifest
from .manifest import INDEX, MANIFEST

_UNFINISHED, _REMOVED = ".zero3-unfinished-", ".zero3-removed-"
# errors of fsync that mean lost bytes; the others: the file system, or the kind of file, has none
_NOT_WRITTEN = {errno.EIO, errno.ENOSPC, errno.EDQUOT}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a URL, to which rank 0 writes alone."""
    return "://" in os.fspath(path)


def local(path: str | os.PathLike[str]) -> Path:
    """Return a path.

    Raises:
        ValueError: it is a URL.
    """
    if is_remote(path):
        raise ValueError(f"{os.fspath(path)} is remote. Weights and commands need a local path.")
    return Path(path)


def begin(path: Path) -> Path:
    """Prepare the place where ``path`` is written first: its name in a new folder of this user's.

    Args:
        path: where it will be. A folder that is there must be a checkpoint, since it will be
            replaced.

    Raises:
        CheckpointError: ``path`` is not to be replaced.
    """
    if path.is_dir() and not path.is_symlink():
        names = {file.name for file in path.iterdir()}
        if names and not names & {MANIFEST, INDEX}:
            raise CheckpointError(f"{path} is a folder with other files.\nWrite to a new name.")
    # hazard: a job that writes the same name must not go on in this job's place, so it is unique.
    # What the other has written is lost, and it misses a file; `remove` takes all of it away at
    # once, so the other never commits what is half deleted.
    for left in path.parent.glob(f"{_UNFINISHED}*"):
        if not left.is_symlink() and os.path.lexists(left / path.name):
            with suppress(OSError):  # this user may not
                remove(left)
    folder = path.parent / f"{_UNFINISHED}{uuid4().hex}"
    folder.mkdir(0o700, parents=True)
    return folder / path.name


def make_folder(path: Path) -> Path:
    """Call :func:`begin` for a folder and create it."""
    stage = begin(path)
    stage.mkdir()
    return stage


def commit(stage: Path, path: Path) -> None:
    """Move a complete checkpoint to ``path``, and remove the one that had this name before.

    Raises:
        CheckpointError: another job has begun to write ``path``.
    """
    require_stage(stage, path)
    sync(stage)  # hazard: after a power cut the name could lead to a file without its bytes
    previous = path.with_name(f"{path.stem}.zero3-previous{path.suffix}")
    is_folder = any(each.is_dir() and not each.is_symlink() for each in (stage, path))
    if is_folder and os.path.lexists(path):
        # hazard: at any moment one complete checkpoint must have a name
        remove(previous)
        os.rename(path, previous)
    os.replace(stage, path)
    remove(previous)
    sync(path.parent)
    with suppress(OSError):  # it is not of `begin`
        stage.parent.rmdir()


def require_stage(stage: Path, path: Path) -> None:
    """Raise a CheckpointError if another job has begun to write ``path``, which ``stage`` is of."""
    if not os.path.lexists(stage):
        raise CheckpointError(
            f"Another job writes {path}, too, and began later.\nEach needs a folder of its own."
        )


def discard(stage: Path) -> None:
    """Delete what a save has left of what :func:`begin` returned."""
    assert stage.parent.name.startswith(_UNFINISHED)
    shutil.rmtree(stage.parent, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a file or folder if it is there; an interruption leaves nothing of its name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        os.rename(path, path.with_name(f"{_REMOVED}{uuid4().hex}"))
        # this one, and those of interrupted deletions
        for left in path.parent.glob(f"{_REMOVED}*"):
            if left.is_dir():  # hazard: `rmtree` of a FIFO waits for a writer
                shutil.rmtree(left, ignore_errors=True)


def retire(path: Path, links: Iterable[Path]) -> None:
    """Delete a checkpoint, after pointing those of ``links`` that lead to it at the newest other.

    ``ModelCheckpoint(save_last="link")`` deletes before it sets its link anew.
    """
    for link in () if path.is_symlink() else links:
        if link.is_symlink() and os.path.realpath(link) == os.path.realpath(path):
            others = [
                each
                for each in link.parent.glob("*.ckpt")
                if os.path.realpath(each) != os.path.realpath(path)
            ]
            if others:
                point(link, max(others, key=lambda each: each.lstat().st_mtime))
    remove(path)


def point(link: Path, target: Path) -> None:
    """Make ``link`` lead to ``target``, in one step."""
    stage = begin(link)
    os.symlink(os.path.relpath(target, link.parent), stage)
    commit(stage, link)


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint by names and sizes, or return None.

    Of a file: whether its end is there, the directory of a zip file. No checksum is compared.
    """
    if path.is_dir():
        return manifest.damage(path)
    if path.is_symlink() and not path.exists():
        return "a link that leads nowhere"
    if path.exists() and not path.is_file():
        return "no file or folder"  # hazard: reading a FIFO waits for a writer
    with open(path, "rb") as stream:
        begins_as_zip = stream.read(2) == b"PK"  # torch's older format does not
    if begins_as_zip and not zipfile.is_zipfile(path):
        return "incomplete: the end of the file is missing"
    return None


def sync(path: Path) -> None:
    """Write the names in a folder, or the bytes of a file, so that they survive a power cut.

    A file system without fsync gives no such guarantee, and no error.

    Raises:
        OSError: the disk did not take them.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _NOT_WRITTEN:
            raise
