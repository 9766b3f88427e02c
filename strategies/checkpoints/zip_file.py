"""The zip file that ``torch.save`` writes: where its records lie, and their checksums.

``torch.load`` does not compare the checksums, and ``torch.save`` leaves them out inside
``torch.serialization.skip_data``. A record's checksum is put together from those of its pieces, so
every rank computes those of the bytes that it writes alone.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..state_dicts.collective_errors import CheckpointError

_BLOCK = 1 << 20  # bytes read at a time
# Of the zip format, in bytes: sizes, and offsets of fields, of a record's header ...
_HEADER_BYTES, _HEADER_LENGTHS = 30, 26
# ... of a record's entry in the directory at the end of the file ...
_ENTRY_BYTES, _ENTRY_CRC, _ENTRY_LENGTHS = 46, 16, 28
# ... and of the descriptor that stands behind the data of each record that torch writes.
_DESCRIPTOR_CRC = 4
_ENCRYPTED_FLAG = 1
_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected: the highest bit is the coefficient of x^0


class Piece(NamedTuple):
    """The checksum of some bytes of a file."""

    start: int
    size: int
    checksum: int


@dataclass(frozen=True)
class Record:
    """Where a record's header, its data and its checksum are in the file."""

    name: str
    header: int
    start: int
    size: int
    checksum: int  # 0: none, as in files without checksums
    places: tuple[int, int]


def read_records(stream: BinaryIO) -> list[Record]:
    """Return the records in the order of the file.

    Raises:
        CheckpointError: a record is not stored as ``torch.save`` stores it, as it is and apart from
            others, so that a part of a tensor is a range of bytes.
        zipfile.BadZipFile: there is no directory at the file's end.
    """
    with zipfile.ZipFile(stream) as archive:
        records, entry, end = [], archive.start_dir, archive.start_dir
        if len(archive.namelist()) > len(archive.NameToInfo):
            raise CheckpointError("two of its records have one name")
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED_FLAG:
                raise CheckpointError(
                    f"its record {info.filename!r} is compressed or encrypted, as torch.save writes"
                    " none"
                )
            header, size = info.header_offset, info.file_size
            lengths = _read_fields(stream, header + _HEADER_LENGTHS, "<HH")
            start = header + _HEADER_BYTES + sum(lengths)
            places = start + size + _DESCRIPTOR_CRC, entry + _ENTRY_CRC
            records.append(Record(info.filename, header, start, size, info.CRC, places))
            entry += _ENTRY_BYTES + sum(_read_fields(stream, entry + _ENTRY_LENGTHS, "<HHH"))
    records.sort(key=lambda record: record.header)
    ends = [record.header for record in records[1:]] + [end]
    for record, following in zip(records, ends, strict=True):
        if record.start + record.size > following:
            raise CheckpointError(f"its record {record.name!r} reaches into what follows it")
    return records


def write_checksums(file: Path, pieces: Iterable[Piece]) -> None:
    """Write the checksum of each record that has none, so that any zip tool can check the file.

    Raises:
        CheckpointError: the pieces do not cover these records.
    """
    rest = iter(sorted(pieces))
    with open(file, "r+b") as stream:
        missing = [record for record in read_records(stream) if record.size and not record.checksum]
        for record in missing:
            checksum, position, end = 0, record.start, record.start + record.size
            while position < end:
                piece = next(rest, Piece(0, 0, 0))
                if piece.start != position:
                    raise CheckpointError(
                        f"byte {position:,}, of the record {record.name!r}, was written by no rank,"
                        " or by two"
                    )
                checksum = _join_two(checksum, piece)
                position += piece.size
            for place in record.places:
                stream.seek(place)
                stream.write(struct.pack("<I", checksum))


def changed(file: Path, part: int, parts: int) -> str | None:
    """Compare the checksums of every ``parts``-th record, by size, from number ``part`` on.

    Files of ``torch.serialization.set_crc32_options(False)``, and of torch's format before version
    1.6, have none, and count as unchanged.

    Returns:
        what is damaged; None if the records are as they were written.

    Raises:
        CheckpointError: the file is not as ``torch.save`` writes it.
    """
    if not zipfile.is_zipfile(file):
        return None
    with open(file, "rb") as stream:
        records = sorted(read_records(stream), key=lambda record: record.size)
        for record in records[part::parts]:
            if record.checksum not in (0, compute_checksum(stream, record.start, record.size)):
                return f"damaged: {record.name!r} does not have the checksum it was written with"
    return None


def _join_two(checksum: int, piece: Piece) -> int:
    """Return the checksum of some bytes and a piece behind them.

    CRC-32 is the remainder of a polynomial whose coefficients are the bits, and n bytes behind a
    polynomial multiply it by x^8n.
    """
    return _multiply(_power(piece.size), checksum) ^ piece.checksum


@cache
def _power(size: int) -> int:
    """Return the remainder of x^8n for ``size`` = n bytes."""
    result, factor = 1 << 31, 1 << 23  # x^0, x^8
    while size:
        if size & 1:
            result = _multiply(result, factor)
        factor, size = _multiply(factor, factor), size >> 1
    return result


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)  # times x
    return product


def _read_fields(stream: BinaryIO, offset: int, layout: str) -> tuple[int, ...]:
    stream.seek(offset)
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def compute_checksum(stream: BinaryIO, start: int, size: int) -> int:
    """Compute the checksum of a range of bytes of a file.

    Raises:
        EOFError: the file ends in it.
    """
    stream.seek(start)
    checksum = 0
    while size:
        block = stream.read(min(size, _BLOCK))
        if not block:
            raise EOFError(f"{stream.name} ends {size:,} bytes too early")
        checksum, size = zlib.crc32(block, checksum), size - len(block)
    return checksum
