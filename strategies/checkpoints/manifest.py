"""The list of files in a checkpoint's directory, with sizes and checksums: what tells a whole one
from a broken one.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

MANIFEST = "manifest.json"
_VERSION = 1


@dataclass
class File:
    """What a file is like when it is whole."""

    bytes: int
    crc32: int


@dataclass
class Manifest:
    """A directory's files, and when in training they were written.

    Attributes:
        world_size: number of ranks that wrote.
        epoch: of training, from 0.
        global_step: optimizer steps done.
        files: by name; empty until the save is over.
        saved: seconds since 1970.
    """

    world_size: int
    epoch: int
    global_step: int
    files: dict[str, File] = field(default_factory=dict)
    saved: float = field(default_factory=time.time)

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, or leave the one that is there."""
        temporary = folder / f"{MANIFEST}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"version": _VERSION, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Of ``folder``; None if there is none, which directories of other programs have not."""
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{folder / MANIFEST} is damaged: {error}.") from error
        if content.pop("version", None) != _VERSION:
            raise ValueError(f"{folder / MANIFEST} was written by another version of this package.")
        return cls(
            **{**content, "files": {name: File(**file) for name, file in content["files"].items()}}
        )


def measure(file: Path) -> File:
    """Size and checksum of a file as it is now."""
    size, checksum = 0, 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
    return File(size, checksum)


def damage(folder: Path) -> str | None:
    """What is wrong with a directory as far as names and sizes of its files tell; None if it is
    whole.
    """
    try:
        manifest = Manifest.read(folder)
    except ValueError as error:
        return str(error)
    if manifest is None:
        return None
    if not manifest.files:
        begun = len({file.name.split("_")[2] for file in folder.glob("__*.distcp")})
        return (
            f"incomplete: its save did not finish ({begun} of {manifest.world_size} shards were"
            " begun)"
        )
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    if missing:
        shards = [name for name in manifest.files if name.endswith(".distcp")]
        there = len([name for name in shards if name not in missing])
        return f"incomplete: {there} of {len(shards)} shards ({', '.join(missing)} missing)"
    for name, file in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != file.bytes:
            return f"incomplete: {name} has {size:,} of {file.bytes:,} bytes"
    return None


def changed(folder: Path, part: int, parts: int) -> str | None:
    """What checksums tell about every ``parts``-th file, from number ``part`` on; None if they are
    as they were written.
    """
    manifest = Manifest.read(folder)
    for name in sorted(manifest.files if manifest is not None else ())[part::parts]:
        if measure(folder / name) != manifest.files[name]:
            return f"damaged: {name} does not have the checksum that it was written with"
    return None
