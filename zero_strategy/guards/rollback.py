"""Goes back to a run's last checkpoint in its own process, while the data goes on.

Weights, moments, schedules, the loss scale and what callbacks store of the weights are the
checkpoint's afterwards. The Trainer's loops, its loggers and the data are left where they are:
the batches since the checkpoint are left out, and the next step takes the batch after the spike.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, final

from torch.optim import Optimizer

from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.verify import verify
from zero_strategy.guards.spikes import LossSpikeError, Spike

MAX_ROLLBACKS = 3
"""Of one run; more would mean that the cause is no single batch."""


class Restores(Protocol):
    """A strategy, as far as it reads checkpoints."""

    lightning_module: Any
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[Any]
    precision_plugin: Any
    is_global_zero: bool

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all ranks what one has."""
        ...

    def load_checkpoint(self, checkpoint_path: str | Path) -> dict[str, Any]:
        """Read a checkpoint."""
        ...

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take over its weights."""
        ...

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over its optimizer states."""
        ...


@final
class Rollbacks:
    """Those of one run.

    Args:
        strategy: of the run.
        trainer: of the run, which hooks of its callbacks are given.
        newest: gives the last checkpoint that the run wrote or resumed from, if there is one.
        drop_step: ends the step in progress without taking it.
    """

    def __init__(
        self,
        strategy: Restores,
        trainer: Any,
        *,
        newest: Callable[[], Path | None],
        drop_step: Callable[[], None],
    ) -> None:
        self.num_done = 0
        """Since the start of the run."""
        self._strategy = strategy
        self._trainer = trainer
        self._newest = newest
        self._drop_step = drop_step

    def go_back(self, spike: Spike) -> None:
        """Restore the last checkpoint. Every rank must call it, between two micro-batches.

        Raises: LossSpikeError: there is none to go back to, or it is damaged, or the run went back
            too often.
        Cost: reads the checkpoint twice, once to verify it before anything is changed.
        """
        path = self._newest()
        if path is None:
            raise LossSpikeError(
                f"{spike}: must come after the first checkpoint with zero.guards.spike = "
                "'rollback', there is none to go back to. Save more often, or use 'warn'."
            )
        if self.num_done == MAX_ROLLBACKS:
            raise LossSpikeError(
                f"{spike}, after {MAX_ROLLBACKS} rollbacks: must not go on so. Resume from {path} "
                "with a lower learning rate, or look at the data."
            )
        problem = _problem(path) if self._strategy.is_global_zero else ""
        problem = self._strategy.broadcast(problem)
        if problem:
            raise LossSpikeError(
                f"{spike}, and the last checkpoint cannot be gone back to: {problem}. Resume from "
                "an earlier one."
            )
        self._drop_step()
        step = self._restore(path)
        self.num_done += 1
        if self._strategy.is_global_zero:
            warnings.warn(
                f"{spike}. Went back to {path} of optimizer step {step}; the batches since are "
                f"left out (rollback {self.num_done} of at most {MAX_ROLLBACKS}).",
                stacklevel=2,
            )

    def _restore(self, path: Path) -> int:
        """In the order in which Lightning resumes."""
        strategy, module = self._strategy, self._strategy.lightning_module
        checkpoint = strategy.load_checkpoint(path)
        module.on_load_checkpoint(checkpoint)
        strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
        for callback in self._trainer.callbacks:
            callback.on_load_checkpoint(self._trainer, module, checkpoint)
        precision = strategy.precision_plugin
        if (stored := checkpoint.get(type(precision).__qualname__)) is not None:
            precision.load_state_dict(stored)
        strategy.load_optimizer_state_dict(checkpoint)
        schedules = zip(strategy.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True)
        for config, state in schedules:
            config.scheduler.load_state_dict(state)
        return int(checkpoint["global_step"])


def _problem(path: Path) -> str:
    """Return what is wrong with a checkpoint, or nothing."""
    if not storage.is_checkpoint(path):
        return storage.why_not_a_checkpoint(path) if path.exists() else f"{path} is gone"
    return "; ".join(verify(path, deep=True).problems[:3])
