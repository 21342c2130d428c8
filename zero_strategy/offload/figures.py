"""What the engine counts while it runs: a few additions per chunk, and no wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final

from zero_strategy.offload.chunk import Agenda, Chunk, Gradient, Pass
from zero_strategy.offload.lanes import Ended, Lane

PassKind = Literal["commit and preview", "preview", "redone preview", "commit", "send"]
"""What a pass does. A preview is redone with another scale; weights are sent without one where a
step was dropped after its preview, or where others wrote them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFigures:
    """What one engine did since the last reading, on one rank."""

    state_bytes: int
    """State in host memory now."""
    down_bytes: int
    """Copied to the host: gradients, and state that was stepped on the device."""
    up_bytes: int
    """Copied to the device: weights, and state to be stepped there with its gradients."""
    passes: Mapping[tuple[str, PassKind], int]
    """Lane and kind -> passes over a chunk."""
    max_waiting: int
    """Most chunks that waited for a pass at one time, all that they need being there."""
    slot_wait_ms: float
    """Time that the backward waited for a free slot of the host."""

    @property
    def num_redone(self) -> int:
        """Previews that were repeated with another scale."""
        return sum(n for (_, kind), n in self.passes.items() if kind == "redone preview")

    def num_passes(self, lane: str) -> int:
        """Passes of a lane."""
        return sum(n for (name, _), n in self.passes.items() if name == lane)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadFigures:
    """What offload did since the last reading, on one rank."""

    host_share: float
    """Of the trained parameters, whose state lies in host memory now."""
    exposed_ms: float | None
    """Time that the forwards of steps waited for weights; None at the first reading."""
    engine: EngineFigures


@final
class Meter:
    """Adds up what an engine does. The engine calls it under its lock."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._down_bytes = self._up_bytes = self._max_waiting = 0
        self._passes: Counter[tuple[str, PassKind]] = Counter()
        self._slot_wait_s = 0.0

    def arrived(self, chunk: Chunk, gradient: Gradient, itemsize: int) -> None:
        """Count a chunk's gradient, of so many bytes an element, as copied to the host."""
        length = sum(p.length for p in chunk.layout.pieces if p.name in gradient.names)
        self._down_bytes += length * itemsize

    def chose(self, chunk: Chunk, agenda: Agenda) -> None:
        """Count the chunks that wait when a lane takes one of them."""
        # By index: a chunk whose step was decided while it waited is noted twice.
        waiting = {index for index, _ in (*agenda.urgent, *agenda.arrived)}
        self._max_waiting = max(self._max_waiting, len(waiting | {chunk.index}))

    def passed(self, lane: Lane, chosen: Pass, ended: Ended) -> None:
        """Count a pass, before what it changes of its chunk is noted."""
        self._passes[lane.name, _kind(chosen)] += 1
        self._down_bytes += ended.down_bytes
        self._up_bytes += ended.up_bytes

    @contextmanager
    def slot_wait(self) -> Generator[None, None, None]:
        """Count the time inside as a wait for a slot."""
        begin_s = time.perf_counter()
        yield
        self._slot_wait_s += time.perf_counter() - begin_s

    def take(self, state_bytes: int) -> EngineFigures:
        """Return what was counted since the last reading."""
        figures = EngineFigures(
            state_bytes=state_bytes,
            down_bytes=self._down_bytes,
            up_bytes=self._up_bytes,
            passes=dict(self._passes),
            max_waiting=self._max_waiting,
            slot_wait_ms=self._slot_wait_s * 1e3,
        )
        self._reset()
        return figures


def _kind(chosen: Pass) -> PassKind:
    if chosen.preview is None:
        return "send" if chosen.commit is None else "commit"
    if chosen.commit is not None:
        return "commit and preview"
    return "redone preview" if chosen.preview is chosen.chunk.pending else "preview"
