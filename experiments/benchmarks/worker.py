"""One rank of a measurement: calls the named function and writes down what it returned.

Started by `launch.Launcher`, once per rank, as `python -m ...worker module:function {...} FILE`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_strategy.experiments.benchmarks.machine import describe_machine


def resolve(target: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def main(target: str, arguments: str, report: str) -> None:
    """Run one rank; rank 0 writes the report, or whichever rank fails first its error."""
    try:
        value = resolve(target)(**json.loads(arguments))
    except BaseException as error:
        text = (str(error).strip().splitlines() or [""])[0]
        _write(report, {"error": f"{type(error).__name__}: {text}"})
        raise
    if os.environ["RANK"] == "0":
        machine = describe_machine(int(os.environ["WORLD_SIZE"]))
        _write(report, {"value": value, "machine": machine})
    if dist.is_initialized():
        dist.destroy_process_group()


def _write(report: str, tree: dict[str, Any]) -> None:
    """Write whole or not at all; the first report stays."""
    part = Path(f"{report}.{os.getpid()}")
    part.write_text(json.dumps(tree))
    if not Path(report).exists():
        part.replace(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
