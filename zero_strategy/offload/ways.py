"""In which way steps are taken, found out by trying.

A lane on the GPU steps streamed state at the price of the host memory's bandwidth, of the link and
of time of its own. Where memory is the limit the cores alone are as fast or faster; where cores
are, help is worth a tenth of the step. Short batches leave little time under which a step could be
begun before its norm is known, so that it is better taken in one go. Which it is depends on the
machine, its neighbours and the batch, and the bits of the result do not, so the first steps that
are clipped, and the first that are not, are taken each way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, final

Mode = Literal["deferred", "late", "staged"]
"""How a gradient is met whose step's norm is not yet known; all three leave the same bits.

deferred: preview with scale 1 at arrival, and commit the step before in the same pass.
late: commit the step before, and preview once the norm is known: for steps that are clipped.
staged: as late, but step in one pass once the norm is known."""

SETTLE_STEPS = 2
"""Steps that are not looked at after clipping began or ended."""
TRIAL_STEPS = 6
"""Steps taken each way."""
UNSETTLED_STEPS = 3
"""The first of these are not looked at: what the way before left is still worked off."""
WORTH_IT = 0.99
"""Another way must bring a step below so much of its time in the plain way."""


class Way(NamedTuple):
    """How steps are taken."""

    mode: Mode
    helps: bool
    """Whether lanes that leave chunks to others take any."""

    def __str__(self) -> str:
        return f"{self.mode}, {'helped' if self.helps else 'cores alone'}"


def plain_way(*, clips: bool, helps: bool) -> Way:
    """Return the way that is right where steps are long."""
    return Way("late" if clips else "deferred", helps)


def ways_to_try(*, clips: bool, can_help: bool) -> tuple[Way, ...]:
    """Return the ways that may be the fastest, the plain one first.

    Args:
        clips: steps are clipped, most of them.
        can_help: there are lanes that help others.
    """
    plain = plain_way(clips=clips, helps=False)
    helped = (plain._replace(helps=True),) if can_help else ()
    return (plain, *helped, Way("staged", can_help))


@final
class Ways:
    """Chooses step by step, for steps that are clipped and for others on their own.

    Args:
        can_help: as in `ways_to_try`.
        tries: try them; without it the plain way is taken, with all the help there is.
        clock: seconds.
    """

    def __init__(
        self, *, can_help: bool, tries: bool, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._can_help, self._tries = can_help, tries
        self._clock = clock
        self._last_s: float | None = None
        self._clips: bool | None = None
        self._num_steps = 0
        self._taken: Sequence[list[float]] = ()
        self.chosen: dict[bool, Way] = {}
        """Whether steps are clipped -> the way that is kept, once it is."""

    def next_step(self, *, clips: bool) -> Way:
        """Return the way to take until the next call. Call once a step."""
        if not self._tries:
            return plain_way(clips=clips, helps=self._can_help)
        now = self._clock()
        step_s = None if self._last_s is None else now - self._last_s
        self._last_s = now
        before, self._clips = self._clips, clips
        if clips in self.chosen:
            return self.chosen[clips]
        ways = ways_to_try(clips=clips, can_help=self._can_help)
        if clips != before:
            self._num_steps, self._taken = 0, [[] for _ in ways]
        index = self._num_steps - SETTLE_STEPS
        self._num_steps += 1
        way, taken = divmod(index - 1, TRIAL_STEPS)
        if index > 0 and taken >= UNSETTLED_STEPS and step_s is not None:
            self._taken[way].append(step_s)
        if index < len(ways) * TRIAL_STEPS:
            return ways[max(0, index) // TRIAL_STEPS]
        times = [statistics.median(taken) for taken in self._taken]
        times[0] *= WORTH_IT
        self.chosen[clips] = ways[times.index(min(times))]
        return self.chosen[clips]
