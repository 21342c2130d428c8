"""Systems that live side by side and train in turns of a second or so.

Where the host is the limit, its speed drifts within a minute by more than two systems differ. Turns
that follow each other within seconds see the same host. Only one system runs at a time; the others
wait at the start of a micro-batch with an empty queue.

The launching process conducts: it writes `go-SYSTEM-TURN` and waits for `done-SYSTEM-TURN`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from typing_extensions import override

from zero_strategy.experiments.benchmarks.launch import Measurement
from zero_strategy.experiments.benchmarks.watch import Watch, device_mark, seconds_between
from zero_strategy.experiments.benchmarks.workload import Workload, global_rank

# Steps of a turn that only fill the empty queue again.
SETTLE_STEPS = 3
POLL_S = 0.005


@final
class TurnTimes(Watch):
    """Time of each step of this system's turns, and peak memory.

    Args:
        workload: its `steps` are those of all turns together.
        folder: where the conductor and the systems meet.
        system: index of this system.
        turn_steps: steps per turn, the first of which are not measured.
    """

    def __init__(self, workload: Workload, *, folder: str, system: int, turn_steps: int) -> None:
        assert workload.accumulate == 1, "a micro-batch is a step here"
        self._workload = workload
        self._folder = Path(folder)
        self._system = system
        self._turn_steps = turn_steps
        self._marks: list[Any] = []
        self._step_s: list[float] = []
        self._peak_bytes = 0

    @override
    def begin(self, index: int) -> None:
        step = index - self._workload.first_measured
        if step < 0:
            return
        turn, within = divmod(step, self._turn_steps)
        if within == 0:
            if turn > 0:
                self._end(turn - 1)
            if index == self._workload.end_measured:
                return
            self._wait_for("go", turn)
        self._marks.append(device_mark())

    def _end(self, turn: int) -> None:
        self._marks.append(device_mark())
        self._step_s += seconds_between(self._marks)[SETTLE_STEPS:]
        self._marks.clear()
        if torch.cuda.is_available():
            self._peak_bytes = torch.cuda.max_memory_allocated()
        if global_rank() == 0:
            (self._folder / f"done-{self._system}-{turn}").touch()

    def _wait_for(self, word: str, turn: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if turn == 0:
                torch.cuda.reset_peak_memory_stats()
        if turn == 0 and global_rank() == 0:
            (self._folder / f"ready-{self._system}").touch()
        while not (self._folder / f"{word}-{self._system}-{turn}").exists():
            time.sleep(POLL_S)

    @override
    def saw(self, loss: torch.Tensor) -> None:
        pass

    @override
    def report(self) -> dict[str, Any]:
        return {"step_s": self._step_s, "peak_bytes": self._peak_bytes}


def conduct(systems: Sequence[Measurement], folder: Path, num_turns: int) -> None:
    """Let the systems train in turns, A B C then C B A; one that ended is passed over.

    Args:
        systems: running, each with a `TurnTimes` of its index.
        folder: the one they were told.
        num_turns: of each.
    """
    for index, system in enumerate(systems):
        _wait(system, folder / f"ready-{index}")
    for turn in range(num_turns):
        for index, system in list(enumerate(systems))[:: 1 if turn % 2 == 0 else -1]:
            if system.running:
                (folder / f"go-{index}-{turn}").touch()
                _wait(system, folder / f"done-{index}-{turn}")


def _wait(system: Measurement, file: Path) -> None:
    while system.running and not file.exists():
        time.sleep(POLL_S)
