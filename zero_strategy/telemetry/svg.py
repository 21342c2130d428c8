"""Line and stacked-area charts as SVG text.

Colours are CSS variables of the page (`--ink --muted --grid` and one per series), so one drawing
serves light and dark. Nothing outside the drawing is referenced.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 250
_TOP, _BOTTOM, _RIGHT = 12, 30, 14
# Advance of a digit at the tick labels' 11 px, for the width of the left margin.
_DIGIT_PX = 6.3
# More points than pixels draw the same picture and a larger file.
_MAX_POINTS = 240

Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line or layer: points with a finite value, in order of x."""

    name: str
    colour: str
    """Name of a CSS variable, without dashes."""
    points: list[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Where data fall on the drawing."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    y_format: Format
    left: float = field(default=48.0)

    def x(self, value: float) -> float:
        """Pixel of a value on the horizontal axis."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        """Pixel of a value on the vertical axis; outliers leave the drawing at the top."""
        low, high = self.y_range
        share = (value - low) / (high - low)
        return HEIGHT - _BOTTOM - min(max(share, 0.0), 3.0) * (HEIGHT - _TOP - _BOTTOM)


def line_chart(series: Sequence[Series], *, label: str, y_format: Format, zero: bool) -> str:
    """Lines over the step number.

    Args:
        series: at least one with points.
        label: said to those who cannot see the drawing.
        y_format: text of a tick label.
        zero: whether the vertical axis starts at zero.

    Returns: an `<svg>` element. Where a line has more points than the drawing can show, the line
        is the mean of neighbours and a pale band spans their extremes.
    """
    values = [y for one in series for _, y in one.points]
    axes = _axes(series, _limits(values, zero=zero), y_format)
    body = [_grid(axes)]
    for one in series:
        buckets = _buckets(one.points)
        if len(buckets) < len(one.points):
            band = [(x, high) for x, _, _, high in buckets]
            band += [(x, low) for x, _, low, _ in reversed(buckets)]
            body.append(_area(axes, band, one.colour, opacity=0.18))
        line = [(x, mean) for x, mean, _, _ in buckets]
        body.append(_line(axes, line, one))
    return _svg(body, label)


def stacked_chart(layers: Sequence[Series], *, label: str, y_format: Format) -> str:
    """Layers piled on one another over the step number.

    Args:
        layers: from the bottom up; equal x, values of at least zero.
        label: said to those who cannot see the drawing.
        y_format: text of a tick label.

    Returns: an `<svg>` element.
    """
    xs = [x for x, _ in layers[0].points]
    edges = [[0.0] * len(xs)]
    for layer in layers:
        edges.append([below + y for below, (_, y) in zip(edges[-1], layer.points, strict=True)])
    axes = _axes(layers, _limits(edges[-1], zero=True, headroom=1.25), y_format)
    body = [_grid(axes)]
    for layer, lower, upper in zip(layers, edges, edges[1:], strict=False):
        top = [(x, mean) for x, mean, _, _ in _buckets(list(zip(xs, upper, strict=True)))]
        base = [(x, mean) for x, mean, _, _ in _buckets(list(zip(xs, lower, strict=True)))]
        body.append(_area(axes, top + base[::-1], layer.colour, opacity=0.85))
    return _svg(body, label)


def bar(parts: Sequence[tuple[float, str]], *, total: float, label: str) -> str:
    """One horizontal bar of parts side by side.

    Args:
        parts: size and colour of each, from the left.
        total: size of the whole width.
        label: said to those who cannot see the drawing.
    """
    body, at = [], 0.0
    for size, colour in parts:
        width = size / total * WIDTH
        body.append(
            f'<rect x="{at:.1f}" y="0" width="{max(width - 1.5, 0.5):.1f}" height="14" rx="2" '
            f'fill="var(--{colour})"/>'
        )
        at += width
    return (
        f'<svg viewBox="0 0 {WIDTH} 14" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )


def ticks(low: float, high: float, *, at_most: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that divide a range."""
    rough = (high - low) / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [n * spacing for n in range(first, last + 1)]


def _limits(values: Sequence[float], *, zero: bool, headroom: float = 2.0) -> tuple[float, float]:
    """A vertical range that a few outliers cannot flatten.

    Args:
        values: what is drawn.
        zero: whether the range starts at zero.
        headroom: how far it may reach above 95 % of the values, as a multiple of their range.
    """
    ordered = sorted(values)
    low = 0.0 if zero else ordered[0]
    high = ordered[-1]
    # Of fewer than twenty values none is an outlier.
    usual = ordered[int(0.95 * (len(ordered) - 1))] if len(ordered) >= 20 else high
    if usual > low:
        high = min(high, low + headroom * (usual - low))
    if high <= low:
        high = low + (abs(low) or 1.0)
    margin = 0.06 * (high - low)
    return (low if zero else low - margin), high + margin


def _axes(series: Sequence[Series], y_range: tuple[float, float], y_format: Format) -> Axes:
    xs = [x for one in series for x, _ in one.points]
    low, high = min(xs), max(xs)
    longest = max(len(y_format(tick)) for tick in ticks(*y_range, at_most=5))
    return Axes(
        x_range=(low, high if high > low else low + 1),
        y_range=y_range,
        y_format=y_format,
        left=longest * _DIGIT_PX + 12,
    )


def _grid(axes: Axes) -> str:
    lines = []
    for tick in ticks(*axes.y_range, at_most=5):
        y = axes.y(tick)
        lines.append(
            f'<line x1="{axes.left:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{axes.left - 7:.1f}" y="{y + 3.8:.1f}" text-anchor="end">'
            f"{escape(axes.y_format(tick))}</text>"
        )
    lines += [
        f'<text x="{axes.x(tick):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{int(tick)}</text>'
        for tick in ticks(*axes.x_range, at_most=6)
        if tick == int(tick)
    ]
    return f'<g class="grid">{"".join(lines)}</g>'


def _buckets(points: list[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """Neighbours brought together: x, mean, least and greatest of each group."""
    size = max(1, math.ceil(len(points) / _MAX_POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    buckets = []
    for group in groups:
        ys = [y for _, y in group]
        buckets.append((group[-1][0], sum(ys) / len(ys), min(ys), max(ys)))
    return buckets


def _path(axes: Axes, points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{axes.x(x):.1f} {axes.y(y):.1f}" for x, y in points)


def _line(axes: Axes, points: Sequence[tuple[float, float]], series: Series) -> str:
    if len(points) == 1:
        (x, y), *_ = points
        return (
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3" '
            f'fill="var(--{series.colour})"/>'
        )
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    return f'<path class="line" stroke="var(--{series.colour})"{dash} d="M{_path(axes, points)}"/>'


def _area(
    axes: Axes, outline: Sequence[tuple[float, float]], colour: str, *, opacity: float
) -> str:
    return f'<path fill="var(--{colour})" fill-opacity="{opacity}" d="M{_path(axes, outline)}Z"/>'


def _svg(body: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(body)
        + "</svg>"
    )
