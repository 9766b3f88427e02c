"""The zip file that ``torch.save`` writes: where its records lie, and their checksums.

``torch.load`` does not compare the checksums, and ``torch.save`` leaves them out inside
``torch.serialization.skip_data``. A record's checksum is put together from those of its pieces, so
every rank computes or compares its share of the bytes alone.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..state_dicts.collective_errors import CheckpointError

_BLOCK = 1 << 20  # bytes read at a time
# Of the zip format, in bytes: sizes, and offsets of fields, of a record's header ...
_HEADER_BYTES, _HEADER_CRC, _HEADER_LENGTHS = 30, 14, 26
# ... of a record's entry in the directory at the end of the file ...
_ENTRY_BYTES, _ENTRY_CRC, _ENTRY_LENGTHS = 46, 16, 28
# ... and of the descriptor that stands behind a record's data if its header has this flag.
_DESCRIPTOR_FLAG, _DESCRIPTOR_CRC = 8, 4
_ENCRYPTED_FLAG = 1
_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected: the highest bit is the coefficient of x^0


class Piece(NamedTuple):
    """The checksum of some bytes of a file."""

    start: int
    size: int
    checksum: int


@dataclass(frozen=True)
class Record:
    """A record's data, and where its checksum stands in the file."""

    name: str
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
            lengths = _read_fields(stream, info.header_offset + _HEADER_LENGTHS, "<HH")
            start = info.header_offset + _HEADER_BYTES + sum(lengths)
            has_descriptor = info.flag_bits & _DESCRIPTOR_FLAG
            places = (
                start + info.file_size + _DESCRIPTOR_CRC
                if has_descriptor
                else info.header_offset + _HEADER_CRC,
                entry + _ENTRY_CRC,
            )
            records.append(
                (info.header_offset, Record(info.filename, start, info.file_size, info.CRC, places))
            )
            entry += _ENTRY_BYTES + sum(_read_fields(stream, entry + _ENTRY_LENGTHS, "<HHH"))
    records.sort(key=lambda pair: pair[0])
    ends = [header for header, _ in records[1:]] + [end]
    for (_, record), following in zip(records, ends, strict=True):
        if record.start + record.size > following:
            raise CheckpointError(f"its record {record.name!r} reaches into what follows it")
    return [record for _, record in records]


def damage(file: Path) -> str | None:
    """Say what is wrong with a file, or return None if its end is there.

    The end of a zip file is its directory. No checksum is compared; see :func:`share_of_checksums`.
    """
    with open(file, "rb") as stream:
        begins_as_zip = stream.read(2) == b"PK"  # torch's older format does not
    if begins_as_zip and not zipfile.is_zipfile(file):
        return "incomplete: the end of the file is missing"
    return None


def write_checksums(file: Path, pieces: Iterable[Piece]) -> None:
    """Write the checksum of each record that has none, so that any zip tool can check the file.

    Raises:
        CheckpointError: the pieces do not cover these records.
    """
    with open(file, "r+b") as stream:
        missing = [record for record in read_records(stream) if record.size and not record.checksum]
        for record, checksum in zip(missing, join_checksums(missing, pieces), strict=True):
            for place in record.places:
                stream.seek(place)
                stream.write(struct.pack("<I", checksum))


def share_of_checksums(file: Path, part: int, parts: int) -> list[Piece]:
    """Compute the checksums of one of ``parts`` equal shares of the bytes of all records."""
    with open(file, "rb") as stream:
        records = read_records(stream)
        total, before, pieces = sum(record.size for record in records), 0, []
        begin, end = total * part // parts, total * (part + 1) // parts
        for record in records:
            first, last = max(begin - before, 0), min(end - before, record.size)
            if first < last:
                start, size = record.start + first, last - first
                pieces.append(Piece(start, size, compute_checksum(stream, start, size)))
            before += record.size
    return pieces


def changed_records(file: Path, pieces: Iterable[Piece]) -> str | None:
    """Compare the checksums of all shares with those in the file.

    Files of ``torch.serialization.set_crc32_options(False)`` have none, and count as unchanged.

    Returns:
        what is damaged; None if the records are as they were written.
    """
    with open(file, "rb") as stream:
        records = [record for record in read_records(stream) if record.size]
    for record, checksum in zip(records, join_checksums(records, pieces), strict=True):
        if record.checksum not in (0, checksum):
            return (
                f"damaged: its record {record.name!r} does not have the checksum that it was"
                " written with"
            )
    return None


def join_checksums(records: Sequence[Record], pieces: Iterable[Piece]) -> list[int]:
    """Return the checksum of each record, of the pieces that cover it.

    Raises:
        CheckpointError: some bytes of a record are in no piece, or in two.
    """
    rest = sorted(pieces, reverse=True)
    found = []
    for record in records:
        checksum, position, end = 0, record.start, record.start + record.size
        while rest and rest[-1].start < end:
            piece = rest.pop()
            if piece.start < record.start:
                continue  # of another record
            if piece.start != position:
                break
            checksum = _join_two(checksum, piece)
            position += piece.size
        if position != end:
            raise CheckpointError(
                f"bytes {position:,} to {end:,}, of the record {record.name!r}, are not what one"
                " rank wrote"
            )
        found.append(checksum)
    return found


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
