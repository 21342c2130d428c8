"""Where a step's time goes: each moment belongs to exactly one phase.

The caller says which phase begins; the time until the next word belongs to it. Several
micro-batches, or several optimizers, simply enter the same phases again, and the times add up.
"""

import time
from collections import deque
from typing import Literal, Protocol

import torch

Phase = Literal["data", "forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


class PhaseClock(Protocol):
    """Adds up time per phase."""

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase, or stop counting (None). Never syncs the host."""
        ...

    def take(self) -> dict[Phase, float]:
        """Milliseconds per phase since the last call. May sync the host: log steps only."""
        ...


class HostClock:
    """Phases by the host's clock, for devices that run as they are called."""

    def __init__(self) -> None:
        self._ms = dict.fromkeys(PHASES, 0.0)
        self._phase: Phase | None = None
        self._since = 0.0

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase, or stop counting (None)."""
        now = time.perf_counter()
        if self._phase is not None:
            self._ms[self._phase] += (now - self._since) * 1e3
        self._phase, self._since = phase, now

    def take(self) -> dict[Phase, float]:
        """Milliseconds per phase since the last call."""
        self.enter(self._phase)
        taken, self._ms = self._ms, dict.fromkeys(PHASES, 0.0)
        return taken


class CudaClock:
    """Phases by events on the current CUDA stream.

    The host runs ahead of the GPU, so its own clock would time the queueing. Between two events
    the GPU was either busy with the phase or idle for want of it: a slow loader shows as a long
    data phase, a fast one as none.

    Cost: one event record per phase; one host sync per `take`.
    """

    def __init__(self) -> None:
        self._ms = dict.fromkeys(PHASES, 0.0)
        self._marks: deque[tuple[torch.cuda.Event, Phase | None]] = deque()
        self._spare: list[torch.cuda.Event] = []

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase, or stop counting (None)."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, phase))
        self._fold()

    def take(self) -> dict[Phase, float]:
        """Milliseconds per phase since the last call. Cost: one host sync."""
        if self._marks:
            self.enter(self._marks[-1][1])
            self._marks[-1][0].synchronize()
            self._fold()
        taken, self._ms = self._ms, dict.fromkeys(PHASES, 0.0)
        return taken

    def _fold(self) -> None:
        """Add up the spans that are over, so that a long wait between takes keeps few events."""
        while len(self._marks) > 1 and self._marks[1][0].query():
            start, phase = self._marks.popleft()
            if phase is not None:
                self._ms[phase] += start.elapsed_time(self._marks[0][0])
            self._spare.append(start)


def clock_for(device: torch.device) -> PhaseClock:
    """The clock that sees what `device` does."""
    return CudaClock() if device.type == "cuda" else HostClock()
