"""The tracker's figures: their keys and meanings, their order in a collective, their table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .charts import GIB, size_text
from .ledger import CATEGORIES
from .phases import PHASES
from .ranks import Spread
from .source import Sample, Surroundings

NAN = float("nan")

KEYS: Mapping[str, str] = {
    "memory/peak_gib": "GiB: largest in use by tensors since the last logging step",
    **{
        f"memory/peak_{phase}_gib": (
            f"GiB: the same, within {phase}, in steps that were read closely"
        )
        for phase in PHASES
    },
    "memory/allocated_gib": (
        "GiB: in use by tensors at the end of the step (without CUDA: resident)"
    ),
    "memory/reserved_gib": "GiB: held by the allocator (without CUDA: resident)",
    "memory/inactive_gib": (
        "GiB: reserved, unused and split (without CUDA: free chunks of the heap)"
    ),
    "memory/fragmentation": "share of reserved memory that is unused, 0 to 1",
    "memory/retries": "count: times the allocator emptied its cache to serve a request",
    "memory/ooms": "count: out-of-memory errors, those that the program caught too",
    "memory/pinned_gib": "GiB: pinned host memory held by torch",
    "memory/outside_gib": "GiB: used by other processes, the CUDA context and NCCL",
    "memory/graph_pool_gib": "GiB: reserved by the private pools of CUDA graphs",
    **{
        f"memory/{category}_gib": f"GiB: {category.replace('_', ' ')} on this rank"
        for category in CATEGORIES
    },
    "memory/process_gib": (
        "GiB: without CUDA, what the process had before training: the interpreter, libraries, data"
    ),
    "memory/activations_gib": (
        "GiB: the rest of the peak: activations, and all that no other key has, such as a leak"
    ),
}
# Over several ranks every key has the highest rank's value; these also have /min, /mean and
# /max_rank.
SPREAD_KEYS = ("memory/peak_gib", "memory/reserved_gib", "memory/fragmentation")
# Figures that only torch's CUDA allocator counts: 0 in every other run.
CUDA_ALLOCATOR_KEYS = (
    "memory/retries",
    "memory/ooms",
    "memory/pinned_gib",
    "memory/graph_pool_gib",
)


REST = "activations: the rest of the peak, with all that has no row, such as a leak"
WORDS = (
    "inactive: reserved, in blocks that are partly used; fragmentation: unused share of what is"
    f" reserved;\noutside: not torch's; reduce buffer: gradients on their way;\n{REST}"
)


def collect(
    peak: int,
    peaks: Mapping[str, int],
    sample: Sample,
    around: Surroundings,
    ledger: Mapping[str, int],
    process: int,
) -> list[float]:
    """Return the figures in the order of `KEYS`; NaN for a phase that did not happen.

    Sizes are bytes in the arguments and GiB in the result.
    """
    sizes: list[float] = [peak, *(peaks.get(phase, NAN) for phase in PHASES)]
    sizes += [sample.allocated, sample.reserved, sample.inactive]
    rest = [around.pinned_reserved, around.outside, sample.graph_pool]
    rest += [ledger[category] for category in CATEGORIES]
    rest += [process, activations(peak, sample, ledger, process)]
    return [
        *(size / GIB for size in sizes),
        sample.fragmentation,
        float(sample.retries),
        float(sample.ooms),
        *(size / GIB for size in rest),
    ]


def activations(peak: int, sample: Sample, ledger: Mapping[str, int], process: int) -> int:
    """Return the bytes of the peak that no category explains."""
    return max(0, peak - sum(ledger.values()) - sample.graph_pool - process)


@dataclass(frozen=True)
class StepRecord:
    """One step in the report; sizes in bytes."""

    step: int
    peak: int
    peaks: Mapping[str, int]  # bytes by phase; empty for a step that was not read closely
    allocated: int
    reserved: int
    waste: int
    ledger: Mapping[str, int]  # bytes by category, of the last logging step


@dataclass
class History:
    """Steps for the report, at most `limit` records.

    When full, each two records become one, and from then on twice as many steps share a record.
    """

    limit: int = 2000
    records: list[StepRecord] = field(default_factory=list)
    stride: int = 1  # steps that share a record
    _steps: int = 0

    def add(self, record: StepRecord) -> None:
        """Add the record, or merge it into the last one, which keeps the larger peaks."""
        self._steps += 1
        if self.records and (self._steps - 1) % self.stride:
            self.records[-1] = _merge_records(self.records[-1], record)
            return
        self.records.append(record)
        if len(self.records) >= self.limit:
            pairs = zip(self.records[::2], self.records[1::2], strict=False)
            self.records = [_merge_records(first, second) for first, second in pairs]
            self.stride *= 2


def _merge_records(first: StepRecord, second: StepRecord) -> StepRecord:
    """Merge the records of two steps into one that has the larger peaks."""
    peaks = {
        phase: max(first.peaks.get(phase, 0), second.peaks.get(phase, 0))
        for phase in {*first.peaks, *second.peaks}
    }
    return StepRecord(
        first.step,
        max(first.peak, second.peak),
        peaks,
        max(first.allocated, second.allocated),
        max(first.reserved, second.reserved),
        max(first.waste, second.waste),
        second.ledger,
    )


def render_table(title: str, spreads: Mapping[str, Spread], world_size: int) -> str:
    """Return the table at the end of a run as text."""
    heads = ["", "highest", "mean", "lowest", "rank of highest"] if world_size > 1 else ["", "run"]
    rows = []
    for name, figure in spreads.items():
        label = name.partition("/")[2].removesuffix("_gib").removesuffix("_ms").replace("_", " ")
        values = (figure.high, figure.mean, figure.low) if world_size > 1 else (figure.high,)
        row = [label, *(_format_figure(name, value) for value in values)]
        rows.append([*row, str(figure.rank)] if world_size > 1 else row)
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [heads, *rows]
    ]
    return "\n".join([title, *lines])


def _format_figure(name: str, value: float) -> str:
    if name.endswith("_gib"):
        return size_text(value * GIB)
    if name.endswith("_ms"):
        return f"{value:.2f} ms"
    return f"{value:.1%}" if name.endswith("fragmentation") else f"{value:.0f}"
