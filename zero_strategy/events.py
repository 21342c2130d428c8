"""What one rank sees and all must act on: a signal, a norm that is not finite, a loss spike."""

import signal
from types import FrameType
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from zero_strategy import seams
from zero_strategy.checkpoint.background import BackgroundSaver
from zero_strategy.control import ControlPoll, Event
from zero_strategy.guards.non_finite import FiniteWatch
from zero_strategy.guards.spikes import SpikeGuard


class RunEvents:
    """The events of one run, agreed on between micro-batches.

    Args:
        trainer: of the run; its signal handling is replaced where there are several ranks.
        group: the control group, or None for a single process.
        finite: judges gradient norms.
        spikes: watches the losses; None where nobody asked for it.
        saver: writes in the background; None where saves are waited for.
        fitting: whether the run trains; ranks of an evaluation do not go in step.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        group: dist.ProcessGroup | None,
        finite: FiniteWatch,
        spikes: SpikeGuard | None,
        saver: BackgroundSaver | None,
        *,
        fitting: bool,
    ) -> None:
        self._trainer = trainer
        self._finite = finite
        self._spikes = spikes
        self._saver = saver
        self._poll = ControlPoll(
            group,
            {
                Event.STOP_REQUESTED: self._stop,
                Event.NON_FINITE: self.raise_non_finite,
                Event.LOSS_SPIKE: self._act_on_spike,
                Event.REQUEUE: self._requeue,
                Event.SAVE_FAILED: self._raise_save_failure,
            },
        )
        if fitting:
            seams.on_requeue_signal(trainer, self._note_requeue)
        if group is not None:
            handler = self._note_signal if fitting else self._stop_evaluation
            seams.without_stop_broadcast(trainer, handler)

    def request_stop(self) -> None:
        """Stop all ranks after the same micro-batch; safe to call from a signal handler."""
        self._poll.report(Event.STOP_REQUESTED)

    def between_batches(self) -> None:
        """Act on what was agreed. Every rank calls it before each micro-batch."""
        if self._finite.any_bad():
            self._poll.report(Event.NON_FINITE)
        if self._spikes and self._spikes.must_act():
            self._poll.report(Event.LOSS_SPIKE)
        if self._saver and self._saver.has_failed:
            self._poll.report(Event.SAVE_FAILED)
        self._poll.poll()

    def at_end(self) -> None:
        """Act on what is left. Every rank calls it after the last micro-batch."""
        self.before_save()
        self._poll.finish()

    def before_save(self) -> None:
        """Act on what the state to be saved has met with; waits for what is on its way.

        Every rank calls it, before anything of the state is collected.
        """
        if self._finite.any_bad(wait=True):
            self.raise_non_finite()
        if self._spikes and self._spikes.must_act(wait=True):
            self._act_on_spike()

    def refuse_spoilt(self) -> None:
        """Raise if a norm was not finite or a loss a spike; waits for those on their way."""
        if self._finite.any_bad(wait=True):
            self.raise_non_finite()
        if self._spikes and self._spikes.must_act(wait=True):
            self._spikes.refuse()

    def raise_non_finite(self) -> None:
        """Raise NonFiniteGradientError for the step that was judged. Every rank calls it."""
        raise self._finite.error(used=True)

    def _raise_save_failure(self) -> None:
        assert self._saver is not None, "it reported the failure"
        self._saver.wait()
        raise RuntimeError("the last checkpoint could not be written; another rank says why.")

    def _act_on_spike(self) -> None:
        self._poll.withdraw(Event.LOSS_SPIKE)
        if self._spikes:
            self._spikes.act()

    def _note_signal(self, signum: int, _: FrameType | None) -> None:
        self._pass_on(signum)
        self.request_stop()

    def _note_requeue(self, signum: int, _: FrameType | None) -> None:
        self._poll.report(Event.REQUEUE)

    def _requeue(self) -> None:
        self._poll.withdraw(Event.REQUEUE)
        seams.requeue(self._trainer, signal.SIGUSR1)

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
