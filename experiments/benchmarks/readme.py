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

FAULTS_HEAD = ("case", "fault", "figures")

# Only cases of training steps have the columns of the table.
TITLES = {
    "train_step_3b": "3.37B, 4 x 4096 tokens, recompute",
    "train_step_small": "0.13B, 8 x 1024 tokens",
}
# Cases that have a table of their own, a line for each kind of fault.
FAULTS_TITLES = {"checkpoint_faults": "checkpoints under faults"}


def committed_results() -> dict[str, dict[str, Any]]:
    """Return every committed result by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def measured_table(results: Iterable[dict[str, Any]]) -> str:
    """Return the Markdown tables of training steps and of faults; empty without any."""
    steps: list[Sequence[str]] = []
    faults: list[Sequence[str]] = []
    for result in results:
        if result["case"] in TITLES:
            steps += _lines(result)
        elif result["case"] in FAULTS_TITLES:
            faults += _fault_lines(result)
    return "\n\n".join(filter(None, (_markdown(HEAD, steps), _markdown(FAULTS_HEAD, faults))))


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


def _lines(result: dict[str, Any]) -> Iterable[Sequence[str]]:
    rows = {(row["system"], row["metric"]): row for row in result["rows"]}
    case = f"{TITLES[result['case']]}; {result['hardware']}"
    for system in dict.fromkeys(row["system"] for row in result["rows"]):
        step = rows.get((system, "step time"))
        if step is None or step["median"] is None:
            failed = next(r for r in result["rows"] if r["system"] == system and not r["runs"])
            yield case, system, failed["note"].replace("|", "/"), "-", "-", "-"
            continue
        time = f"{step['median']:.4g} ({step['min']:.4g}-{step['max']:.4g})"
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
            x = ratios[name]
            word = better if x >= 1 else worse
            parts.append(f"{max(x, 1 / x):.3f}x {word}")
    return ", ".join(parts) or "-"


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
