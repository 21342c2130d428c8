"""`zs bench CASE [key=value ...]`: measure a case, write its result file, print a table.

Keys are the whole numbers of the case, such as `rounds=1` or `steps=50`, and `devices`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_strategy.config import refusal
from zero_strategy.experiments.benchmarks.case import Case
from zero_strategy.experiments.benchmarks.cases import NAMES, find_case
from zero_strategy.experiments.benchmarks.launch import KeptReports, Launcher
from zero_strategy.experiments.benchmarks.machine import commit_here
from zero_strategy.experiments.benchmarks.result import Findings, Result, table

RESULTS = Path(__file__).resolve().parent / "results"
QUICK_RESULTS = Path("runs/benchmarks")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one case.

    Args:
        argv: words after `zs bench`; those of this process by default.

    Raises:
        ValueError: an unknown case or key, or a value that does not fit.
        SystemExit: with 1 where a loss is wrong or a system of ours failed; the file is written.
    """
    args = _parser().parse_intermixed_args(argv)
    if args.case not in NAMES:
        raise ValueError(refusal("case", args.case, NAMES))
    case, devices = configured(find_case(args.case), args.overrides, quick=args.quick)
    commit = args.commit or commit_here()
    kept = KeptReports(args.keep, commit) if args.keep else None
    launcher = Launcher(num_ranks=devices, time_limit_s=args.time_limit, kept=kept)
    # A stop from outside must end the measuring processes too.
    before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        findings = case.measure(launcher)
    finally:
        signal.signal(signal.SIGTERM, before)
    result = as_result(args.case, findings, launcher, commit)
    folder = args.out or (QUICK_RESULTS if args.quick else RESULTS)
    path = folder / f"{args.case}_{launcher.machine()['slug']}.json"
    result.write(path)
    print(f"{table(result)}\n{path}", flush=True)
    if findings.broken:
        print("\n".join(f"BROKEN {line}" for line in findings.broken), flush=True)
        raise SystemExit(1)


def as_result(name: str, findings: Findings, launcher: Launcher, commit: str) -> Result:
    """Add to the findings what they were measured with."""
    machine = launcher.machine()
    return Result(
        case=name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        hardware=machine["hardware"],
        versions=machine["versions"],
        rows=findings.rows,
        ratios=findings.ratios,
    )


def configured(case: Any, words: Sequence[str], *, quick: bool) -> tuple[Case, int | None]:
    """Return the case with its numbers set by `key=value` words, and the number of ranks.

    Raises:
        ValueError: lists every word that does not fit.
    """
    case = case.quick() if quick else case
    keys = [f.name for f in dataclasses.fields(case) if type(getattr(case, f.name)) is int]
    values: dict[str, int] = {}
    problems = []
    for word in words:
        key, _, text = word.partition("=")
        if key not in (*keys, "devices"):
            problems.append(refusal("key", key, (*keys, "devices")))
        elif not text.isdecimal() or int(text) == 0:
            problems.append(refusal(key, text, ["a whole number above 0"], f"Write it {key}=8."))
        else:
            values[key] = int(text)
    if problems:
        raise ValueError("\n".join(problems))
    devices = values.pop("devices", None)
    return dataclasses.replace(case, **values), devices


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zs bench", description=__doc__)
    parser.add_argument("case", help=", ".join(NAMES))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--quick", action="store_true", help="tiny model and few steps, for a CPU")
    parser.add_argument("--keep", type=Path, help="folder of single measurements, to go on from")
    parser.add_argument("--commit", help="of the measured source, where git cannot tell")
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="SECONDS")
    return parser


if __name__ == "__main__":
    main()
