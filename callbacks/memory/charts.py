"""Charts as SVG text, drawn from plain numbers; no script, no network, light and dark."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, log10

GIB = 2**30
MIB = 2**20
WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 12, 42
BAR = 26

# A name keeps its color through the page (CSS variables, so that both themes can choose).
ORDER = (
    *(
        "parameters",
        "gradients",
        "optimizer_state",
        "slots",
        "buffers",
        "graph_inputs",
        "graph_pool",
        "process",
        "activations",
    ),
    *("forward", "backward", "optimizer", "validation", "checkpoint", "other", "reserved", "peak"),
)


def color(name: str) -> str:
    """The CSS variable of a series."""
    return f"var(--{name.replace('_', '-')})" if name in ORDER else "var(--other)"


def label(name: str) -> str:
    """For people."""
    return escape(name.replace("_", " "))


def size_text(size: float | None) -> str:
    """Bytes for people."""
    if size is None:
        return "unknown"
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / 1024:.0f} KiB"


def legend(names: Sequence[str]) -> str:
    """Names beside their colors."""
    items = "".join(
        f'<span><i style="background:{color(name)}"></i>{label(name)}</span>' for name in names
    )
    return f'<div class="legend">{items}</div>'


def time_chart(
    steps: Sequence[int],
    areas: Mapping[str, Sequence[float]],
    lines: Mapping[str, Sequence[float]],
) -> str:
    """Stacked areas with lines above them, over steps; bytes."""
    if not steps:
        return "<p>No steps were recorded.</p>"
    stacked = [sum(values[i] for values in areas.values()) for i in range(len(steps))]
    highest = max([*stacked, *(value for values in lines.values() for value in values), 1.0])
    # Areas are compared by their height and start at 0; lines may start at what they have in
    # common.
    lowest = (
        0.0 if areas else min((value for values in lines.values() for value in values), default=0.0)
    )
    unit, ticks = _ticks(lowest, highest)
    bottom, top = ticks[0][0], ticks[-1][0]
    low, high = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (size - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(ticks, unit, y, low, high, x)]
    floor_line = [0.0] * len(steps)
    for name, values in areas.items():
        roof = [below + value for below, value in zip(floor_line, values, strict=True)]
        points = [*((x(s), y(v)) for s, v in zip(steps, roof, strict=True))]
        points += [(x(s), y(v)) for s, v in zip(reversed(steps), reversed(floor_line), strict=True)]
        title = f"<title>{label(name)}: up to {size_text(max(values))}</title>"
        parts.append(
            f'<polygon points="{_points(points)}" fill="{color(name)}"'
            f' class="area">{title}</polygon>'
        )
        floor_line = roof
    for name, values in lines.items():
        points = [(x(s), y(v)) for s, v in zip(steps, values, strict=True)]
        title = f"<title>{label(name)}: up to {size_text(max(values))}</title>"
        parts.append(
            f'<polyline points="{_points(points)}" stroke="{color(name)}"'
            f' class="line">{title}</polyline>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>' + legend(
        [*areas, *lines]
    )


def composition_bar(parts: Mapping[str, float]) -> str:
    """One bar, to scale, and the figures under it."""
    total = sum(parts.values()) or 1.0
    ordered = sorted(((size, name) for name, size in parts.items() if size > 0), reverse=True)
    drawn, at = [], 0.0
    for size, name in ordered:
        width = size / total * WIDTH
        text = (
            f'<text x="{at + 6:.1f}" y="32" class="inside">{label(name)}</text>'
            if width > 9 * len(name)
            else ""
        )
        title = f"<title>{label(name)}: {size_text(size)}</title>"
        drawn.append(
            f'<rect x="{at:.1f}" y="8" width="{max(width - 1, 0.5):.1f}" height="38"'
            f' fill="{color(name)}">'
        )
        drawn.append(f"{title}</rect>{text}")
        at += width
    rows = "".join(
        "<tr><td><i"
        f' style="background:{color(name)}"></i>{label(name)}</td><td>{size_text(size)}</td>'
        f"<td>{size / total:.1%}</td></tr>"
        for size, name in ordered
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} 54" role="img">{"".join(drawn)}</svg>'
        f"<table><tr><th>what</th><th>size</th><th>share of the peak</th></tr>{rows}</table>"
    )


def bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A group of horizontal bars for each row; bytes."""
    highest = max((size for _, sizes in rows for size in sizes.values()), default=1.0) or 1.0
    parts, at = [], 4.0
    for name, sizes in rows:
        middle = at + len(sizes) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT + 24}" y="{middle:.1f}" class="name">{escape(name)}</text>')
        for series, size in sizes.items():
            width = size / highest * (WIDTH - LEFT - 140)
            parts.append(
                f'<rect x="{LEFT + 32}" y="{at:.1f}" width="{width:.1f}" height="{BAR - 6}"'
                f' fill="{color(series)}"><title>{label(series)}:'
                f' {size_text(size)}</title></rect><text x="{LEFT + 38 + width:.1f}"'
                f' y="{at + 15:.1f}" class="tick">{size_text(size)}</text>'
            )
            at += BAR
        at += 8
    series = list(rows[0][1]) if rows else []
    drawn = f'<svg viewBox="0 0 {WIDTH} {at:.0f}" role="img">{"".join(parts)}</svg>'
    return drawn + (legend(series) if len(series) > 1 else "")


def _ticks(lowest: float, highest: float) -> tuple[str, list[tuple[float, str]]]:
    """(unit, [(bytes, text)]): round steps that enclose both."""
    scale, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    rough = max((highest - lowest) / scale / 5, highest / scale / 1000, 1e-3)
    power = 10 ** floor(log10(rough))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * 0.999)
    first, last = floor(lowest / scale / step), int(highest / scale / step) + 1
    return unit, [(i * step * scale, f"{i * step:g}") for i in range(first, last + 1)]


def _axes(
    ticks: Sequence[tuple[float, str]],
    unit: str,
    y: Callable[[float], float],
    low: float,
    high: float,
    x: Callable[[float], float],
) -> str:
    parts = []
    for size, text in ticks:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(size):.1f}" y2="{y(size):.1f}"'
            ' class="grid"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y(size) + 4:.1f}" class="tick end">{text}</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2:.0f}" class="tick" transform="rotate(-90 14'
        f' {HEIGHT / 2:.0f})">{unit}</text>'
    )
    for i in range(6):
        step = low + (high - low) * i / 5
        anchor = "end" if i == 5 else "middle"
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 17}" class="tick"'
            f' text-anchor="{anchor}">{step:.0f}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" class="tick"'
        ' text-anchor="middle">step</text>'
    )
    return "".join(parts)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
