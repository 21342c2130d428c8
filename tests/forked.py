"""Ranks that may be killed or end themselves: forks of a program that has imported all it needs.

A program calls `serve`, which runs its functions by name: `python -m tests.stuck NAME ...`. It
imports torch and Lightning once, which is most of a rank's time, and forks the ranks of each call.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zero_strategy.experiments.benchmarks.launch import free_port, rank_variables

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks of one call ended."""

    codes: list[int]
    """Exit codes, negative for a signal; by rank."""
    outputs: list[str]
    """What each rank printed on stdout and stderr."""
    seconds: list[float]
    """Since the rank said that its trouble begins, or since its start."""


def run(module: str, *names: str, timeout_s: float = 100.0) -> dict[str, Ended]:
    """Start a program that calls `serve`, and return how each of its functions ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *names],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return {name: Ended(**fields) for name, fields in json.loads(done.stdout).items()}


def trouble_begins() -> None:
    """Called by a rank: seconds are counted from now."""
    sys.stdout.flush()
    print(f"trouble begins at {time.monotonic()}", flush=True)


def serve(
    functions: Mapping[str, tuple[int, Callable[[], Any]]],
    names: Sequence[str],
    *,
    at_once: int = 3,
    limit_s: float = 12.0,
) -> None:
    """Run functions, each on so many ranks, and print as JSON how they ended.

    Args:
        functions: name -> number of ranks, and what each does.
        names: which to run.
        at_once: how many functions run at the same time.
        limit_s: after so long, ranks that still run are killed.
    """
    ended = {}
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(names), at_once):
            began = time.monotonic()
            calls = [
                _Call(Path(folder, name), *functions[name])
                for name in names[first : first + at_once]
            ]
            while sum(call.runs() for call in calls):
                time.sleep(0.02)
                if time.monotonic() > began + limit_s:
                    for call in calls:
                        call.kill()
            ended |= {call.name: asdict(call.ended()) for call in calls}
    print(json.dumps(ended))


class _Call:
    """The ranks of one function."""

    def __init__(self, folder: Path, world_size: int, function: Callable[[], Any]) -> None:
        port = free_port()
        folder.mkdir()
        self.name = folder.name
        self._began = time.monotonic()
        self._files = [folder / f"{rank}.txt" for rank in range(world_size)]
        self._pids = [_fork(r, world_size, port, f, function) for r, f in enumerate(self._files)]
        self._codes: dict[int, int] = {}
        self._ends: dict[int, float] = {}

    def runs(self) -> bool:
        """Whether some rank does."""
        for pid in self._pids:
            if pid not in self._codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
                    self._ends[pid] = time.monotonic()
        return len(self._codes) < len(self._pids)

    def kill(self) -> None:
        for pid in self._pids:
            if pid not in self._codes:
                os.kill(pid, signal.SIGKILL)

    def ended(self) -> Ended:
        outputs = [file.read_text() for file in self._files]
        starts = [
            float(line.rpartition(" ")[2])
            for output in outputs
            for line in output.splitlines()
            if line.startswith("trouble begins at")
        ]
        start = min(starts, default=self._began)
        return Ended(
            codes=[self._codes[pid] for pid in self._pids],
            outputs=outputs,
            seconds=[self._ends[pid] - start for pid in self._pids],
        )


def _fork(rank: int, world_size: int, port: int, file: Path, function: Callable[[], Any]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(rank_variables(rank, world_size, port))
    code = 0
    try:
        function()
    except BaseException:  # noqa: BLE001 - what a script's end would print
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
