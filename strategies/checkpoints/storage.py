"""Checkpoints on disk: they appear whole or not at all, and go in one moment too.

::

    folder/step=8.ckpt              whole
    folder/.unfinished/step=9.ckpt  being written; moved up when it is whole
    folder/.removed/...             being deleted
    folder/last.previous.ckpt       the one before, while `last.ckpt` is replaced on a file system
                                    that cannot exchange two names; Lightning's `ckpt_path="last"`
                                    finds it there
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import uuid
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..state_dicts.collective_errors import CheckpointError
from . import archive, manifest
from .manifest import MANIFEST, Manifest

_UNFINISHED, _REMOVED = ".unfinished", ".removed"
# other errors: this file system, or this kind of file, has no fsync
_NOT_WRITTEN = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether it is in no file system that torch's distributed checkpoints are written to."""
    return "://" in os.fspath(path)


def stage_of(path: Path) -> Path:
    """Where ``path`` is before it is whole."""
    return path.parent / _UNFINISHED / path.name


def begin(path: Path) -> Path:
    """Where to write what will be ``path``: a name in a folder that exists."""
    stage = stage_of(path)
    remove(stage)
    stage.parent.mkdir(parents=True, exist_ok=True)
    return stage


def make_folder(path: Path) -> Path:
    """:func:`begin` for a folder, which is created."""
    stage = begin(path)
    stage.mkdir()
    return stage


def commit(stage: Path, path: Path) -> None:
    """Give what is whole its name, and remove what had the name before."""
    sync(stage)
    previous = path.with_name(f"{path.stem}.previous{path.suffix}")
    if not os.path.lexists(path):
        os.rename(stage, path)
    elif _exchange(stage, path):
        remove(stage)
    else:
        remove(previous)
        os.rename(path, previous)
        os.rename(stage, path)
    remove(previous)
    sync(path.parent)
    with suppress(OSError):  # others may be writing there
        stage.parent.rmdir()


def remove(path: Path) -> None:
    """Delete a checkpoint; if that is interrupted, nothing is left that looks like one."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    # nobody takes it for a checkpoint, and the disk may be full
    if path.parent.name == _UNFINISHED:
        shutil.rmtree(path, ignore_errors=True)
        return
    rubbish = path.parent / _REMOVED / uuid.uuid4().hex
    rubbish.parent.mkdir(exist_ok=True)
    os.rename(path, rubbish)
    shutil.rmtree(rubbish.parent, ignore_errors=True)


def retire(path: Path) -> None:
    """Delete a checkpoint; links to it (`save_last="link"`) lead to the newest of the others from
    then on.
    """
    for link in path.parent.glob("*.ckpt"):
        if link.is_symlink() and link != path and link.resolve() == path.resolve():
            other = last_complete(path.parent, path)
            if other is not None:
                point(link, other)
    remove(path)


def point(link: Path, target: Path) -> None:
    """Make ``link`` lead to ``target``."""
    stage = begin(link)
    os.symlink(os.path.relpath(target, link.parent), stage)
    commit(stage, link)


def last_complete(folder: Path, besides: Path | None = None) -> Path | None:
    """The newest checkpoint in ``folder``, but for one, that is whole as far as names and sizes
    tell.
    """
    paths = [
        path
        for path in folder.glob("*.ckpt")
        if besides is None or path.resolve() != besides.resolve()
    ]
    return max(((_saved(path), path) for path in paths if _is_whole(path)), default=(0.0, None))[1]


@dataclass(frozen=True)
class Choice:
    """Which checkpoint to read.

    Attributes:
        path: of it.
        remarks: about what is broken in its folder.
        other: for an error, should it be damaged: which one to read instead.
    """

    path: Path
    remarks: list[str]
    other: str


def choose(path: Path, newest: bool) -> Choice:
    """What to read for ``path``.

    Args:
        path: the checkpoint that was asked for.
        newest: it was asked for as the newest one, so another takes its place if it is incomplete.
            (What is complete and has other checksums is an error all the same: disks that lose
            bytes should not go unnoticed.)

    Raises:
        CheckpointError: there is nothing, or it is incomplete; the error names the last complete
            one of the folder.
    """
    last = last_complete(path.parent, path)
    other = (
        f"The last complete one besides it is {last}."
        if last
        else "There is no other complete one in its folder."
    )
    remarks = [
        f"{path.parent / stage.name}: {damage(stage)}."
        for stage in unfinished(path.parent)
        if stage.is_dir()
    ]
    if not path.exists():
        raise CheckpointError(" ".join([f"There is no checkpoint {path}.", *remarks, other]))
    found = damage(path)
    if found is None:
        return Choice(path, remarks, other)
    if newest and last is not None:
        told = f"{path} is {found}. Going on from the last complete checkpoint, {last}."
        return Choice(last, [*remarks, told], "Choose another one in its folder.")
    raise CheckpointError(f"{path} is {found}. {other}")


def unfinished(folder: Path) -> list[Path]:
    """Checkpoints in ``folder`` whose save did not finish."""
    return sorted((folder / _UNFINISHED).glob("*"))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint as far as names and sizes tell; None if it is whole."""
    return manifest.damage(path) if path.is_dir() else archive.damage(path)


def changed(path: Path, part: int, parts: int) -> str | None:
    """What checksums tell about every ``parts``-th piece of a checkpoint, from number ``part`` on;
    None if they are right.
    """
    return (manifest if path.is_dir() else archive).changed(path, part, parts)


def _is_whole(path: Path) -> bool:
    if path.is_dir():
        return (path / MANIFEST).exists() and damage(path) is None
    return path.exists() and zipfile.is_zipfile(path)


def _saved(path: Path) -> float:
    found = Manifest.read(path) if path.is_dir() else None
    return path.stat().st_mtime if found is None else found.saved


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one moment, where system and file system can."""
    if a.is_symlink() or b.is_symlink() or not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def sync(path: Path) -> None:
    """Make the names in a folder, or the bytes of a file, last through a power cut, where the file
    system can.

    Raises:
        OSError: it could not write them.
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
