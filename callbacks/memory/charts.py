"""Draw charts as SVG text from plain numbers; no script, no network, for light and dark themes."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, log10

GIB = 2**30
MIB = 2**20
WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 12, 42
BAR = 26  # height of a bar with the space below it

# A name keeps its color through the page (CSS variables, so that both themes can choose).
COLORED = (
    "parameters gradients optimizer_state unsharded_units reduce_buffer buffers graph_inputs"
    " graph_pool process activations forward backward optimizer validation checkpoint other"
    " reserved peak".split()
)


def color(name: str) -> str:
    """Return the CSS variable of a series."""
    return f"var(--{name.replace('_', '-')})" if name in COLORED else "var(--other)"


def label(name: str) -> str:
    """Return the name of a series as HTML text for people."""
    if name == "activations":
        return "activations and others"
    return escape(name.replace("_", " "))


def size_text(size: float | None) -> str:
    """Format bytes for people."""
    if size is None:
        return "unknown"
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / 1024:.0f} KiB"


def legend(names: Sequence[str]) -> str:
    """Draw names beside their colors."""
    items = "".join(
        f'<span><i style="background:{color(name)}"></i>{label(name)}</span>' for name in names
    )
    return f'<div class="legend">{items}</div>'


def time_chart(
    steps: Sequence[int],
    areas: Mapping[str, Sequence[float]],
    lines: Mapping[str, Sequence[float]],
) -> str:
    """Draw stacked areas, with lines above them, over steps; values are bytes."""
    if not steps:
        return "<p>No steps were recorded.</p>"
    stacked = [sum(values[i] for values in areas.values()) for i in range(len(steps))]
    highest = max([*stacked, *(value for values in lines.values() for value in values), 1.0])
    # Areas start at 0, as readers compare their heights; lines may start at their lowest value.
    lowest = 0.0
    if not areas:
        lowest = min((value for values in lines.values() for value in values), default=0.0)
    unit, ticks = _ticks(lowest, highest)
    bottom, top = ticks[0][0], ticks[-1][0]
    low, high = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (size - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(ticks, unit, y, low, high, x)]
    lower = [0.0] * len(steps)
    for name, values in areas.items():
        upper = [below + value for below, value in zip(lower, values, strict=True)]
        points = [(x(s), y(v)) for s, v in zip(steps, upper, strict=True)]
        points += [(x(s), y(v)) for s, v in zip(reversed(steps), reversed(lower), strict=True)]
        title = f"<title>{label(name)}: up to {size_text(max(values))}</title>"
        parts.append(
            f'<polygon points="{_points(points)}" fill="{color(name)}"'
            f' class="area">{title}</polygon>'
        )
        lower = upper
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
    """Draw one bar to scale, and a table of the figures under it; sizes are bytes."""
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
    """Draw a group of horizontal bars for each row; sizes are bytes."""
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
    names = list(rows[0][1]) if rows else []
    drawn = f'<svg viewBox="0 0 {WIDTH} {at:.0f}" role="img">{"".join(parts)}</svg>'
    return drawn + (legend(names) if len(names) > 1 else "")


def _ticks(lowest: float, highest: float) -> tuple[str, list[tuple[float, str]]]:
    """Return (unit, [(bytes, text)]): round values that enclose both bounds."""
    scale, unit = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    rough = max((highest - lowest) / scale / 5, highest / scale / 1000, 1e-3)
    step = _nice(rough)
    first, last = floor(lowest / scale / step), int(highest / scale / step) + 1
    return unit, [(i * step * scale, f"{i * step:g}") for i in range(first, last + 1)]


def _nice(rough: float) -> float:
    """Return a round distance of ticks that is not below ``rough``."""
    power = 10 ** floor(log10(rough))
    return next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * 0.999)


def _axes(
    ticks: Sequence[tuple[float, str]],
    unit: str,
    y: Callable[[float], float],
    low: int,
    high: int,
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
    every = max(1, round(_nice((high - low) / 5)))
    for step in range(-(-low // every) * every, high + 1, every):
        anchor = "end" if step == high else "middle"
        parts.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 17}" class="tick"'
            f' text-anchor="{anchor}">{step}</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" class="tick"'
        ' text-anchor="middle">step</text>'
    )
    return "".join(parts)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
