"""Parse the text form of the allocator options strictly, and format it canonically.

    conf      = entry {"," entry}
    entry     = name ":" value
    value     = "True" | "False" | whole number | decimal fraction | word | divisions
    divisions = power of two | "[" size ":" division {"," size ":" division} ["," ">:" division] "]"

torch's own parser is lax: it takes `64MB` for 64 and -5 for no limit, and of two entries with one
name it takes the last. Here every such text is an error that names the option. Spaces are allowed
around names, values and separators, nowhere else. This module works on strings alone; it uses
neither torch nor the environment.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

Divisions = int | dict[str, int]
Value = bool | int | float | str | dict[str, int]
Version = tuple[int, int]
Scope = Literal["backend", "device", "pinned"]

LARGEST_MB = 2**43 - 1  # the bytes of a larger size do not fit a signed 64-bit count
ROUNDUP_INTERVALS = 16  # sizes from 1 MB to 32768 MB, each interval twice the one before
LARGEST_DIVISION = 2**16


class AllocatorOptionError(ValueError):
    """An allocator option is malformed or impossible.

    Attributes:
        option: its name, or the text in place of a name.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"allocator option {option!r}: {problem}")
        self.option = option


@dataclass(frozen=True)
class Option:
    """One option of the allocator: its grammar, its default, and the first torch that has it."""

    name: str
    kind: Literal["flag", "whole", "fraction", "word", "divisions"]
    scope: Scope  # the allocator that obeys it
    # Text that restores torch's default; None: a text without the option restores it.
    default: str | None
    doc: str
    low: float = 0
    high: float = LARGEST_MB
    is_open: bool = False  # a fraction that may be neither `low` nor `high`
    is_power_of_two: bool = False
    words: tuple[str, ...] = ()
    since: Version = (2, 11)


_TABLE = (
    Option(
        "backend", "word", "backend", None, "which allocator", words=("native", "cudaMallocAsync")
    ),
    Option(
        "large_segment_size_mb",
        "whole",
        "device",
        "20",
        "size of a segment shared by large blocks",
        low=11,
    ),
    Option("max_split_size_mb", "whole", "device", None, "larger blocks are never split", low=20),
    Option(
        "max_non_split_rounding_mb",
        "whole",
        "device",
        None,
        "slack allowed in unsplit blocks",
        low=20,
    ),
    Option(
        "roundup_power2_divisions", "divisions", "device", None, "steps between two powers of two"
    ),
    Option(
        "garbage_collection_threshold",
        "fraction",
        "device",
        None,
        "share of the allowed memory above which unused blocks are freed",
        high=1,
        is_open=True,
    ),
    Option(
        "expandable_segments",
        "flag",
        "device",
        "False",
        "segments that grow, against fragmentation",
    ),
    Option(
        "per_process_memory_fraction",
        "fraction",
        "device",
        "1.0",
        "share of the device torch may use",
        high=1,
    ),
    Option(
        "throw_on_cudamalloc_oom",
        "flag",
        "device",
        "False",
        "refuse to go above the memory fraction without asking the driver",
        since=(2, 12),
    ),
    Option(
        "graph_capture_record_stream_reuse",
        "flag",
        "device",
        "False",
        "reuse recorded blocks within a capture",
    ),
    Option(
        "release_lock_on_cudamalloc",
        "flag",
        "device",
        "False",
        "let other threads run during cudaMalloc",
    ),
    Option("pinned_use_cuda_host_register", "flag", "pinned", "False", "pin with cudaHostRegister"),
    Option(
        "pinned_num_register_threads",
        "whole",
        "pinned",
        "1",
        "threads that touch pages before they are registered",
        low=1,
        high=128,
        is_power_of_two=True,
    ),
    Option(
        "pinned_use_background_threads",
        "flag",
        "pinned",
        "False",
        "query events off the main thread",
    ),
    Option(
        "pinned_reserve_segment_size_mb",
        "whole",
        "pinned",
        None,
        "pinned memory reserved at once",
        low=1,
    ),
    Option(
        "pinned_max_round_threshold_mb",
        "whole",
        "pinned",
        None,
        "larger pinned blocks are not rounded up",
        low=1,
        since=(2, 13),
    ),
    Option(
        "pinned_max_cached_size_mb",
        "whole",
        "pinned",
        None,
        "larger pinned blocks are not cached",
        low=1,
        since=(2, 13),
    ),
    Option(
        "pinned_free_catch_all",
        "flag",
        "pinned",
        "False",
        "take back pinned blocks whose owner is unknown",
        since=(2, 12),
    ),
)
OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}
# Names from ROCm, which torch obeys everywhere.
ALIASES = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}

_WHOLE = re.compile(r"0|[1-9][0-9]*")
_FRACTION = re.compile(r"[0-9]+(\.[0-9]+)?|\.[0-9]+")


def parse(text: str, version: Version) -> dict[str, Value]:
    """Parse a whole configuration; a blank text has no options.

    Raises:
        AllocatorOptionError: the text is malformed, or has an option that this torch lacks.
    """
    found: dict[str, Value] = {}
    if not text.strip():
        return found
    last = _option_at_head(text.strip(" ,")) or text
    for entry in _split_entries(text):
        name, colon, value = (part.strip() for part in entry.partition(":"))
        if not name and not colon:
            raise AllocatorOptionError(
                last, "a comma next to it has no option on its other side; remove it"
            )
        if not colon:
            raise AllocatorOptionError(
                _option_at_head(name), f"no value in {entry!r}; write {_option_at_head(name)}:VALUE"
            )
        name = canonical_name(name, version)
        if name in found:
            raise AllocatorOptionError(name, "given twice; torch would silently take the last one")
        found[name] = _PARSERS[OPTIONS[name].kind](OPTIONS[name], value)
        last = name
    return found


def canonical_name(name: str, version: Version) -> str:
    """Return the option's own name for a name or an alias.

    Raises:
        AllocatorOptionError: the name is unknown, or needs a newer torch.
    """
    name = ALIASES.get(name, name)
    if name not in OPTIONS:
        close = difflib.get_close_matches(name.lower(), OPTIONS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(OPTIONS)}"
        raise AllocatorOptionError(name, f"unknown; {hint}")
    since = OPTIONS[name].since
    if version < since:
        needs, have = (".".join(map(str, v)) for v in (since, version))
        raise AllocatorOptionError(
            name, f"needs torch {needs} or newer, this is {have}; leave it out or update torch"
        )
    return name


def check(name: str, value: Value, version: Version) -> Value:
    """Check a typed value as strictly as its text, and return its canonical form.

    Raises:
        AllocatorOptionError: the value has a wrong type or is out of range.
    """
    name = canonical_name(name, version)
    option = OPTIONS[name]
    wanted: Any = {
        "flag": bool,
        "whole": int,
        "fraction": (int, float),
        "word": str,
        "divisions": (int, dict),
    }[option.kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and option.kind != "flag"):
        raise AllocatorOptionError(name, f"expected {_describe_expected(option)}, got {value!r}")
    return _PARSERS[option.kind](option, _format_value(value))


def to_text(options: Mapping[str, Value]) -> str:
    """Return the canonical text: options in the order of the table, no spaces."""
    return ",".join(f"{name}:{_format_value(options[name])}" for name in OPTIONS if name in options)


def roundup_table(value: Divisions, overwrite_last: bool = False) -> tuple[int, ...]:
    """Return torch's table for `roundup_power2_divisions`: a division per interval from 1 MB up.

    torch leaves the interval of a size between two given ones at 0, which means no rounding;
    `torch_gaps` finds these sizes. `>` counts from the interval above the last size, or, in some
    torch builds (`overwrite_last`), from the last size itself.
    """
    if isinstance(value, int):
        return (value,) * ROUNDUP_INTERVALS
    table = [0] * ROUNDUP_INTERVALS
    sizes = [int(size) for size in value if size != ">"]
    for size in sizes:
        table[size.bit_length() - 1] = value[str(size)]
    if sizes:
        first = sizes[0].bit_length() - 1
        table[:first] = [value[str(sizes[0])]] * first
    if ">" in value:
        start = sizes[-1].bit_length() - overwrite_last if sizes else 0
        table[start:] = [value[">"]] * (ROUNDUP_INTERVALS - start)
    return tuple(table)


def torch_gaps(value: Divisions) -> list[int]:
    """Return sizes in MB between two given ones that torch leaves without rounding."""
    if isinstance(value, int):
        return []
    sizes = [int(size) for size in value if size != ">"]
    between = [2**power for power in range(ROUNDUP_INTERVALS)]
    return [size for size in between if sizes and sizes[0] < size < sizes[-1] and size not in sizes]


def _split_entries(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets, as `[256:1,512:2]` is one value."""
    depth, start = 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        name = text[start:].partition(":")[0].strip()
        if depth not in (0, 1):
            raise AllocatorOptionError(_option_at_head(name), "brackets do not match")
        if letter == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    if depth:
        raise AllocatorOptionError(
            _option_at_head(text[start:].partition(":")[0].strip()),
            "the bracket '[' is never closed",
        )
    yield text[start:].strip()


def _option_at_head(name: str) -> str:
    """Return the option in front of a wrong separator, as in `max_split_size_mb=64`."""
    head = re.match(r"[A-Za-z0-9_]+", name)
    return head.group() if head else name


def _describe_expected(option: Option) -> str:
    low, high = f"{option.low:g}", f"{option.high:g}" if option.high < LARGEST_MB else ""
    if option.kind == "flag":
        return "True or False, in this exact case"
    if option.kind == "word":
        return " or ".join(option.words)
    if option.kind == "fraction":
        return f"a number between {low} and {high}" + (
            ", neither of them" if option.is_open else ""
        )
    if option.kind == "divisions":
        return (
            "a power of two, or [SIZE_IN_MB:DIVISION,...,>:DIVISION] with ascending powers of two"
        )
    kind = "a power of two" if option.is_power_of_two else "a whole number without unit"
    return f"{kind} from {low} to {high}" if high else f"{kind}, at least {low}"


def _value_error(option: Option, text: str) -> AllocatorOptionError:
    return AllocatorOptionError(
        option.name, f"expected {_describe_expected(option)}, got {text!r} ({option.doc})"
    )


def _parse_flag(option: Option, text: str) -> bool:
    if text not in ("True", "False"):
        raise _value_error(option, text)
    return text == "True"


def _parse_word(option: Option, text: str) -> str:
    if text not in option.words:
        raise _value_error(option, text)
    return text


def _parse_whole(option: Option, text: str) -> int:
    # 2**63 has 19 digits; int() refuses thousands of digits
    if len(text) > 20 or not _WHOLE.fullmatch(text):
        raise _value_error(option, text)
    value = int(text)
    if not option.low <= value <= option.high or (
        option.is_power_of_two and not _is_power_of_two(value)
    ):
        raise _value_error(option, text)
    return value


def _parse_fraction(option: Option, text: str) -> float:
    if len(text) > 40 or not _FRACTION.fullmatch(text):
        raise _value_error(option, text)
    value = float(text)
    inside = (
        option.low < value < option.high if option.is_open else option.low <= value <= option.high
    )
    if not inside:
        raise _value_error(option, text)
    return value


def _parse_divisions(option: Option, text: str) -> Divisions:
    if not text.startswith("["):
        return _parse_division(option, text, text, low=1)
    if not text.endswith("]") or "[" in text[1:] or "]" in text[:-1]:
        raise AllocatorOptionError(option.name, f"brackets do not match in {text!r}")
    divisions: dict[str, int] = {}
    for pair in text[1:-1].split(","):
        size, colon, division = (part.strip() for part in pair.partition(":"))
        if not colon:
            raise AllocatorOptionError(
                option.name, f"expected SIZE:DIVISION, got {pair!r} in {text!r}"
            )
        _check_size(option, size, list(divisions), text)
        divisions[size] = _parse_division(option, division, text, low=0)
    return divisions


def _check_size(option: Option, size: str, before: list[str], text: str) -> None:
    if ">" in before:
        raise AllocatorOptionError(option.name, f"'>' must stand last and once in {text!r}")
    if size == ">":
        return
    largest = 2 ** (ROUNDUP_INTERVALS - 1)
    if (
        len(size) > 5
        or not _WHOLE.fullmatch(size)
        or not _is_power_of_two(int(size))
        or int(size) > largest
    ):
        raise AllocatorOptionError(
            option.name,
            f"sizes are powers of two from 1 to {largest} (MB), got {size!r} in {text!r}",
        )
    if before and int(before[-1]) >= int(size):
        raise AllocatorOptionError(
            option.name, f"sizes must ascend, {size} follows {before[-1]} in {text!r}"
        )


def _parse_division(option: Option, division: str, text: str, low: int) -> int:
    usable = len(division) <= 5 and _WHOLE.fullmatch(division)
    value = int(division) if usable else -1
    if not low <= value <= LARGEST_DIVISION or not (value == 0 or _is_power_of_two(value)):
        zero = "" if low else " or 0 for no rounding"
        raise AllocatorOptionError(
            option.name,
            f"divisions are powers of two up to {LARGEST_DIVISION}{zero}, got {division!r} in"
            f" {text!r}",
        )
    return value


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _format_value(value: Value) -> str:
    if isinstance(value, float):
        # repr may be 1e-05, which people read less easily; the parsers refuse nan and inf.
        return format(Decimal(repr(value)), "f")
    if isinstance(value, dict):
        return "[" + ",".join(f"{size}:{division}" for size, division in value.items()) + "]"
    return str(value)


_PARSERS: dict[str, Callable[[Option, str], Value]] = {
    "flag": _parse_flag,
    "word": _parse_word,
    "whole": _parse_whole,
    "fraction": _parse_fraction,
    "divisions": _parse_divisions,
}
