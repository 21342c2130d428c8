"""`report.html`: a run on one page, made from its CSV files; opens anywhere, fetches nothing."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import final

from zero_strategy.telemetry import text
from zero_strategy.telemetry.csv_log import read_columns
from zero_strategy.telemetry.events import Done, Event, RunFacts
from zero_strategy.telemetry.page import PAGE
from zero_strategy.telemetry.svg import Series, bar, line_chart, stacked_chart
from zero_strategy.telemetry.terminal import checks_line, run_line

Columns = dict[str, list[float | None]]

_PHASES = (
    ("data", "data_ms", "slate"),
    ("forward", "forward_ms", "blue"),
    ("backward", "backward_ms", "teal"),
    ("exposed communication", "exposed_comm_ms", "rose"),
    ("optimizer", "optimizer_ms", "amber"),
)


@final
class Report:
    """Writes the page when training ends.

    Args:
        folder: holds the CSV files; the page goes beside them.
        facts: what is known at the start.
    """

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self._folder = folder
        self._facts = facts

    def write(self, event: Event) -> None:
        """Write the page on `Done`."""
        if isinstance(event, Done):
            write_report(self._folder, facts=self._facts, done=event)


def write_report(folder: Path, *, facts: RunFacts | None = None, done: Done | None = None) -> Path:
    """Make a page of the CSV files of a run, also of one that was killed.

    Args:
        folder: holds `metrics.csv` and, where there was validation, `validation.csv`.
        facts: adds what the run was.
        done: adds how it ended.

    Returns: path of the page.
    """
    steps = read_columns(folder / "metrics.csv")
    validations = read_columns(folder / "validation.csv")
    rank = facts.rank_word if facts else "rank"
    page = PAGE.format(
        title=escape(facts.model if facts else folder.resolve().name),
        subtitle=escape(run_line(facts).partition(" · ")[2] if facts else ""),
        tiles="".join(_tiles(steps, validations, done, rank)),
        learning="".join(_learning(steps, validations)),
        speed="".join(_speed(steps, rank)),
        tiers=_tiers(steps, facts),
        memory="".join(_memory(steps, facts)),
        health="".join(_health(steps, facts)),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _tiles(steps: Columns, validations: Columns, done: Done | None, rank: str) -> list[str]:
    tiles = []

    def tile(name: str, value: str | None) -> None:
        if value is not None:
            tiles.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>")

    tile("steps", _last(steps, "step", ".0f"))
    tile("loss", _last(steps, "loss", ".4f"))
    tile("best val loss", _best(validations, "loss"))
    tile("best val bits/byte", _best(validations, "bits_per_byte"))
    speeds = _points(steps, "tokens_per_s")
    if speeds:
        tile(f"tokens/s per {rank}", text.count(_median(speeds)))
    mfus = _points(steps, "mfu")
    if mfus:
        tile("MFU", text.percent(_median(mfus)))
    peaks = _points(steps, "memory_bytes")
    if peaks:
        tile("peak memory", text.gib(max(y for _, y in peaks)))
    tokens = _points(steps, "tokens")
    if tokens:
        tile("tokens", text.count(tokens[-1][1]))
    times = _points(steps, "elapsed_s")
    if times:
        tile("time", text.duration(times[-1][1]))
    if done is not None:
        tile("productive", text.percent(done.productive_share))
    if done is not None and done.reason:
        tile("stopped by", done.reason)
    return tiles


def _learning(steps: Columns, validations: Columns) -> list[str]:
    return [
        _lines(
            "Loss",
            [
                _series("training", "blue", steps, "loss"),
                _series("validation", "amber", validations, "loss"),
            ],
            _short,
        ),
        _lines(
            "Validation bits per byte",
            [_series("bits per byte", "amber", validations, "bits_per_byte")],
            _short,
        ),
        _lines("Gradient norm", [_series("norm", "teal", steps, "grad_norm")], _short, zero=True),
        _lines("Learning rate", [_series("rate", "violet", steps, "lr")], _scientific, zero=True),
    ]


def _speed(steps: Columns, rank: str) -> list[str]:
    shares = _quotients(steps, "exposed_comm_ms", "step_ms")
    exposed = Series(name="share of the step", colour="rose", points=shares)
    return [
        _stack("Where a step's time goes", _phase_layers(steps)),
        _lines(
            f"Tokens per second per {rank}",
            [_series("tokens/s", "blue", steps, "tokens_per_s")],
            text.count,
            zero=True,
        ),
        _lines("MFU", [_series("MFU", "teal", steps, "mfu")], text.percent, zero=True),
        _lines("Exposed communication", [exposed], text.percent, zero=True),
    ]


def _tiers(steps: Columns, facts: RunFacts | None) -> str:
    """The section on offload; nothing where there was none."""
    shares = _points(steps, "host_share")
    if not shares:
        return ""

    def rate(name: str, colour: str, field: str) -> Series:
        points = [(x, y * 1e3) for x, y in _quotients(steps, field, "step_ms")]
        return Series(name=name, colour=colour, points=points)

    ceiling = facts.link_bytes_per_s if facts else None
    measured = [] if ceiling is None else [(x, ceiling) for x, _ in shares]
    figures = [
        _lines(
            "Copies per link, mean over the step",
            [
                rate("to the host", "blue", "offload_down_bytes"),
                rate("to the device", "teal", "offload_up_bytes"),
                Series(name="ceiling of one way", colour="slate", points=measured, dashed=True),
            ],
            _bytes_per_s,
            zero=True,
        ),
        _lines(
            "Exposed per step",
            [
                _series("forward waits for weights", "rose", steps, "offload_exposed_ms"),
                _series("backward waits for room", "amber", steps, "offload_slot_wait_ms"),
            ],
            _milliseconds,
            zero=True,
        ),
        _lines(
            "Chunks",
            [
                _series("waiting for a pass at most", "violet", steps, "offload_waiting"),
                _series("redone per step", "rose", steps, "offload_redone"),
            ],
            _short,
            zero=True,
        ),
        _lines(
            "Passes per step",
            [
                _series("by the host's cores", "amber", steps, "offload_cpu_passes"),
                _series("by the device", "blue", steps, "offload_stream_passes"),
            ],
            _short,
            zero=True,
        ),
        _lines(
            "State in host memory",
            [Series(name="share of the trained parameters", colour="teal", points=shares)],
            text.percent,
            zero=True,
        ),
    ]
    return f"<h2>Tiers</h2><section>{''.join(figures)}</section>\n"


def _memory(steps: Columns, facts: RunFacts | None) -> list[str]:
    lines = [
        _series("measured", "blue", steps, "memory_bytes"),
        _series("planned, without activations", "slate", steps, "planned_bytes", dashed=True),
    ]
    unit, scale = _binary_unit(max((y for line in lines for _, y in line.points), default=0.0))
    scaled = [replace(line, points=[(x, y / scale) for x, y in line.points]) for line in lines]
    figures = [_lines("Peak per rank", scaled, lambda value: f"{value:.3g} {unit}", zero=True)]
    if facts is None or facts.plan is None:
        return figures
    plan = facts.plan
    parts = (
        ("parameters", plan.params_bytes, "blue"),
        ("gradients", plan.grads_bytes, "teal"),
        ("optimizer", plan.optimizer_bytes, "amber"),
        ("unsharded", plan.unsharded_bytes, "violet"),
    )
    drawing = bar(
        [(size, colour) for _, size, colour in parts],
        total=plan.total_bytes or 1,
        label="planned bytes per rank, by use",
    )
    keys = [(name, colour, text.gib(size)) for name, size, colour in parts]
    title = f"Planned per rank: {text.gib(plan.total_bytes)}"
    return [*figures, _figure(title, keys, drawing)]


def _health(steps: Columns, facts: RunFacts | None) -> list[str]:
    skew = _series("slowest less fastest rank", "rose", steps, "rank_skew_ms")
    many_ranks = facts is not None and facts.world_size > 1
    figures = [_lines("Rank skew", [skew], _milliseconds, zero=True)] if many_ranks else []
    skipped = _last(steps, "skipped_steps", ".0f")
    if skipped not in (None, "0"):
        figures.append(f"<p>Steps skipped for an overflow: {skipped}.</p>")
    if facts is not None and facts.checks:
        figures.append(f"<p>Checks: {escape(checks_line(facts.checks))}.</p>")
    return figures or ["<p>Nothing to report.</p>"]


def _lines(
    title: str, series: Sequence[Series], y_format: Callable[[float], str], *, zero: bool = False
) -> str:
    """A figure of the series that have points; nothing if none has."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    keys = [(one.name, one.colour, y_format(one.points[-1][1])) for one in drawn]
    return _figure(title, keys, line_chart(drawn, label=title, y_format=y_format, zero=zero))


def _stack(title: str, layers: Sequence[Series]) -> str:
    if not layers:
        return ""
    keys = [(one.name, one.colour, _milliseconds(_median(one.points))) for one in layers]
    drawing = stacked_chart(layers, label=title, y_format=_milliseconds)
    return _figure(f"{title} <small>medians; without the first step</small>", keys, drawing)


def _figure(title: str, keys: Sequence[tuple[str, str, str]], drawing: str) -> str:
    legend = "".join(
        f'<li><i style="background:var(--{colour})"></i>{escape(name)} <b>{escape(value)}</b></li>'
        for name, colour, value in keys
    )
    return f"<figure><h3>{title}</h3><ul>{legend}</ul>{drawing}</figure>"


def _series(
    name: str, colour: str, columns: Columns, field: str, *, dashed: bool = False
) -> Series:
    return Series(name=name, colour=colour, points=_points(columns, field), dashed=dashed)


def _points(columns: Columns, field: str) -> list[tuple[float, float]]:
    """Step and value of the rows that have a finite one."""
    pairs = zip(columns.get("step", []), columns.get(field, []), strict=False)
    return [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]


def _quotients(columns: Columns, field: str, per: str) -> list[tuple[float, float]]:
    """Step and quotient of the rows that have both."""
    below = dict(_points(columns, per))
    return [(x, y / below[x]) for x, y in _points(columns, field) if below.get(x)]


def _phase_layers(steps: Columns) -> list[Series]:
    """A layer for each phase that was measured; rows without a figure count as zero.

    The first row is that of the step that warms up, often ten times as long as the others, and is
    left out once there are others.
    """
    layers = []
    for name, field, colour in _PHASES:
        values = steps.get(field, [])
        if any(value is not None for value in values):
            pairs = zip(steps["step"], values, strict=True)
            points = [(x, y or 0.0) for x, y in pairs if x is not None]
            layers.append(Series(name=name, colour=colour, points=points[1:] or points))
    return layers


def _binary_unit(largest_bytes: float) -> tuple[str, int]:
    """Unit in which tick labels are round numbers, and its bytes."""
    return ("GiB", 2**30) if largest_bytes >= 2**30 else ("MiB", 2**20)


def _median(points: Sequence[tuple[float, float]]) -> float:
    return statistics.median(y for _, y in points)


def _last(columns: Columns, field: str, spec: str) -> str | None:
    values = [value for value in columns.get(field, []) if value is not None]
    return format(values[-1], spec) if values else None


def _best(columns: Columns, field: str) -> str | None:
    points = _points(columns, field)
    return f"{min(y for _, y in points):.4f}" if points else None


def _short(value: float) -> str:
    return f"{value:.4g}"


def _scientific(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _bytes_per_s(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _milliseconds(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"
