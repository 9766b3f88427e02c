"""The manifest lists the files of a checkpoint's directory, with sizes and checksums.

By it a complete directory is told from an incomplete or damaged one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .zip_file import compute_checksum

MANIFEST = "manifest.json"
INDEX = ".metadata"  # torch's
_VERSION = 1

Files = dict[str, dict[str, int]]  # name -> {"bytes": size, "crc32": checksum}, as in the manifest


def write_manifest(folder: Path, files: Files, **about: Any) -> None:
    """Write the manifest of files that are complete, and what else is to be known of them."""
    text = json.dumps({"version": _VERSION, **about, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of ``folder``; return nothing if there is none, as of other programs.

    "files" are as :func:`write_manifest` takes them. Nothing else was looked at.

    Raises:
        ValueError: the manifest is damaged, or another version of this package wrote it.
    """
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return {}
    try:
        content = json.loads(require_file(file).read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError("another version of this package wrote it")
        for name, entry in content["files"].items():
            if not (is_file_name(name) and type(entry["bytes"]) is type(entry["crc32"]) is int):
                raise ValueError(f"{name!r} is no file in the folder with a size and a checksum")
    except Exception as error:  # of what json, a stranger's or a broken disk's, can hold
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is damaged: {what[:200]!a}.") from error
    return content


def is_file_name(name: Any) -> bool:
    """Return whether ``name`` is that of a file in a folder, and leads nowhere else."""
    return type(name) is str and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def require_file(file: Path) -> Path:
    """Return ``file``, or raise an OSError if it is none: reading a FIFO waits for a writer."""
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is no file")
    return file


def measure(file: Path) -> dict[str, int]:
    """Compute size and checksum of a file as it is now."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        return {"bytes": size, "crc32": compute_checksum(stream, 0, size)}


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a folder, without links: they tell of files elsewhere."""
    files = (file for file in folder.iterdir() if file.is_file() and not file.is_symlink())
    return {file.name: file.stat().st_size for file in files}


def damage(folder: Path) -> str | None:
    """Say what is wrong with a directory, or return None if its files have the right sizes.

    No checksum is compared; see :func:`changed`. A directory without a manifest counts as complete.
    """
    try:
        files = read_manifest(folder).get("files", {})
    except ValueError as error:
        return str(error)
    sizes = sizes_of(folder)
    if not sizes:
        return "incomplete: it is empty"
    for name, file in files.items():
        if sizes.get(name) != file["bytes"]:
            what = f"{sizes.get(name, 0):,} of {file['bytes']:,} bytes, or is a link"
            return f"incomplete: {name} has {what}"
    return None


def changed(folder: Path, part: int, parts: int) -> str | None:
    """Compare the checksums of every ``parts``-th file, from number ``part`` on.

    Returns:
        what is damaged; None if the files are as they were written.
    """
    files = read_manifest(folder).get("files", {})
    for name in sorted(files)[part::parts]:
        if measure(folder / name) != files[name]:
            return f"damaged: {name} does not have the checksum that it was written with"
    return None
