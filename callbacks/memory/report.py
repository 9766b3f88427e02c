"""Write the memory report: one self-contained HTML page, and its charts as a PNG."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path

from .allocations import Allocation
from .charts import MIB, bars, composition_bar, label, size_text, time_chart
from .figures import GIB, StepRecord
from .phases import PHASES

_PALETTE = {
    "parameters": ("#3b6fb6", "#6f9fe0"),
    "gradients": ("#d9822b", "#efa75a"),
    "optimizer-state": ("#4f9d69", "#74c08d"),
    "unsharded-units": ("#8a63b8", "#b08fdc"),
    "reduce-buffer": ("#3f8fa8", "#6cb6cc"),
    "buffers": ("#9c755f", "#c29a83"),
    "graph-inputs": ("#5b8c8c", "#7fb3b3"),
    "graph-pool": ("#c2577f", "#e07fa4"),
    "process": ("#b3bac2", "#59636e"),
    "activations": ("#c9bb3d", "#ddd05f"),
    "forward": ("#3b6fb6", "#6f9fe0"),
    "backward": ("#d9822b", "#efa75a"),
    "optimizer": ("#4f9d69", "#74c08d"),
    "validation": ("#8a63b8", "#b08fdc"),
    "checkpoint": ("#c2577f", "#e07fa4"),
    "other": ("#8b949e", "#9aa4af"),
    "reserved": ("#57606a", "#c9d1d9"),
    "peak": ("#3b6fb6", "#6f9fe0"),
}

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#59636e;--rule:#d9dee3;%s}
@media (prefers-color-scheme:dark){:root{--paper:#12161b;--ink:#e4e8ec;--soft:#9aa4af;--rule:#2c333b;%s}}
body{margin:0 auto;padding:28px 20px 60px;max-width:900px;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 4px}p{margin:4px 0 12px;color:var(--soft)}
svg{width:100%%;height:auto;display:block}
.grid{stroke:var(--rule);stroke-width:1}.tick{fill:var(--soft);font-size:12px}.end{text-anchor:end}
.name{fill:var(--ink);font-size:13px;text-anchor:end}.inside{fill:#fff;font-size:13px;font-weight:600;paint-order:stroke;stroke:#0007;stroke-width:3px}
.area{opacity:.85}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:6px 0 0}
i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
table{border-collapse:collapse;width:100%%;margin-top:12px;font-size:14px}
th{text-align:left;font-weight:600;color:var(--soft)}td,th{padding:5px 8px;border-bottom:1px solid var(--rule)}
td:nth-child(n+2),th:nth-child(n+2){text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.stacks td:last-child,.stacks th:last-child{text-align:left;white-space:normal;width:70%%;overflow-wrap:anywhere}
pre{margin:6px 0;font-size:12px;white-space:pre-wrap;overflow-wrap:anywhere;color:var(--soft)}
summary{cursor:pointer}.figures{display:flex;flex-wrap:wrap;gap:12px 36px;margin:18px 0 0}
.figures div{font-size:13px;color:var(--soft)}.figures b{display:block;font-size:22px;color:var(--ink)}
.remark{border-left:4px solid #d9822b;padding:6px 14px;margin:14px 0;white-space:pre-wrap;font-size:14px}
"""  # noqa: E501


@dataclass(frozen=True)
class ReportData:
    """The data of a report; sizes in bytes, keys of `ranks` as in `memory_figures.KEYS`."""

    title: str
    source: str
    records: Sequence[StepRecord]
    composition: Mapping[str, int]  # bytes of the run's peak by category
    phase_peaks: Mapping[str, int]
    close_steps: int  # number of steps with a reading for each phase
    ranks: Sequence[Mapping[str, float]]
    allocations: Sequence[Allocation]
    remarks: Sequence[str] = field(default_factory=list)
    run: str = ""  # which: model, strategy, host, date, versions


def write_report(path: Path, data: ReportData) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(data), encoding="utf-8")


def render(data: ReportData) -> str:
    """Return the page as text."""
    light, dark = (
        "".join(f"--{name}:{pair[i]};" for name, pair in _PALETTE.items()) for i in (0, 1)
    )
    steps = [record.step for record in data.records]
    sections = [
        _render_section(
            "Memory over time, by category",
            _category_text(data),
            time_chart(steps, *_category_series(data)),
        ),
        _render_section("Memory over time, by phase", _phase_text(data), _draw_phases(data)),
        _render_section(
            "What the peak is made of",
            f"The peak of rank 0, {size_text(sum(data.composition.values()))}.",
            composition_bar(data.composition),
        ),
        _render_section(
            "Peak of each phase", "Over the whole run, on rank 0.", bars(_phase_rows(data))
        ),
        _render_section(
            "Ranks",
            f"The peak{' and what the allocator reserved' * (data.source == 'cuda')}, over the"
            " whole run.",
            bars(_rank_rows(data)),
        ),
        _render_section("Largest allocations", _allocation_text(data), _render_allocations(data)),
    ]
    remarks = "".join(f'<div class="remark">{escape(remark)}</div>' for remark in data.remarks)
    return (
        '<!doctype html><html lang="en"><head><meta'
        f' charset="utf-8"><title>{escape(data.title)}</title>'
        '<meta name="viewport"'
        f' content="width=device-width"><style>{_STYLE % (light, dark)}</style></head>'
        f"<body><h1>{escape(data.title)}</h1><p>{escape(data.run)}</p>{_render_headline(data)}{remarks}"
        f"{''.join(sections)}</body></html>"
    )


def _render_headline(data: ReportData) -> str:
    peak = max((rank["memory/peak_gib"] for rank in data.ranks), default=0.0) * GIB
    worst = max(range(len(data.ranks)), key=lambda i: data.ranks[i]["memory/peak_gib"], default=0)
    phase = max(data.phase_peaks, key=lambda name: data.phase_peaks[name], default="-")
    fragmentation = max((rank["memory/fragmentation"] for rank in data.ranks), default=0.0)
    retries = max((rank["memory/retries"] for rank in data.ranks), default=0.0)
    figures = [
        (size_text(peak), f"highest peak: rank {worst}, of {len(data.ranks)} ranks"),
        (phase, "phase with the peak, on rank 0"),
    ]
    if data.source == "cuda":
        figures += [
            (f"{fragmentation:.1%}", "of reserved memory unused at the end"),
            (f"{retries:.0f}", "retries"),
        ]
    return (
        '<div class="figures">'
        + "".join(f"<div><b>{big}</b>{small}</div>" for big, small in figures)
        + "</div>"
    )


def _render_section(title: str, text: str, body: str) -> str:
    return f"<h2>{title}</h2><p>{text}</p>{body}"


def _category_text(data: ReportData) -> str:
    process = (
        "" if data.source == "cuda" else " Process is what was resident before training began."
    )
    return f"Each step's peak on rank 0. Others are what no category explains, a leak too.{process}"


def _category_series(data: ReportData) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    names = [
        name for name in data.composition if name not in ("activations", "graph_pool", "process")
    ]
    areas: dict[str, list[float]] = {
        "process": [float(data.composition.get("process", 0))] * len(data.records)
    }
    areas.update(
        {name: [float(record.ledger.get(name, 0)) for record in data.records] for name in names}
    )
    areas = {name: values for name, values in areas.items() if any(values)}
    peaks = [float(record.peak) for record in data.records]
    known = [sum(values[i] for values in areas.values()) for i in range(len(peaks))]
    areas["activations"] = [
        max(0.0, peak - below) for peak, below in zip(peaks, known, strict=True)
    ]
    lines = (
        {"reserved": [float(record.reserved) for record in data.records]}
        if data.source == "cuda"
        else {}
    )
    return areas, lines


def _phase_text(data: ReportData) -> str:
    return (
        f"The largest use within each phase, of the {data.close_steps} steps that were read between"
        " their phases."
    )


def _draw_phases(data: ReportData) -> str:
    steps, lines = _phase_series(data)
    return time_chart(steps, {}, lines)


def _phase_series(data: ReportData) -> tuple[list[int], dict[str, list[float]]]:
    """Return (steps, bytes by phase) of the steps with a reading for each phase.

    Where such a step lacks a phase, the value is that of the step's end.
    """
    records = [record for record in data.records if record.peaks]
    lines = {
        phase: [float(record.peaks.get(phase, record.allocated)) for record in records]
        for phase in PHASES
        if any(phase in record.peaks for record in records)
    }
    return [record.step for record in records], lines


def _phase_rows(data: ReportData) -> list[tuple[str, dict[str, float]]]:
    return [
        (phase, {phase: float(data.phase_peaks[phase])})
        for phase in PHASES
        if phase in data.phase_peaks
    ]


def _rank_rows(data: ReportData) -> list[tuple[str, dict[str, float]]]:
    return [
        (
            f"rank {rank}",
            {"peak": figures["memory/peak_gib"] * GIB}
            | ({"reserved": figures["run/peak_reserved"]} if data.source == "cuda" else {}),
        )
        for rank, figures in enumerate(data.ranks)
    ]


def _allocation_text(data: ReportData) -> str:
    if any(allocation.stack for allocation in data.allocations):
        return (
            "Alive at the highest point of the recorded allocations, by the place in the program"
            " that made them."
        )
    return "The largest tensors alive when training ended, and what holds them."


def _render_allocations(data: ReportData) -> str:
    rows = []
    for allocation in data.allocations:
        where = escape(allocation.what)
        if allocation.stack:
            stack = escape("\n".join(allocation.stack))
            where = f"<details><summary>{where}</summary><pre>{stack}</pre></details>"
        rows.append(
            f"<tr><td>{size_text(allocation.size)}</td><td>{allocation.count}</td><td>{where}</td></tr>"
        )
    return (
        "<table"
        f' class="stacks"><tr><th>size</th><th>count</th><th>what</th></tr>{"".join(rows)}</table>'
    )


def write_png(path: Path, data: ReportData) -> None:
    """Write the page's charts as one picture."""
    figure_type = import_module("matplotlib.figure").Figure
    figure = figure_type(figsize=(9, 12), layout="constrained")
    over_time, phases, peak, ranks = figure.subplots(
        4, 1, height_ratios=(3, 3, 1.2, 1 + 0.3 * len(data.ranks))
    )
    steps = [record.step for record in data.records]
    areas, lines = _category_series(data)
    highest = max((record.peak for record in data.records), default=0)
    unit, scale = ("GiB", GIB) if highest >= GIB else ("MiB", MIB)
    colors = {name.replace("-", "_"): pair[0] for name, pair in _PALETTE.items()}
    scaled = {name: [value / scale for value in values] for name, values in areas.items()}
    labels = [label(name) for name in scaled]
    over_time.stackplot(
        steps, *scaled.values(), labels=labels, colors=[colors[name] for name in scaled]
    )
    for name, values in lines.items():
        over_time.plot(steps, [value / scale for value in values], color=colors[name], label=name)
    over_time.set(title="Memory over time, by category", ylabel=unit, xlabel="step")
    over_time.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, fontsize="small")
    detailed, by_phase = _phase_series(data)
    for phase, values in by_phase.items():
        phases.plot(detailed, [value / scale for value in values], label=phase, color=colors[phase])
    phases.set(title="Memory over time, by phase", ylabel=unit, xlabel="step")
    phases.legend(loc="lower right", fontsize="small")
    left = 0.0
    for name, size in sorted(
        ((n, size) for n, size in data.composition.items() if size), key=lambda item: -item[1]
    ):
        peak.barh([0], [size / scale], left=left, label=label(name), color=colors[name])
        left += size / scale
    peak.set(title="What the peak is made of", xlabel=unit, yticks=[])
    peak.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=4, fontsize="small")
    ranks.barh(
        [f"rank {i}" for i in range(len(data.ranks))],
        [rank["memory/peak_gib"] * GIB / scale for rank in data.ranks],
        color=colors["peak"],
    )
    ranks.set(title="Peak by rank", xlabel=unit)
    ranks.invert_yaxis()
    figure.savefig(path, dpi=110)
