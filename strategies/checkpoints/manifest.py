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
        is_known = content["version"] == _VERSION
        for name, entry in content["files"].items() if is_known else ():
            if not is_file_name(name):
                raise ValueError(f"{name!r} is no name of a file in the folder")
            if not all(type(entry[key]) is int and entry[key] >= 0 for key in ("bytes", "crc32")):
                raise ValueError("a count is no whole number")
    except Exception as error:  # of what json, a stranger's or a broken disk's, can hold
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is damaged: {what[:200]!a}.") from error
    if not is_known:
        raise ValueError(f"{file} was written by another version of this package.")
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


def damage(folder: Path) -> str | None:
    """Say what is wrong with a directory, or return None if its files have the right sizes.

    No checksum is compared; see :func:`changed`. A directory without a manifest counts as complete.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    files = manifest.get("files", {})
    if not any(folder.iterdir()):
        return "incomplete: it is empty"
    if manifest and not files:
        return "incomplete: its save did not finish"
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        shards = [name for name in files if name.endswith(".distcp")]
        present = len([name for name in shards if name not in missing])
        return f"incomplete: {present} of {len(shards)} shards ({', '.join(missing)} missing)"
    for name, file in files.items():
        if (folder / name).is_symlink():  # it would tell of files elsewhere
            return f"damaged: {name} is a link"
        size = (folder / name).stat().st_size
        if size != file["bytes"]:
            return f"incomplete: {name} has {size:,} of {file['bytes']:,} bytes"
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
