"""Judge after a run, from the tracker's figures, which allocator option would have helped."""

from collections.abc import Mapping
from dataclasses import dataclass

from .grammar import OPTIONS, Value, Version, to_text

GIB = 2**30
# Fragmentation is worth an option from this share of reserved memory that no tensor uses.
FRAGMENTED = 0.2
LEAST_WASTE = GIB // 4  # bytes; too few to serve one large request, fragmented or not
NEARLY_FULL = 0.85  # share of the device
# Reserved over allocated bytes; rounding up to powers of two makes this 1.5 on average for sizes
# just above one.
PINNED_WASTE = 1.3


@dataclass(frozen=True)
class RunFigures:
    """The memory that a run needed on its fullest rank, in bytes except for counts."""

    source: str  # name of the `MemorySource`: "cuda", "driver" or "process"
    peak_allocated: int
    peak_reserved: int
    capacity: int
    worst_waste: int  # largest reserved minus allocated at the end of a step
    reserved_at_worst: int
    retries: int  # count
    ooms: int  # count
    pinned_allocated: int = 0
    pinned_reserved: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of reserved memory that was unused at the worst step end, 0 to 1."""
        return self.worst_waste / self.reserved_at_worst if self.reserved_at_worst else 0.0


@dataclass(frozen=True)
class Suggestion:
    """An option to set, or "none" with no value, and the reason in figures."""

    option: str
    value: Value | None
    reason: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.option}: {self.reason}"
        return f"{to_text({self.option: self.value})}: {self.reason}"


def suggest(
    figures: RunFigures, options: Mapping[str, Value], version: Version
) -> list[Suggestion]:
    """Suggest every option of this torch that the figures speak for.

    Where no option would help, the one suggestion is "none" with the reason.
    """
    if figures.source != "cuda":
        return [
            Suggestion(
                "none",
                None,
                f"the figures are of {figures.source} memory, which has no allocator options",
            )
        ]
    if options.get("backend") == "cudaMallocAsync":
        return [
            Suggestion(
                "none",
                None,
                "the driver's pool (cudaMallocAsync) has no options against fragmentation",
            )
        ]
    found = [
        *_suggest_against_fragmentation(figures, options),
        *_suggest_against_pinned_waste(figures, options, version),
    ]
    return found or [Suggestion("none", None, _explain_none(figures, options))]


def _suggest_against_fragmentation(
    figures: RunFigures, options: Mapping[str, Value]
) -> list[Suggestion]:
    is_short = (
        figures.retries or figures.ooms or figures.peak_reserved > NEARLY_FULL * figures.capacity
    )
    if not is_short or figures.fragmentation < FRAGMENTED or figures.worst_waste < LEAST_WASTE:
        return []
    state = (
        f"{_gib(figures.worst_waste)} of {_gib(figures.reserved_at_worst)} reserved"
        f" ({figures.fragmentation:.0%}) was unused, with {figures.retries} allocation retries and"
        f" {figures.ooms} out-of-memory errors"
    )
    if not options.get("expandable_segments"):
        return [
            Suggestion(
                "expandable_segments",
                True,
                f"{state}: the memory was there in pieces too small to use",
            )
        ]
    if "roundup_power2_divisions" not in options:
        reason = (
            f"{state} although segments expand: rounding sizes makes freed blocks fit later"
            " requests"
        )
        return [Suggestion("roundup_power2_divisions", 8, reason)]
    return []


def _suggest_against_pinned_waste(
    figures: RunFigures, options: Mapping[str, Value], version: Version
) -> list[Suggestion]:
    waste = figures.pinned_reserved - figures.pinned_allocated
    if waste < GIB or figures.pinned_reserved < PINNED_WASTE * figures.pinned_allocated:
        return []
    if (
        "pinned_max_round_threshold_mb" in options
        or version < OPTIONS["pinned_max_round_threshold_mb"].since
    ):
        return []
    reason = (
        f"{_gib(figures.pinned_reserved)} of host memory is pinned for"
        f" {_gib(figures.pinned_allocated)} in use, since sizes are rounded up to powers of two"
    )
    # Up to torch 2.13 the first option is safe only together with the second one.
    return [
        Suggestion("pinned_max_round_threshold_mb", 64, reason),
        Suggestion("pinned_max_cached_size_mb", 64, "needed with pinned_max_round_threshold_mb"),
    ]


def _explain_none(figures: RunFigures, options: Mapping[str, Value]) -> str:
    if figures.retries or figures.ooms:
        used = figures.peak_allocated / figures.capacity if figures.capacity else 0.0
        if figures.fragmentation < FRAGMENTED:
            return (
                f"memory was really in use ({_gib(figures.peak_allocated)}, {used:.0%} of the"
                f" device) and only {figures.fragmentation:.0%} of the reserved memory idle; use"
                " smaller batches, activation checkpointing or more ranks"
            )
        tried = ", ".join(
            name for name in ("expandable_segments", "roundup_power2_divisions") if name in options
        )
        tried = f" {tried} are set already;" if tried else ""
        return (
            f"{_gib(figures.worst_waste)} idle in reserved memory;{tried} look for blocks that stay"
            " alive too long"
        )
    return (
        f"no retries, no out-of-memory errors, peak {_gib(figures.peak_reserved)} reserved of"
        f" {_gib(figures.capacity)}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
