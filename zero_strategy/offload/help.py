"""Whether lanes that help make a step shorter, found out by trying.

The GPU steps streamed state at the price of the host memory's bandwidth, of the link and of time of
its own. Where memory is the limit the cores alone are as fast or faster; where cores are, help is
worth a tenth of the step. Which it is depends on the machine, its neighbours and the batch, and the
bits of the result do not, so the first steps of each mode are taken both ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import final

SETTLE_STEPS = 2
"""Steps after a change of mode that are not looked at."""
TRIAL_STEPS = 4
"""Steps taken each way; the first of them is not looked at."""
WORTH_IT = 0.99
"""Help must bring a step below so much of its time without."""


@final
class HelpTrial:
    """Chooses step by step whether lanes help, for each mode on its own.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._mode: str | None = None
        self._num_steps = 0
        self._taken: dict[bool, list[float]] = {True: [], False: []}
        self._chosen: dict[str, bool] = {}

    def next_step(self, mode: str) -> bool:
        """Return whether lanes help until the next call. Call at the end of every step."""
        now = self._clock()
        step_s = None if self._last_s is None else now - self._last_s
        self._last_s = now
        if mode in self._chosen:
            self._mode = mode
            return self._chosen[mode]
        if mode != self._mode:
            self._mode, self._num_steps, self._taken = mode, 0, {True: [], False: []}
        index = self._num_steps - SETTLE_STEPS
        self._num_steps += 1
        if index > 0 and (index - 1) % TRIAL_STEPS and step_s is not None:
            self._taken[index <= TRIAL_STEPS].append(step_s)
        if index < 2 * TRIAL_STEPS:
            return index < TRIAL_STEPS
        helped, alone = (statistics.median(self._taken[way]) for way in (True, False))
        self._chosen[mode] = helped < WORTH_IT * alone
        return self._chosen[mode]
