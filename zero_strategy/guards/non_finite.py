"""What a gradient norm that is not finite does: end the run or skip the step, alike on all ranks.

The norm is one number on all ranks, so each decides by itself and all decide the same. Only once
the run is to end they exchange two numbers each, so that every rank names the same parameter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zero_strategy.control import NonFiniteGradientError, gather_alike
from zero_strategy.guards.arrivals import Arrivals
from zero_strategy.scaler import LossScaler

_UNCHANGED = "No weight was changed by this step."
_ADVICE = "Lower the learning rate, or check the batch."


class GradientNorms(Protocol):
    """Of the gradients of one step."""

    def total(self) -> Tensor:
        """Return the global norm, 0-dim, fp32. Collective."""
        ...

    def bad(self) -> list[Tensor]:
        """Return the parameters whose gradient's shard here holds an inf or a NaN."""
        ...


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What one rank knows of a step; looked at only where its norm is not finite."""

    step: int
    """Optimizer step, from 1."""
    norms: GradientNorms
    losses: tuple[Tensor, ...]
    """This rank's, of the step's micro-batches, 0-dim; none where they are not known yet."""


@final
class Culprits:
    """Finds what a norm that is not finite came from.

    Args:
        named: the sharded module's parameters in its order, the same on all ranks.
        group: the control group, or None for a single process.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None
    ) -> None:
        self._named = tuple(named)
        self._group = group

    def describe(self, norm: float, evidence: Evidence, *, alone: bool = False) -> str:
        """Return the beginning of an error's text, the same on every rank.

        Args:
            norm: the global norm.
            evidence: of its step.
            alone: tell what this rank knows; the others may not ask.

        Cost: unless alone, every rank must call it: one all-gather of 16 bytes on the control
            group. Host syncs.
        """
        bad = {id(p) for p in evidence.norms.bad()}
        own = [float(i) for i, (_, p) in enumerate(self._named) if id(p) in bad]
        rows = self._gather([own[0] if own else math.inf, _worst(evidence.losses)], alone=alone)
        first = min(index for index, _ in rows.values())
        ranks = [rank for rank, (_, loss) in rows.items() if not math.isfinite(loss)]
        parts = [f"gradient norm = {norm} at optimizer step {evidence.step}"]
        if math.isfinite(first):
            holder = next(rank for rank, (index, _) in rows.items() if index == first)
            parts.append(f"first in {self._named[int(first)][0]!r}")
            parts += (
                [] if ranks else [f"in the shard of rank {holder} though every loss was finite"]
            )
        else:
            parts.append("of gradients that are finite each, but too large")
        if ranks:
            parts.append(f"with a loss of {rows[ranks[0]][1]} on {_listed(ranks)}")
        return f"{', '.join(parts)}: must be finite."

    def _gather(self, row: list[float], *, alone: bool) -> dict[int, list[float]]:
        """Return the rows of all ranks, or of this one, by rank."""
        if self._group is None:
            return {0: row}
        if alone:
            return {self._group.rank(): row}
        rows = gather_alike(torch.tensor(row, dtype=torch.float64), self._group)
        return {rank: row.tolist() for rank, row in enumerate(rows)}


def _worst(losses: Sequence[Tensor]) -> float:
    """Return a loss that is not finite, or 0 where there is none."""
    values = [float(loss) for loss in losses]
    return next((value for value in values if not math.isfinite(value)), 0.0)


def _listed(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


class NonFiniteGuard(Protocol):
    """Decides whether a step may be taken."""

    reads_norm: bool
    """Whether the host waits for each norm, and the step with it."""

    @property
    def num_skipped(self) -> int:
        """Steps that were not taken since the start of the run."""
        ...

    def admits(self, norm: Tensor, evidence: Evidence) -> bool:
        """Judge a step before it is taken; every rank calls it with the same norm.

        Raises: NonFiniteGradientError: the run must end.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, as plain numbers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        ...


@final
class FiniteWatch:
    """Judges norms without stalling the accelerator.

    On the CPU a norm is judged before the gradients are used. On an accelerator it is judged once
    it has arrived, a micro-batch or two later: the weights of the last steps may then be spoilt.
    What the error names is kept until then.
    """

    def __init__(self, culprits: Culprits) -> None:
        self._culprits = culprits
        self._arrivals: Arrivals[Evidence] = Arrivals()
        self._bad: tuple[float, Evidence] | None = None
        self._description: str | None = None

    def watch(self, norm: Tensor, evidence: Evidence) -> bool:
        """Take in a norm; returns whether it is there already."""
        return self._arrivals.send(norm, evidence)

    def any_bad(self, *, wait: bool = False) -> bool:
        """Whether a norm that has arrived was not finite; `wait` blocks for all of them."""
        if self._bad is None:
            for evidence, (norm,) in self._arrivals.arrived(wait=wait):
                if not math.isfinite(norm):
                    self._bad = (norm, evidence)
                    break
        return self._bad is not None

    def error(self, *, used: bool) -> NonFiniteGradientError:
        """Return the error for the first bad step. Every rank must call it.

        While an exception is handled, each speaks for itself unless they have spoken before.

        Args:
            used: the weights were stepped by it.
        """
        # Another rank may have seen it first.
        self.any_bad(wait=True)
        assert self._bad is not None, "every rank has the same norms"
        if self._description is None:
            alone = sys.exc_info()[0] is not None
            self._description = self._culprits.describe(*self._bad, alone=alone)
        spoilt = (
            "The weights of the last steps are spoilt; resume from the last checkpoint with a "
            "lower learning rate, or without that batch."
        )
        return NonFiniteGradientError(
            f"{self._description} {spoilt if used else f'{_UNCHANGED} {_ADVICE}'}"
        )


@final
class StopsRun(NonFiniteGuard):
    """Ends the run at the first norm that is not finite.

    Cost: on an accelerator no host sync.
    """

    reads_norm = False

    def __init__(self, watch: FiniteWatch) -> None:
        self._watch = watch

    @property
    @override
    def num_skipped(self) -> int:
        return 0

    @override
    def admits(self, norm: Tensor, evidence: Evidence) -> bool:
        if self._watch.watch(norm, evidence) and self._watch.any_bad():
            raise self._watch.error(used=False)
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@final
class SkipsStep(NonFiniteGuard):
    """Skips steps whose norm is not finite, and ends the run after so many in a row.

    Cost: one host sync per optimizer step, none per micro-batch.
    """

    reads_norm = True

    def __init__(self, culprits: Culprits, max_in_row: int) -> None:
        self._culprits = culprits
        self._max_in_row = max_in_row
        self._num_skipped = 0
        self._in_row = 0

    @property
    @override
    def num_skipped(self) -> int:
        return self._num_skipped

    @override
    def admits(self, norm: Tensor, evidence: Evidence) -> bool:
        value = float(norm)
        if math.isfinite(value):
            self._in_row = 0
            return True
        self._num_skipped += 1
        self._in_row += 1
        if self._in_row == self._max_in_row:
            raise NonFiniteGradientError(
                f"{self._culprits.describe(value, evidence)} The step was skipped, as "
                f"zero.guards.max_skipped = {self._max_in_row} in a row were, which changed no "
                f"weight. {_ADVICE}"
            )
        return False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self._num_skipped}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_skipped = int(state.get("skipped_steps", 0))


@final
class ScalesBack(NonFiniteGuard):
    """Skips steps that overflow in fp16 and lowers the loss scale, as long as that can help.

    Cost: one host sync per optimizer step.
    """

    reads_norm = True

    def __init__(self, scaler: LossScaler, culprits: Culprits, max_in_row: int) -> None:
        self._scaler = scaler
        self._culprits = culprits
        self._max_in_row = max_in_row
        self._in_row = 0

    @property
    @override
    def num_skipped(self) -> int:
        return self._scaler.skipped_steps

    @override
    def admits(self, norm: Tensor, evidence: Evidence) -> bool:
        value, is_lowest = float(norm), self._scaler.is_lowest
        finite = math.isfinite(value)
        self._scaler.update(finite=finite)
        # Above its lowest value, the scale may be what was too high.
        self._in_row = 0 if finite else self._in_row + is_lowest
        if self._in_row == self._max_in_row:
            raise NonFiniteGradientError(
                f"{self._culprits.describe(value, evidence)} The step was skipped, as "
                f"zero.guards.max_skipped = {self._max_in_row} in a row were at the lowest loss "
                f"scale, which changed no weight. {_ADVICE} precision='bf16-mixed' needs no scale."
            )
        return finite

    @override
    def state_dict(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict())

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)
