"""Everything that needs a GPU, in one command and within some minutes.

`python -m zero_strategy.experiments.benchmarks.gpu_session --out DIR` runs the tests that wait for
a GPU, then every case. Each part is a process under its own time limit, so none can take the rest
with it; a result file is in DIR as soon as it is known. The last lines are one summary.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_strategy.experiments.benchmarks.machine import commit_here

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = "zero_strategy.experiments.benchmarks.run"
NEEDS_GPU = "needs a GPU"
# A case ends its own measurements a little before it would be ended here.
MARGIN_S = 15.0
STOP_S = 10.0
TESTS = "tests"
# Part -> seconds at most. What the claims rest on comes first.
LIMITS_S = {
    "train_step_3b": 190.0,
    "train_step_small": 245.0,
    "host_syncs": 90.0,
    TESTS: 75.0,
    "validate_then_fit_nccl": 80.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a part ended."""

    name: str
    seconds: float
    state: str


def main(argv: Sequence[str] | None = None) -> None:
    """Run the session.

    Args:
        argv: `--out DIR`, and options; those of this process by default.

    Raises:
        SystemExit: with 1 where a part failed; all files are written.
    """
    args = _parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    commit = args.commit or commit_here()
    deadline = time.monotonic() + 60 * args.minutes
    outcomes = []
    for name in args.only or LIMITS_S:
        limit_s = min(LIMITS_S[name], deadline - time.monotonic())
        options = ["--commit", commit, "--time-limit", f"{limit_s - MARGIN_S:.0f}"]
        options += ["--quick"] if args.quick else []
        outcomes.append(run_part(name, command_of(name, args.out, options), limit_s))
    print(summary(outcomes, args.out), flush=True)
    if any(outcome.state != "ok" for outcome in outcomes):
        raise SystemExit(1)


def command_of(name: str, out: Path, options: Sequence[str]) -> list[str]:
    """Return the command of a part: the tests, or a case that writes its file into `out`."""
    if name == TESTS:
        return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *gpu_tests()]
    return [sys.executable, "-m", RUN, name, "--out", str(out), *options]


def gpu_tests() -> list[str]:
    """Return the tests that are skipped for want of a GPU; none where tests are not shipped."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        found += [
            f"{path}::{node.name}"
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef)
            and any(NEEDS_GPU in ast.unparse(mark) for mark in node.decorator_list)
        ]
    return found


def run_part(name: str, command: Sequence[str], limit_s: float) -> Outcome:
    """Run one part and show what it prints; end it, with its processes, at the limit."""
    print(f"\n== {name}, at most {max(0.0, limit_s):.0f} s", flush=True)
    if limit_s <= MARGIN_S:
        return Outcome(name=name, seconds=0.0, state="no time left")
    started = time.monotonic()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.STDOUT)
    try:
        code = process.wait(limit_s)
        state = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        state = "time-out"
    finally:
        _end(process)
    return Outcome(name=name, seconds=time.monotonic() - started, state=state)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: a case that is asked ends the processes it measures with."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summary(outcomes: Sequence[Outcome], out: Path) -> str:
    """Return one line per part, then the medians and ratios of every result file in `out`."""
    lines = ["", "== summary"]
    lines += [f"{o.name:24}{o.state:14}{o.seconds:5.0f} s" for o in outcomes]
    for path in sorted(out.glob("*.json")):
        result: dict[str, Any] = json.loads(path.read_text())
        lines.append(f"{path.name}: {result['hardware']}")
        for row in result["rows"]:
            value = "failed" if row["median"] is None else f"{row['median']:.5g} {row['unit']}"
            spread = "" if row["median"] is None else f"{row['min']:.5g} .. {row['max']:.5g}"
            text = row["note"] if row["median"] is None else spread
            lines.append(f"  {row['system']:26}{row['metric']:24}{value:20}{text}")
        lines += [f"  {name}: {x:.3f}" for name, x in result["ratios"].items()]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_session", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--minutes", type=float, default=8.0, help="for the whole session")
    parser.add_argument("--commit", help="of the measured source, where git cannot tell")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps")
    parser.add_argument("--only", nargs="+", choices=list(LIMITS_S), help="parts to run")
    return parser


if __name__ == "__main__":
    main()
