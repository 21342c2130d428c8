"""What a benchmark leaves behind: rows, ratios, and one JSON file whose shape is checked.

The file is `{"case", "date", "commit", "hardware", "versions", "rows": [{"system", "metric",
"unit", "median", "min", "max", "runs", "note"}], "ratios": {"vs <system>": x}}`. A ratio above 1
means that the library is better. A system that failed is a row without numbers; `note` says why.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

OURS = "zero_strategy"
NUMBERS = ("median", "min", "max")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One metric of one system.

    Attributes:
        system: name of the system, such as "fsdp2".
        metric: what was measured, such as "step time".
        unit: of the numbers, such as "s".
        median: of all runs; None where the system failed.
        min: smallest run.
        max: largest run.
        runs: how many values were taken; 0 where the system failed.
        note: how it was measured, or why it failed.
    """

    system: str
    metric: str
    unit: str
    median: float | None
    min: float | None
    max: float | None
    runs: int
    note: str

    @classmethod
    def of(cls, system: str, metric: str, unit: str, values: Sequence[float], note: str) -> Row:
        """Summarize values, at least one."""
        middle, low, high = (significant(f(values)) for f in (median, min, max))
        return cls(
            system=system,
            metric=metric,
            unit=unit,
            median=middle,
            min=low,
            max=high,
            runs=len(values),
            note=note,
        )

    @classmethod
    def failed(cls, system: str, metric: str, unit: str, reason: str) -> Row:
        """A row that says why there is no number."""
        return cls(
            system=system,
            metric=metric,
            unit=unit,
            median=None,
            min=None,
            max=None,
            runs=0,
            note=f"failed: {reason}",
        )


@dataclass(kw_only=True, slots=True)
class Findings:
    """What a case measured.

    Attributes:
        rows: in the order of the table.
        ratios: "vs <system>" to a number above 1 where we are better.
        broken: what must not be, one line each: a wrong loss, a failure of our own.
    """

    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def median(self, system: str, metric: str) -> float | None:
        """Return the median of a row; None where there is no such number."""
        found = (row for row in self.rows if (row.system, row.metric) == (system, metric))
        return next((row.median for row in found), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A case's findings with everything needed to read them later."""

    case: str
    date: str
    commit: str
    hardware: str
    versions: Mapping[str, str]
    rows: Sequence[Row]
    ratios: Mapping[str, float]

    def write(self, path: Path) -> None:
        """Write the JSON file.

        Raises:
            ValueError: the result breaks a rule of `result_problems`; nothing is written.
        """
        tree = dataclasses.asdict(self)
        if problems := result_problems(tree):
            raise ValueError("\n".join(problems))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tree, indent=1) + "\n")


def significant(value: float, digits: int = 5) -> float:
    """Round to significant digits; more would be noise."""
    return float(f"{value:.{digits}g}")


def ratio(better_when_larger: float | None, over: float | None) -> float | None:
    """Divide where both numbers are known and positive."""
    if not better_when_larger or not over:
        return None
    return significant(better_when_larger / over, 4)


# Checking.

_TEXTS = ("case", "date", "commit", "hardware")
_ROW_TYPES: dict[str, tuple[type, ...]] = {
    "system": (str,),
    "metric": (str,),
    "unit": (str,),
    **dict.fromkeys(NUMBERS, (int, float, type(None))),
    "runs": (int,),
    "note": (str,),
}


def result_problems(tree: Any) -> list[str]:
    """Return everything wrong with a result, one line each.

    Args:
        tree: what `json.loads` gives for a result file.
    """
    keys = {field.name for field in dataclasses.fields(Result)}
    if not isinstance(tree, dict) or set(tree) != keys:
        return [f"result: must be an object of exactly {', '.join(sorted(keys))}."]
    problems = [f"{k}: must be a text." for k in _TEXTS if not _is_text(tree[k])]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(tree["date"])):
        problems.append(f"date = {tree['date']!r}: must be like 2026-01-31.")
    versions = tree["versions"]
    if not isinstance(versions, dict) or not all(map(_is_text, [*versions, *versions.values()])):
        problems.append("versions: must map names to texts.")
    rows = tree["rows"]
    if not isinstance(rows, list | tuple) or not rows:
        return [*problems, "rows: must be a list of at least one row."]
    for i, row in enumerate(rows):
        problems += [f"rows[{i}].{line}" for line in _row_problems(row)]
    if problems:
        return problems
    if len({(row["system"], row["metric"]) for row in rows}) < len(rows):
        problems.append("rows: must hold one row per system and metric.")
    return problems + list(_ratio_problems(tree["ratios"], {row["system"] for row in rows}))


def _row_problems(row: Any) -> list[str]:
    if not isinstance(row, dict) or set(row) != set(_ROW_TYPES):
        return [f": must be an object of exactly {', '.join(_ROW_TYPES)}."]
    wrong = [
        f"{k} = {row[k]!r}: wrong type." for k, t in _ROW_TYPES.items() if type(row[k]) not in t
    ]
    if wrong:
        return wrong
    numbers = [row[name] for name in NUMBERS]
    if row["runs"] == 0:
        fine = numbers == [None] * 3 and row["note"].strip()
        return [] if fine else ["runs = 0: must have no numbers, and the reason in note."]
    if any(x is None or not math.isfinite(x) for x in numbers):
        return [f"{NUMBERS} = {numbers}: must be finite where runs > 0."]
    if not row["min"] <= row["median"] <= row["max"]:
        return [f"{NUMBERS} = {numbers}: must be in order min, median, max."]
    return []


def _ratio_problems(ratios: Any, systems: set[str]) -> Iterable[str]:
    if not isinstance(ratios, dict):
        yield "ratios: must be an object."
        return
    for name, value in ratios.items():
        if not any(_is_about(name, system) for system in systems):
            yield f"ratios[{name!r}]: must start with `vs ` and a system, or kind, of the rows."
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            yield f"ratios[{name!r}] = {value!r}: must be a positive number."


def _is_about(ratio_name: str, system: str) -> bool:
    """Whether a ratio names a system, or what several names of systems begin with."""
    kind = ratio_name.removeprefix("vs ").removesuffix(" clipped").removesuffix(" memory")
    of_kind = bool(kind) and f"{system} ".startswith(f"{kind} ")
    return of_kind or ratio_name.startswith(f"vs {system}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


# Showing.


def table(result: Result) -> str:
    """Return rows and ratios as aligned text, for a terminal."""
    head = ("system", "metric", *NUMBERS, "unit", "runs", "note")
    lines = [head, *(tuple(_shown(getattr(row, k)) for k in head) for row in result.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    shown = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]])
        for line in lines
    ]
    title = f"{result.case} on {result.hardware} ({result.date}, commit {result.commit[:12]})"
    ratios = [
        f"{name}: {value:.3f} (above 1: {OURS} is better)" for name, value in result.ratios.items()
    ]
    return "\n".join([title, *shown, *ratios])


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
