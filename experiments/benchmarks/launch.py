"""Start each measurement in processes of its own, under a time limit, and take what comes back.

A failure of any kind (an exception, out of memory, a kill, a time-out) comes back as a reason; it
never ends the benchmark. The launching process itself starts no CUDA.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch

import zero_strategy
from zero_strategy.experiments.benchmarks.machine import Machine, describe_machine

WORKER = "zero_strategy.experiments.benchmarks.worker"
POLL_S = 0.1
# A rank that fails leaves the others in a collective; they get this long to fail by themselves.
GRACE_S = 3.0
REASON_LENGTH = 200
LOG_LINES = 15
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What came back from the ranks.

    Attributes:
        value: rank 0's return value; None after a failure.
        reason: why there is no value; empty after a success.
    """

    value: Any = None
    reason: str = ""


@final
class KeptReports:
    """Reports in a folder, so that a case that was cut short goes on after its last measurement.

    Args:
        folder: where they lie; made if need be.
        source: says what is measured, such as a commit. Reports of another source, or from before
            the machine started anew, are not found.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self._folder = folder
        self._source = source + (BOOT_ID.read_text() if BOOT_ID.exists() else "")
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, asked: str) -> tuple[Report, Machine] | None:
        """Return what a measurement reported, if it was kept."""
        path = self._path(asked)
        if not path.exists():
            return None
        tree = json.loads(path.read_text())
        return Report(value=tree["value"]), tree["machine"]

    def keep(self, asked: str, report: Report, machine: Machine) -> None:
        """Keep what a measurement reported."""
        path = self._path(asked)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"value": report.value, "machine": machine}))
        part.replace(path)

    def _path(self, asked: str) -> Path:
        name = hashlib.sha256((self._source + asked).encode()).hexdigest()[:24]
        return self._folder / f"{name}.json"


class Launcher:
    """Runs functions on all ranks of this machine, one measurement after the other.

    Args:
        num_ranks: processes per measurement; None takes one per GPU, or one on the CPU.
        time_limit_s: for everything this launcher runs, counted from now.
        kept: keeps the reports of what `run` has measured, and gives them again.
    """

    def __init__(
        self,
        *,
        num_ranks: int | None = None,
        time_limit_s: float = 3600.0,
        kept: KeptReports | None = None,
    ) -> None:
        self.num_ranks = num_ranks or torch.cuda.device_count() or 1
        self._deadline = time.monotonic() + time_limit_s
        self._machine: Machine | None = None
        self._kept = kept

    def machine(self) -> Machine:
        """Describe the machine. Call after the last measurement: it may start CUDA here."""
        return self._machine or describe_machine(self.num_ranks)

    def run(self, function: Callable[..., Any], *, timeout_s: float, **arguments: Any) -> Report:
        """Call a function in a new process per rank.

        Args:
            function: at the top of a module; what it returns must fit into JSON.
            timeout_s: for start and run together; the launcher's own limit may cut it shorter.
            arguments: keyword arguments, which must fit into JSON.
        """
        asked = json.dumps([target_of(function), arguments, self.num_ranks], sort_keys=True)
        if self._kept and (kept := self._kept.find(asked)):
            report, self._machine = kept
            return report
        begin_s = time.monotonic()
        report = self.run_side_by_side(function, [arguments], timeout_s=timeout_s)[0]
        print(f"  took {time.monotonic() - begin_s:.0f} s", file=sys.stderr, flush=True)
        if self._kept and self._machine and not report.reason:
            self._kept.keep(asked, report, self._machine)
        return report

    def run_side_by_side(
        self,
        function: Callable[..., Any],
        measurements: Sequence[dict[str, Any]],
        *,
        timeout_s: float,
        conduct: Callable[[Sequence[Measurement]], None] | None = None,
    ) -> list[Report]:
        """Call a function once per measurement, all at the same time.

        Args:
            function: as in `run`.
            measurements: keyword arguments of each.
            timeout_s: for all of them together.
            conduct: called here while they run, and told which; returns when all are on their own.
        """
        limit_s = min(timeout_s, self._deadline - time.monotonic())
        if limit_s <= 0:
            reason = "time-out: the time limit of the case was used up before it"
            return [Report(reason=reason) for _ in measurements]
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(
                    Measurement.start(target_of(function), arguments, self.num_ranks, limit_s)
                )
                for arguments in measurements
            ]
            if conduct:
                conduct(started)
            return [self._report(measurement) for measurement in started]

    def _report(self, measurement: Measurement) -> Report:
        report, machine = measurement.result()
        self._machine = machine or self._machine
        return report


@final
class Measurement:
    """The processes of one function call, with their folder; a context that ends them."""

    def __init__(self, ranks: list[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
        self._ranks = ranks
        self._folder = folder
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, target: str, arguments: dict[str, Any], num_ranks: int, limit_s: float
    ) -> Iterator[Self]:
        """Start the ranks; on leaving, kill what still runs."""
        with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w") as output:
            folder = Path(name)
            file = str(folder / "report.json")
            command = [sys.executable, "-m", WORKER, target, json.dumps(arguments), file]
            ranks = [
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for env in rank_environments(num_ranks)
            ]
            try:
                yield cls(ranks, folder, limit_s)
            finally:
                _end(ranks)

    @property
    def running(self) -> bool:
        """Whether every rank runs and there is time left."""
        alive = all(rank.poll() is None for rank in self._ranks)
        return alive and time.monotonic() < self._deadline

    def result(self) -> tuple[Report, Machine | None]:
        """Wait for the ranks; return what came back, and the machine they ran on."""
        in_time = _wait(self._ranks, self._deadline)
        _end(self._ranks)
        report, machine = self._read([rank.returncode for rank in self._ranks], in_time)
        if report.reason:
            text = (self._folder / "log").read_text(errors="replace")
            lines = [f"  | {line}" for line in text.splitlines()[-LOG_LINES:]]
            print("\n".join(lines), file=sys.stderr, flush=True)
        return report, machine

    def _read(self, codes: list[int], in_time: bool) -> tuple[Report, Machine | None]:
        file = self._folder / "report.json"
        tree = json.loads(file.read_text()) if file.exists() else {}
        if "error" in tree:
            return Report(reason=plain_reason(tree["error"])), None
        if not in_time:
            return Report(reason=f"time-out: not finished within {self._limit_s:.0f} s"), None
        if "value" in tree:
            return Report(value=tree["value"]), tree["machine"]
        code = next((code for code in codes if code), 0)
        killed = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        hint = ", as the system does when host memory runs out" if code == -signal.SIGKILL else ""
        return Report(reason=f"{killed} without a report{hint}"), None


def target_of(named: Callable[..., Any]) -> str:
    """Return "package.module:name", by which a worker finds a function or a class."""
    return f"{named.__module__}:{named.__qualname__}"


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank of one machine by its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "one machine",
    }


def rank_environments(num_ranks: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun would set it, with a port of its own."""
    port = free_port()
    # Where this package was found, so that the workers find the same one from any folder.
    root = str(Path(zero_strategy.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return [
        os.environ
        | {
            "PYTHONPATH": path,
            **rank_variables(rank, num_ranks, port),
            # DeepSpeed compares the CUDA compiler with torch's CUDA; no op of its own is built.
            "DS_SKIP_CUDA_CHECK": "1",
        }
        for rank in range(num_ranks)
    ]


def plain_reason(error: str) -> str:
    """Return an error's first line without folders and cut to a readable length.

    Example:
        >>> plain_reason("OSError: /some/where/model.bin is missing")
        'OSError: model.bin is missing'
    """
    text = re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/(?=[\w.+-])", "", error)
    return text if len(text) <= REASON_LENGTH else text[: REASON_LENGTH - 3] + "..."


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Return whether the ranks ended in time. A failed rank shortens the time of the others."""
    failing = False
    while None in (codes := [rank.poll() for rank in ranks]):
        if time.monotonic() > deadline:
            return failing
        if not failing and any(codes):
            failing = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    return True


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kill each rank with whatever it started, such as a compiler."""
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
