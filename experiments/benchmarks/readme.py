"""The README's measured table, made from the committed result files and from nothing else.

`python -m zero_strategy.experiments.benchmarks.readme README.md` rewrites what stands between
the two marks of the file; a test compares them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zero_strategy.experiments.benchmarks.run import RESULTS

BEGIN = "<!-- measured: begin, written by zero_strategy.experiments.benchmarks.readme -->"
END = "<!-- measured: end -->"
HEAD = ("case", "system", "step time, s (min-max)", "tokens/s", "peak memory, GiB", "ours is")

OFFLOAD_HEAD = (
    *("case", "system", "no step clipped, s", "every step clipped, s"),
    *("on the GPU, GiB", "on the host, B per parameter", "ours is, not clipped and clipped"),
)
FAULTS_HEAD = ("case", "fault", "figures")

# Only cases of training steps have the columns of the table.
TITLES = {
    "train_step_3b": "3.37B, 4 x 4096 tokens, recompute",
    "train_step_small": "0.13B, 8 x 1024 tokens",
}
# Cases that have tables of their own: of steps in two regimes, and a line for each kind of fault.
OFFLOAD_TITLES = {
    "offload_3b_16k": "3.37B, 4 x 4096 tokens, all optimizer state on the host",
    "offload_3b_4k": "3.37B, 1 x 4096 tokens, all optimizer state on the host",
    "offload_7b_8k": "6.74B, 2 x 4096 tokens",
    "offload_15b_16k": "15B, 4 x 4096 tokens",
}
FAULTS_TITLES = {"checkpoint_faults": "checkpoints under faults"}


def committed_results() -> dict[str, dict[str, Any]]:
    """Return every committed result by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def measured_table(results: Iterable[dict[str, Any]]) -> str:
    """Return the Markdown tables of training steps, offload and faults; empty without any."""
    steps: list[Sequence[str]] = []
    offload: list[Sequence[str]] = []
    faults: list[Sequence[str]] = []
    for result in results:
        if result["case"] in TITLES:
            steps += _lines(result)
        elif result["case"] in OFFLOAD_TITLES:
            offload += _offload_lines(result)
        elif result["case"] in FAULTS_TITLES:
            faults += _fault_lines(result)
    tables = ((HEAD, steps), (OFFLOAD_HEAD, offload), (FAULTS_HEAD, faults))
    return "\n\n".join(filter(None, (_markdown(head, lines) for head, lines in tables)))


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rule = ["---"] * len(head)
    return "\n".join(["| " + " | ".join(line) + " |" for line in (head, rule, *lines)])


def _fault_lines(result: dict[str, Any]) -> Iterable[Sequence[str]]:
    """Yield a line for each kind: what stands before the colon in the names of its metrics."""
    kinds: dict[str, list[str]] = {}
    for row in result["rows"]:
        kind, _, name = row["metric"].partition(": ")
        figure = f"{row['median']:.4g} {row['unit']}" if row["runs"] else row["note"]
        kinds.setdefault(kind, []).append(f"{name} {figure}".strip().replace("|", "/"))
    case = f"{FAULTS_TITLES[result['case']]}; {result['hardware']}"
    for kind, figures in kinds.items():
        yield case, kind, ", ".join(figures)


def _offload_lines(result: dict[str, Any]) -> Iterable[Sequence[str]]:
    """Yield a line for each system; the first one is ours."""
    rows = {(row["system"], row["metric"]): row for row in result["rows"]}
    case = f"{OFFLOAD_TITLES[result['case']]}; {result['hardware']}"
    ours, *_ = systems = list(dict.fromkeys(row["system"] for row in result["rows"]))
    for system in systems:
        if (system, "step time") not in rows or not rows[system, "step time"]["runs"]:
            yield case, system, _why_not(result, system), *"----"
            continue
        times, factors = [], []
        for metric in ("step time", "clipped step time"):
            row, own = rows.get((system, metric)), rows.get((ours, metric))
            times.append(_time(row) if row else "-")
            if row and own and system != ours:
                factors.append(_factor(row["median"] / own["median"], "faster", "slower"))
        peak, host = (
            rows[system, metric]["median"] if (system, metric) in rows else None
            for metric in ("peak memory", "host memory per parameter")
        )
        sizes = [f"{size:.1f}" if size is not None else "-" for size in (peak, host)]
        yield case, system, *times, *sizes, ", ".join(factors) or "-"


def _lines(result: dict[str, Any]) -> Iterable[Sequence[str]]:
    rows = {(row["system"], row["metric"]): row for row in result["rows"]}
    case = f"{TITLES[result['case']]}; {result['hardware']}"
    for system in dict.fromkeys(row["system"] for row in result["rows"]):
        step = rows.get((system, "step time"))
        if step is None or step["median"] is None:
            yield case, system, _why_not(result, system), "-", "-", "-"
            continue
        time = _time(step)
        speed = rows[system, "speed"]["median"]
        peak = rows.get((system, "peak memory"))
        memory = f"{peak['median']:.1f}" if peak else "-"
        yield case, system, time, f"{speed:,.0f}", memory, _comparison(result["ratios"], system)


def _comparison(ratios: dict[str, float], system: str) -> str:
    parts = []
    for name, better, worse in (
        (f"vs {system}", "faster", "slower"),
        (f"vs {system} memory", "smaller", "larger"),
    ):
        if name in ratios:
            parts.append(_factor(ratios[name], better, worse))
    return ", ".join(parts) or "-"


def _time(row: dict[str, Any]) -> str:
    return f"{row['median']:.4g} ({row['min']:.4g}-{row['max']:.4g})"


def _factor(x: float, better: str, worse: str) -> str:
    return f"{max(x, 1 / x):.3f}x {better if x >= 1 else worse}"


def _why_not(result: dict[str, Any], system: str) -> str:
    """Return why a system has no step time."""
    rows = [row for row in result["rows"] if row["system"] == system]
    failed = [row["note"] for row in rows if not row["runs"]]
    difference = next((r["max"] for r in rows if r["metric"] == "loss difference"), None)
    said = failed[0] if failed else f"not timed: its losses differ by {difference:.3g} nat"
    return said.replace("|", "/")


def with_table(text: str, measured: str) -> str:
    """Return a document with the table between its marks.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"document: must hold the lines {BEGIN!r} and {END!r}. Add both.")
    body = f"\n\n{measured}\n\n" if measured else "\n"
    return f"{before}{BEGIN}{body}{END}{after}"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    table = measured_table(committed_results().values())
    document.write_text(with_table(document.read_text(), table))
