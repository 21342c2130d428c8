"""How a run ends on a signal: saved, with an exit code of its own, back in the queue if asked."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from zero_strategy import seams
from zero_strategy.strategy import ZeroStrategy

STOPPED_EXIT_CODE = 85
"""Of a run that a signal ended with its state saved: start it again to go on."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL_S = 1.0
"""A launcher passes on what its workers were sent too: within so long it is one signal."""


@final
class StopOnSignal(Callback):
    """Lets SIGTERM or SIGUSR1 to any rank stop all of them after the same micro-batch.

    A second signal ends the process at once; the checkpoint that was there before stays whole.

    Attributes:
        signum: the first signal that this rank was sent; None without one.

    Cost: under "ddp" one all-reduce of a number per micro-batch, for which the host waits. The
        strategies of this package agree on the control group without waiting.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._at = 0.0
        self._trainer: pl.Trainer | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trainer = trainer
        for signum in SIGNALS:
            # The Trainer gives the earlier handlers back when it ends.
            signal.signal(signum, self._note)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if isinstance(trainer.strategy, ZeroStrategy):
            return
        asked = self.signum is not None
        if trainer.strategy.reduce_boolean_decision(asked, all=False):
            seams.request_stop(trainer)

    def _note(self, signum: int, _: FrameType | None) -> None:
        assert self._trainer is not None, "set before the handler is"
        if self.signum is None:
            self.signum, self._at = signum, time.monotonic()
            strategy = self._trainer.strategy
            if isinstance(strategy, ZeroStrategy):
                strategy.events.request_stop()
        elif time.monotonic() - self._at > SAME_SIGNAL_S:
            self._end_at_once(signum)

    def _end_at_once(self, signum: int) -> None:
        assert self._trainer is not None, "set before the handler is"
        # Not by print, which this may have interrupted.
        os.write(2, b"a second signal: ends at once, with the last checkpoint as it is\n")
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            cast(Any, launcher).kill(signal.SIGKILL)
        os._exit(128 + signum)


def requeue(environment: Mapping[str, str] = os.environ) -> str:
    """Put the SLURM job of this process back into the queue.

    Returns: what became of it, for the user.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return "trainer.requeue = True: not requeued, SLURM_JOB_ID is not set"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
    except OSError as error:
        return f"job {job} is not requeued: scontrol cannot be run ({error.strerror})"
    if done.returncode:
        return f"job {job} is not requeued: {(done.stderr or done.stdout).strip()}"
    return f"job {job} is back in the queue"
