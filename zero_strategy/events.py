"""What one rank sees and all must act on: a signal to stop, a gradient that is not finite."""

import signal
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zero_strategy import seams
from zero_strategy.control import ControlPoll, Event, FiniteWatch, NonFiniteGradientError


class RunEvents:
    """The events of one run, agreed on between micro-batches.

    Args:
        trainer: of the run; its signal handling is replaced where there are several ranks.
        group: the control group, or None for a single process.
        finite: judges gradient norms.
        fitting: whether the run trains; ranks of an evaluation do not go in step.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        group: dist.ProcessGroup | None,
        finite: FiniteWatch,
        *,
        fitting: bool,
    ) -> None:
        self._trainer = trainer
        self._finite = finite
        self._poll = ControlPoll(
            group,
            {Event.STOP_REQUESTED: self._stop, Event.NON_FINITE: self.raise_non_finite},
        )
        if group is not None:
            handler = self._note_signal if fitting else self._stop_evaluation
            seams.without_stop_broadcast(trainer, handler)

    def between_batches(self) -> None:
        """Act on what was agreed. Every rank calls it before each micro-batch."""
        if self._finite.any_bad():
            self._poll.report(Event.NON_FINITE)
        self._poll.poll()

    def at_end(self) -> None:
        """Act on what is left. Every rank calls it after the last micro-batch."""
        self.refuse_spoilt()
        self._poll.finish()

    def refuse_spoilt(self) -> None:
        """Raise if a norm was not finite; waits for those that are on their way."""
        if self._finite.any_bad(wait=True):
            self.raise_non_finite()

    def raise_non_finite(self) -> None:
        """Raise NonFiniteGradientError for the step that was judged."""
        raise NonFiniteGradientError(
            f"the gradient norm of optimizer step {self._finite.bad_step} was not finite: must be "
            "finite. The weights of the last steps are spoilt; resume from the last checkpoint "
            "with a lower learning rate, or without that batch."
        )

    def _note_signal(self, signum: int, _: FrameType | None) -> None:
        self._pass_on(signum)
        self._poll.report(Event.STOP_REQUESTED)

    def _stop_evaluation(self, signum: int, _: FrameType | None) -> None:
        self._pass_on(signum)
        seams.request_stop(self._trainer)

    def _pass_on(self, signum: int) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            cast(Any, launcher).kill(signal.Signals(signum))

    def _stop(self) -> None:
        seams.request_stop(self._trainer)
        raise SIGTERMException
