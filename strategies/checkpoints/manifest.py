"""The manifest lists the files of a checkpoint's directory, with sizes and checksums.

By it a complete directory is told from an incomplete or damaged one.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
INDEX = ".metadata"  # torch's
_VERSION = 1


@dataclass
class File:
    """Size and checksum of a complete file; both names are keys in the manifest's JSON."""

    bytes: int
    crc32: int


@dataclass
class Manifest:
    """A directory's files, and when in training they were written.

    The attributes' names are keys in the manifest's JSON.

    Attributes:
        world_size: number of ranks that wrote.
        epoch: of training, from 0.
        global_step: optimizer steps done.
        files: by name; empty until the save is over.
        saved: when the save began, in seconds since 1970.
    """

    world_size: int
    epoch: int
    global_step: int
    files: dict[str, File] = field(default_factory=dict)
    saved: float = field(default_factory=time.time)

    def write(self, folder: Path) -> None:
        """Write the manifest into ``folder``; after an error the one before is still there."""
        temporary = folder / f"{MANIFEST}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of ``folder``; return None if there is none, as of other programs.

        Raises:
            ValueError: the manifest is damaged, or another version of this package wrote it.
        """
        file = folder / MANIFEST
        if not os.path.lexists(file):
            return None
        try:
            content = json.loads(require_file(file).read_text(encoding="utf-8"))
            version = content.pop("version", None)
            manifest = cls._parse(content) if version == _VERSION else None
        except Exception as error:  # of what json, a stranger's or a broken disk's, can hold
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{file} is damaged: {what[:200]!a}.") from error
        if manifest is None:
            raise ValueError(f"{file} was written by another version of this package.")
        return manifest

    @classmethod
    def _parse(cls, content: dict[str, Any]) -> Manifest:
        """Build a manifest of what JSON holds, and require its types and plain names of files."""
        files = {name: File(**file) for name, file in content.pop("files").items()}
        manifest = cls(files=files, **content)
        counts = [manifest.world_size, manifest.epoch, manifest.global_step]
        counts += [number for file in files.values() for number in (file.bytes, file.crc32)]
        if not all(type(number) is int and number >= 0 for number in counts):
            raise ValueError("a count is no whole number")
        if type(manifest.saved) not in (int, float) or not 0 <= manifest.saved < 1e11:
            raise ValueError(f"saved={manifest.saved!r} is no time")
        for name in files:
            if not is_file_name(name):
                raise ValueError(f"{name!r} is no name of a file in the folder")
        return manifest


def is_file_name(name: Any) -> bool:
    """Return whether ``name`` is that of a file in a folder, and leads nowhere else."""
    return type(name) is str and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def require_file(file: Path) -> Path:
    """Return ``file``, or raise an OSError if it is none: reading a FIFO waits for a writer."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is no file")
    return file


def measure(file: Path) -> File:
    """Compute size and checksum of a file as it is now."""
    size, checksum = 0, 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return File(size, checksum)


def damage(folder: Path) -> str | None:
    """Say what is wrong with a directory, or return None if its files have the right sizes.

    No checksum is compared; see :func:`changed`. A directory without a manifest counts as complete.
    """
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return str(error)
    if manifest is None:
        return None
    if not manifest.files:
        # "__<rank>_<number>.distcp"
        begun = len({file.name.split("_")[2] for file in folder.glob("__*.distcp")})
        return (
            f"incomplete: its save did not finish ({begun} of {manifest.world_size} shards were"
            " begun)"
        )
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    if missing:
        shards = [name for name in manifest.files if name.endswith(".distcp")]
        present = len([name for name in shards if name not in missing])
        return f"incomplete: {present} of {len(shards)} shards ({', '.join(missing)} missing)"
    for name, file in manifest.files.items():
        if (folder / name).is_symlink():  # it would tell of files elsewhere
            return f"damaged: {name} is a link"
        size = (folder / name).stat().st_size
        if size != file.bytes:
            return f"incomplete: {name} has {size:,} of {file.bytes:,} bytes"
    return None


def changed(folder: Path, part: int, parts: int) -> str | None:
    """Compare the checksums of every ``parts``-th file, from number ``part`` on.

    Returns:
        what is damaged; None if the files are as they were written.
    """
    manifest = Manifest.read(folder)
    files = {} if manifest is None else manifest.files
    for name in sorted(files)[part::parts]:
        if measure(folder / name) != files[name]:
            return f"damaged: {name} does not have the checksum that it was written with"
    return None
