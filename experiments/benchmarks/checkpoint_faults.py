"""What becomes of checkpoints under kills, damage and broken disks, on other ranks, in new runs.

Each kind of fault has a file of its own, `faults_*.py`, and is tried in processes of its own. A
figure that is not what it must be is told as broken, and stays in its row.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, final

from zero_strategy.experiments.benchmarks import (
    faults_damage,
    faults_disk,
    faults_hostile,
    faults_kill,
    faults_reshape,
    faults_restart,
    faults_resume,
    faults_rows,
)
from zero_strategy.experiments.benchmarks.launch import Launcher
from zero_strategy.experiments.benchmarks.result import OURS, Findings, Row


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFaults:
    """Faults of all kinds, with how many of each.

    Attributes:
        stride: of the moments of a save at which it is killed, of the writing calls that fail,
            and of the crafted files, every n-th is taken.
        random_kills: at random times, for each number of ranks and each way to save.
        damages: spoilt checkpoints, for every file and each of seven ways to spoil it.
        large_damages: likewise, of one with two checksums per tensor.
        most_ranks: a run is saved and taken up on 1, 2, ... ranks up to this.
        strategies: that a run is saved and taken up with, the last n of `faults_reshape`.
        resumed_steps: steps to resume from, with each number of loader workers.
        restarts: kills of a rank under torchrun; none in the quick form, where starting torchrun
            twice would be most of its time.
        timeout_s: for each kind of fault.
    """

    stride: int = 1
    random_kills: int = 40
    damages: int = 60
    large_damages: int = 6
    most_ranks: int = 4
    strategies: int = len(faults_reshape.STRATEGIES)
    resumed_steps: int = 10
    restarts: int = 10
    timeout_s: int = 700

    def quick(self) -> Self:
        """Return the same with few faults of each kind."""
        return dataclasses.replace(
            self,
            stride=13,
            random_kills=1,
            damages=2,
            large_damages=1,
            most_ranks=2,
            strategies=1,
            resumed_steps=1,
            restarts=0,
            timeout_s=120,
        )

    def measure(self, launcher: Launcher) -> Findings:
        """Try every kind of fault.

        Raises:
            ValueError: more than one rank; each kind of fault has numbers of its own.
        """
        if launcher.num_ranks != 1:
            raise ValueError(
                f"devices = {launcher.num_ranks}: must be 1, because each kind of fault starts the "
                "ranks that it needs. Add devices=1."
            )
        findings = Findings()
        for metric, run, add_rows in self._kinds():
            try:
                found = run(launcher)
            except _FailedError as error:
                findings.rows.append(Row.failed(OURS, metric, "cases", str(error)))
                findings.broken.append(f"{metric}: {error}")
            else:
                add_rows(faults_rows.Rows(findings), found)
            print(f"{metric}: done", file=sys.stderr, flush=True)
        return findings

    def _kinds(self) -> Iterator[tuple[str, Callable[[Launcher], Any], Callable[..., None]]]:
        """Yield the first metric of each kind of fault, what tries it, and what makes its rows."""

        def alone(function: Callable[..., Any], **arguments: int) -> Callable[[Launcher], Any]:
            return lambda launcher: self._run(launcher, function, **arguments)

        kills = alone(faults_kill.kills, stride=self.stride, num_random=self.random_kills)
        yield "kills", kills, faults_rows.kills
        each = {"each": self.damages, "each_large": self.large_damages}
        yield "damaged", alone(faults_damage.damages, **each), faults_rows.damages
        yield "disk faults", self._disks, faults_rows.disks
        shapes = {"most_ranks": self.most_ranks, "num_strategies": self.strategies}
        yield "reshape: pairs", alone(faults_reshape.reshapes, **shapes), faults_rows.reshapes
        resume = alone(faults_resume.run, num_steps=self.resumed_steps)
        yield "resume: cases", resume, faults_rows.resumes
        if self.restarts:
            restart = alone(faults_restart.run, num_restarts=self.restarts)
            yield "restarts", restart, faults_rows.restarts
        hostile = alone(faults_hostile.hostile, every=self.stride)
        yield "crafted: checkpoints", hostile, faults_rows.crafted

    def _disks(self, launcher: Launcher) -> Any:
        return self._run(Launcher(num_ranks=2), faults_disk.faults, stride=self.stride)

    def _run(self, launcher: Launcher, function: Callable[..., Any], **arguments: Any) -> Any:
        report = launcher.run(function, timeout_s=self.timeout_s, **arguments)
        if report.reason:
            raise _FailedError(report.reason)
        return report.value


class _FailedError(RuntimeError):
    """A kind of fault could not be tried to its end."""
