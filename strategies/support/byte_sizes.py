"""Sizes of memory as options have them."""

from __future__ import annotations

import re


def parse_size(option: str, others: str, value: object) -> int:
    """Bytes that ``value`` ("20GiB") of an option says, or a ValueError that names ``others``."""
    units = {"B": 1, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w+)", value) if isinstance(value, str) else None
    nbytes = int(float(found[1]) * units.get(found[2], 0)) if found else 0
    if nbytes <= 0:
        raise ValueError(
            f"{option}={value!r} is none of None, {others} and a size of device memory ('20GiB', in"
            " B, MB, MiB, GB or GiB)."
        )
    return nbytes
