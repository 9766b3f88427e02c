"""Rules on allocator options that exclude or need each other, each with its reason.

`check_conflicts` refuses combinations; `find_remarks` describes those that work with a side effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .grammar import OPTIONS, AllocatorOptionError, Value, Version, torch_gaps

DEFAULT_LARGE_SEGMENT_MB = 20


@dataclass(frozen=True)
class Surroundings:
    """Facts about the process that the rules need besides the options."""

    version: Version
    caching_disabled: bool = False  # PYTORCH_NO_CUDA_MEMORY_CACHING
    pluggable: bool = False  # an allocator from a shared library replaces torch's


def check_conflicts(options: Mapping[str, Value], around: Surroundings) -> None:
    """Refuse combinations of options that cannot do what a user wants.

    Raises:
        AllocatorOptionError: for the first such combination.
    """
    for rule in (
        _find_ignored_option,
        _find_wrong_size,
        _find_split_of_expandable,
        _find_missing_fraction,
        _find_pinned_conflict,
    ):
        if found := rule(options, around):
            raise AllocatorOptionError(*found)


def find_remarks(options: Mapping[str, Value], with_cuda_graphs: bool) -> list[str]:
    """Return sentences about combinations that work, with effects that a user may not expect."""
    remarks = []
    divisions = options.get("roundup_power2_divisions")
    if isinstance(divisions, (int, dict)) and (gaps := torch_gaps(divisions)):
        remarks.append(
            f"roundup_power2_divisions: torch does not round sizes from {gaps} MB, which are not"
            " named"
        )
    if with_cuda_graphs:
        if "garbage_collection_threshold" in options:
            remarks.append(
                "garbage_collection_threshold: may free memory while a CUDA graph is captured,"
                " which breaks the capture"
            )
        if options.get("pinned_use_background_threads"):
            remarks.append(
                "pinned_use_background_threads: its thread may touch CUDA while a graph is captured"
            )
    return remarks


Conflict = tuple[str, str]  # (option, problem)


def _find_ignored_option(options: Mapping[str, Value], around: Surroundings) -> Conflict | None:
    device = [name for name in options if OPTIONS[name].scope == "device"]
    if around.pluggable and (clash := [*device, *(["backend"] if "backend" in options else [])]):
        return (
            clash[0],
            (
                "a pluggable allocator replaces torch's, which alone obeys this option; leave one"
                " of them out"
            ),
        )
    if around.caching_disabled and device:
        return (
            device[0],
            (
                "PYTORCH_NO_CUDA_MEMORY_CACHING is set, so there is no caching allocator to obey"
                " it; unset the variable"
            ),
        )
    # Both backends obey the fraction, as the driver's pool has a memory limit as well.
    ignored = [name for name in device if name != "per_process_memory_fraction"]
    if options.get("backend") == "cudaMallocAsync" and ignored:
        return ignored[0], "backend:cudaMallocAsync ignores it; leave it out or use backend:native"
    return None


def _find_wrong_size(options: Mapping[str, Value], around: Surroundings) -> Conflict | None:
    segment = _read_whole(options, "large_segment_size_mb", DEFAULT_LARGE_SEGMENT_MB)
    for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        if name in options and _read_whole(options, name, 0) < segment:
            return (
                name,
                f"must be at least large_segment_size_mb, which is {segment}; got {options[name]}",
            )
    if "max_non_split_rounding_mb" in options and "max_split_size_mb" not in options:
        return (
            "max_non_split_rounding_mb",
            "has no effect without max_split_size_mb; set that too or leave this out",
        )
    return None


def _find_split_of_expandable(
    options: Mapping[str, Value], around: Surroundings
) -> Conflict | None:
    if options.get("expandable_segments") and "max_split_size_mb" in options:
        return (
            "max_split_size_mb",
            (
                "together with expandable_segments free blocks above the split size are not reused"
                " and reserved memory grows (pytorch issue 123548); expandable_segments alone"
                " already avoids that fragmentation"
            ),
        )
    return None


def _find_missing_fraction(options: Mapping[str, Value], around: Surroundings) -> Conflict | None:
    fraction = options.get("per_process_memory_fraction", 1.0)
    limited = isinstance(fraction, (int, float)) and fraction < 1.0
    for name in ("garbage_collection_threshold", "throw_on_cudamalloc_oom"):
        if options.get(name) and not limited:
            return (
                name,
                (
                    "has no effect while torch may use the whole device; set"
                    " per_process_memory_fraction below 1"
                ),
            )
    return None


def _find_pinned_conflict(options: Mapping[str, Value], around: Surroundings) -> Conflict | None:
    threads = _read_whole(options, "pinned_num_register_threads", 1)
    if threads > 1 and not options.get("pinned_use_cuda_host_register"):
        return (
            "pinned_num_register_threads",
            "has no effect without pinned_use_cuda_host_register:True; set that too",
        )
    if "pinned_max_round_threshold_mb" in options and around.version <= (2, 13):
        rounded = _read_whole(options, "pinned_max_round_threshold_mb", 0)
        cached = options.get("pinned_max_cached_size_mb")  # None: no limit
        if not isinstance(cached, int) or rounded < cached:
            return (
                "pinned_max_round_threshold_mb",
                (
                    "below pinned_max_cached_size_mb it lets torch up to 2.13 write past the end of"
                    " a cached block (pytorch pull request 192722); set pinned_max_cached_size_mb"
                    " to at most the same value"
                ),
            )
    return None


def _read_whole(options: Mapping[str, Value], name: str, default: int) -> int:
    value = options.get(name, default)
    assert isinstance(value, int)  # the grammar has checked it
    return value
