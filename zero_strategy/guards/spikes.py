"""Finds spikes of the loss, alike on all ranks and without a host sync.

The loss of an optimizer step is the mean of its micro-batches on all ranks. It is held against
the median of the last steps, in robust standard deviations: 1.4826 times the median distance from
the median, which is the standard deviation where losses are normally distributed, and which up to
half of the losses may be outliers of.

Source: Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers, chapter 3.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.config import Spike as SpikeAction
from zero_strategy.guards.arrivals import Arrivals

WINDOW = 100
"""Optimizer steps whose losses are remembered."""
FEWEST = 20
"""Losses that are needed to judge the next one."""

_OF_NORMAL = 1.4826
# Losses that hardly differ would make a spike of a rounding error.
_SMALLEST_SIGMA = 1e-3


class LossSpikeError(ValueError):
    """The loss left the range of the last steps, and the run must not go on with these weights."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """A loss that is far above the last ones, or not finite."""

    step: int
    """Optimizer step, from 1."""
    loss: float
    median: float
    """Of the losses before; NaN where there are none."""
    sigmas: float
    """Robust standard deviations above it."""

    def __str__(self) -> str:
        return (
            f"loss = {self.loss:.6g} at optimizer step {self.step}, {self.sigmas:.3g} robust "
            f"standard deviations above the median {self.median:.6g} of the steps before"
        )


def sigmas_above(loss: float, earlier: Sequence[float]) -> tuple[float, float]:
    """Return how far a loss lies above earlier ones, in robust standard deviations, and the median.

    Args:
        loss: the loss to be judged.
        earlier: finite losses, at least one.
    """
    median = statistics.median(earlier)
    spread = _OF_NORMAL * statistics.median(abs(value - median) for value in earlier)
    sigma = max(spread, _SMALLEST_SIGMA * abs(median))
    if sigma == 0:
        return (math.inf if loss > median else 0.0), median
    return (loss - median) / sigma, median


@final
class SpikeWatch:
    """Looks for spikes among the losses of a run.

    Args:
        sigmas: how far above the median a spike lies, in robust standard deviations.
        group: ranks whose losses are averaged, or None for a single one.
        device: this rank's.

    Cost: per optimizer step three small operations and an all-reduce of 16 bytes on the device.
    """

    def __init__(
        self, sigmas: float, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._sigmas = sigmas
        self._group = group
        self._device = device
        self._arrivals: Arrivals[int] = Arrivals()
        self._earlier: deque[float] = deque(maxlen=WINDOW)
        self._found: list[Spike] = []

    def watch(self, losses: Sequence[Tensor], step: int) -> None:
        """Take in this rank's losses of one optimizer step, 0-dim. Every rank must call it.

        Cost: one all-reduce; no host sync.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if losses:
            own_N = torch.stack([loss.to(torch.float64) for loss in losses])
            # Filled on the device: a number of the host would have to be copied there first.
            total = torch.stack((own_N.sum(), torch.full_like(own_N[0], len(losses))))
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        self._arrivals.send(total, step)

    def found(self, *, wait: bool = False) -> list[Spike]:
        """Return the spikes since the last `forget`, of the losses that have arrived.

        Args:
            wait: block for all losses.
        """
        for step, (total, count) in self._arrivals.arrived(wait=wait):
            if count:
                self._judge(step, total / count)
        return self._found

    def forget(self) -> None:
        """Have no spike, and none on its way."""
        self._arrivals.forget()
        self._found = []

    def _judge(self, step: int, loss: float) -> None:
        sigmas, median = math.inf, math.nan
        if self._earlier:
            sigmas, median = sigmas_above(loss, self._earlier)
        if not math.isfinite(loss):
            self._found.append(Spike(step=step, loss=loss, median=median, sigmas=math.inf))
            return
        if len(self._earlier) >= FEWEST and sigmas > self._sigmas:
            self._found.append(Spike(step=step, loss=loss, median=median, sigmas=sigmas))
        # Spikes too, which the median hardly feels: a loss that stays up is soon no spike.
        self._earlier.append(loss)


@final
class SpikeGuard:
    """Does about spikes what was asked for.

    Args:
        watch: finds them.
        action: "warn", "stop" or "rollback".
        go_back: restores the state of before a spike; every rank calls it together.
        speaks: whether this rank warns.
    """

    def __init__(
        self,
        watch: SpikeWatch,
        action: SpikeAction,
        *,
        go_back: Callable[[Spike], None],
        speaks: bool,
    ) -> None:
        self.watch = watch
        self._action: SpikeAction = action
        self._go_back = go_back
        self._speaks = speaks
        self._warned_at = -1

    def must_act(self, *, wait: bool = False) -> bool:
        """Whether this rank has seen a spike that all must act on; warns of the others.

        Args:
            wait: block for all losses that are on their way; all ranks then answer alike.
        """
        spikes = self.watch.found(wait=wait)
        if self._action != "warn":
            return bool(spikes)
        for spike in spikes:
            if self._speaks and spike.step != self._warned_at + 1:
                warnings.warn(f"{spike}. Training goes on.", stacklevel=2)
            self._warned_at = spike.step
        spikes.clear()
        return False

    def act(self) -> None:
        """Stop or go back, if there is a spike. Every rank must call it.

        Raises: LossSpikeError: the run must end.
        """
        spikes = self.watch.found(wait=True)
        if not spikes:
            return  # another rank asked for what was done since
        if self._action == "stop":
            self.refuse()
        self._go_back(spikes[0])
        self.watch.forget()

    def refuse(self) -> None:
        """Raise LossSpikeError for the first spike, if there is one."""
        for spike in self.watch.found(wait=True):
            raise LossSpikeError(
                f"{spike}: must stay below zero.guards.spike_sigmas. Resume from the last "
                "checkpoint with a lower learning rate or without these batches, or use "
                "zero.guards.spike = 'rollback'."
            )
