"""Checksums of the zip file that ``torch.save`` writes: torch never looks at them, and leaves them
out where it skips data.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 20
# Of the zip format: where in a record's header, and in its entry of the directory, something lies.
_HEADER_BYTES, _HEADER_CRC, _HEADER_LENGTHS = 30, 14, 26
_ENTRY_BYTES, _ENTRY_CRC, _ENTRY_LENGTHS = 46, 16, 28
_DESCRIPTOR_FLAG, _DESCRIPTOR_CRC = 8, 4


def seal(file: Path) -> None:
    """Write the checksums of the records that have none, so that any zip tool can check them."""
    with zipfile.ZipFile(file) as archive, open(file, "r+b") as stream:
        entry = archive.start_dir
        for record in archive.infolist():
            if record.CRC == 0 and record.file_size:
                start = (
                    record.header_offset
                    + _HEADER_BYTES
                    + sum(_read(stream, record.header_offset + _HEADER_LENGTHS, "<HH"))
                )
                checksum = struct.pack("<I", _checksum(stream, start, record.file_size))
                behind = record.flag_bits & _DESCRIPTOR_FLAG
                place = (
                    start + record.file_size + _DESCRIPTOR_CRC
                    if behind
                    else record.header_offset + _HEADER_CRC
                )
                for offset in (place, entry + _ENTRY_CRC):
                    stream.seek(offset)
                    stream.write(checksum)
            entry += _ENTRY_BYTES + sum(_read(stream, entry + _ENTRY_LENGTHS, "<HHH"))


def damage(file: Path) -> str | None:
    """What is wrong with a file as far as its end, the index of a zip file, tells; None if it is
    whole.
    """
    with open(file, "rb") as stream:
        begins_as_zip = stream.read(2) == b"PK"  # torch's older format does not
    return (
        "incomplete: the end of the file is missing"
        if begins_as_zip and not zipfile.is_zipfile(file)
        else None
    )


def changed(file: Path, part: int, parts: int) -> str | None:
    """What checksums tell about every ``parts``-th record, from number ``part`` on; None if they
    are as they were written.

    Files of torch's format before version 1.6 have no checksums, nor have those of
    ``set_crc32_options(False)``.
    """
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist()[part::parts]:
            try:
                with archive.open(record) as stream:
                    while record.CRC and stream.read(_BLOCK):
                        pass
            except (zipfile.BadZipFile, EOFError) as error:
                return f"damaged: its record {record.filename!r} is not what was written ({error})"
    return None


def _read(stream: BinaryIO, offset: int, layout: str) -> tuple[int, ...]:
    stream.seek(offset)
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _checksum(stream: BinaryIO, start: int, size: int) -> int:
    stream.seek(start)
    checksum = 0
    while size:
        block = stream.read(min(size, _BLOCK))
        if not block:
            raise EOFError(f"{stream.name} ends {size:,} bytes too early")
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum
