"""Runs that draw from every generator wherever a run may, saved in any hook, and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from tests import lit
from zero_strategy.experiments.benchmarks.faults_resume import (
    Noisy,
    Outcome,
    Rows,
    outcome,
    seed_rank,
)

NUM_ROWS = 44


class SaveAt(Callback):
    """Saves in one hook, in or after some micro-batches, counted over epochs; None: at every."""

    def __init__(self, folder: str, hook: str, after: list[int] | None) -> None:
        self.folder, self.after, self.trained = Path(folder), after, 0
        setattr(self, hook, self._save)

    def on_train_batch_start(self, *_: Any) -> None:
        self.trained += 1

    def _save(self, trainer: pl.Trainer, *_: Any) -> None:
        wanted = self.after is None or self.trained in self.after
        if self.trained and wanted and not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{self.trained}.ckpt")


def loader(rows: Dataset, *, batch_size: int = 2, workers: int = 0, **options: Any) -> DataLoader:
    """A plain loader; its workers are forked, since importing torch anew takes them seconds."""
    if workers:
        options["multiprocessing_context"] = "fork"
    return DataLoader(rows, batch_size=batch_size, num_workers=workers, **options)


def train(
    strategy: str,
    *,
    resume: str | Path | None = None,
    seed: int = 0,
    workers: int = 0,
    batch_size: int = 2,
    make: Callable[[], Any] | None = None,
    module: Noisy | None = None,
    **options: Any,
) -> Outcome:
    """Train from the start or from a checkpoint; ranks must call it together.

    Args:
        strategy: name of one.
        resume: checkpoint to go on from.
        seed: of all generators when the run starts.
        workers: of the training loader; without any the rows draw too.
        batch_size: of the training loader.
        make: makes another training loader.
        module: is trained in place of a new one.
        options: of the Trainer.
    """
    seed_rank(seed)
    module = module or Noisy()
    seed_rank(seed)
    rows = Rows(NUM_ROWS, noise=not workers)
    data = make() if make else loader(rows, batch_size=batch_size, workers=workers)
    defaults = {"max_epochs": 2, "val_check_interval": 4, "num_sanity_val_steps": 1}
    run = lit.trainer(strategy, **(defaults | options))
    run.fit(module, data, loader(Rows(5)), ckpt_path=resume)
    return outcome(module)
