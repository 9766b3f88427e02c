"""Checksums of the zip file that ``torch.save`` writes.

``torch.load`` does not compare them, and ``torch.save`` leaves them out inside
``torch.serialization.skip_data``.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

_BLOCK = 1 << 20  # bytes read at a time
# Of the zip format, in bytes: sizes, and offsets of fields, of a record's header ...
_HEADER_BYTES, _HEADER_CRC, _HEADER_LENGTHS = 30, 14, 26
# ... of a record's entry in the directory at the end of the file ...
_ENTRY_BYTES, _ENTRY_CRC, _ENTRY_LENGTHS = 46, 16, 28
# ... and of the descriptor that stands behind a record's data if its header has this flag.
_DESCRIPTOR_FLAG, _DESCRIPTOR_CRC = 8, 4


def write_checksums(file: Path) -> None:
    """Write the checksum of each record that has none, so that any zip tool can check the file."""
    with open(file, "r+b") as stream, zipfile.ZipFile(stream) as archive:
        entry = archive.start_dir
        for record in archive.infolist():
            if record.CRC == 0 and record.file_size:
                header, start = record.header_offset, find_data(stream, record)
                checksum = struct.pack("<I", _compute_checksum(stream, start, record.file_size))
                if record.flag_bits & _DESCRIPTOR_FLAG:
                    crc_offset = start + record.file_size + _DESCRIPTOR_CRC
                else:
                    crc_offset = header + _HEADER_CRC
                for offset in (crc_offset, entry + _ENTRY_CRC):
                    stream.seek(offset)
                    stream.write(checksum)
            entry += _ENTRY_BYTES + sum(_read_fields(stream, entry + _ENTRY_LENGTHS, "<HHH"))


def find_data(stream: BinaryIO, record: zipfile.ZipInfo) -> int:
    """Return the offset of a record's data, which stands behind a header of its own length."""
    lengths = _read_fields(stream, record.header_offset + _HEADER_LENGTHS, "<HH")
    return record.header_offset + _HEADER_BYTES + sum(lengths)


def damage(file: Path) -> str | None:
    """Say what is wrong with a file, or return None if its end is there.

    The end of a zip file is its index. No checksum is compared; see :func:`changed`.
    """
    with open(file, "rb") as stream:
        begins_as_zip = stream.read(2) == b"PK"  # torch's older format does not
    if begins_as_zip and not zipfile.is_zipfile(file):
        return "incomplete: the end of the file is missing"
    return None


def changed(file: Path, part: int, parts: int) -> str | None:
    """Compare the checksums of every ``parts``-th record, from number ``part`` on.

    Files of torch's format before version 1.6 have no checksums, nor have those of
    ``set_crc32_options(False)``: these count as unchanged.

    Returns:
        what is damaged; None if the records are as they were written.
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


def _read_fields(stream: BinaryIO, offset: int, layout: str) -> tuple[int, ...]:
    stream.seek(offset)
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _compute_checksum(stream: BinaryIO, start: int, size: int) -> int:
    stream.seek(start)
    checksum = 0
    while size:
        block = stream.read(min(size, _BLOCK))
        if not block:
            raise EOFError(f"{stream.name} ends {size:,} bytes too early")
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum
