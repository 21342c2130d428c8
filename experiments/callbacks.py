"""What a run does beside its steps: keep its last state, and write a sample of text at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from zero_strategy.data import ByteTokenizer, TokenDataModule
from zero_strategy.experiments.schema import RunConfig
from zero_strategy.experiments.tasks import generate
from zero_strategy.monitor import Monitor
from zero_strategy.strategy import ZeroStrategy


@final
class KeepLast(Checkpoint):
    """Keeps one checkpoint: the state after the last optimizer step that was saved.

    It is saved every `save_every` steps, at the end of training, and when a signal stops the run.
    A stop comes after some micro-batches of a step that is never made. Their gradients are lost,
    so the counts of what was read go back to where the last step left them.

    Args:
        path: the checkpoint, replaced by every save.
        save_every: optimizer steps between saves.
        data: what is read from; the Trainer must be given it too.
        monitor: its counts go back too.

    Cost: between saves a copy of the loops' counters per optimizer step, on the host.
    """

    def __init__(
        self, path: Path, save_every: int, *, data: TokenDataModule, monitor: Monitor
    ) -> None:
        self.path = path
        self.save_every = save_every
        self.data = data
        self.monitor = monitor
        self._step = 0
        self._saved_step = 0
        self._counts: dict[str, dict[str, Any]] | None = None
        self._stopped = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = self._saved_step = trainer.global_step
        if isinstance(trainer.strategy, ZeroStrategy):
            trainer.strategy.check_room(self.path)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._step:
            return  # a micro-batch without an optimizer step
        self._step = trainer.global_step
        self._counts = {
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {self.monitor.state_key: self.monitor.state_dict()},
            type(self.data).__qualname__: self.data.state_dict(),
        }
        if self._step % self.save_every == 0:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saved_step != self._step:
            self._save(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, SIGTERMException) and self._saved_step != self._step:
            self._stopped = True
            self._save(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._stopped and self._counts is not None:
            for part, counts in self._counts.items():
                checkpoint[part].update(counts)

    def _save(self, trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self._saved_step = self._step


@final
class SampleText(Callback):
    """Prints text that the trained model continues from the prompt."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sample, model = self.config.sample, self.config.model
        if not sample.num_tokens or self.config.data.vocab_size() != ByteTokenizer.vocab_size:
            return
        strategy, tokenizer = trainer.strategy, ByteTokenizer()
        context = strategy.inference() if isinstance(strategy, ZeroStrategy) else torch.no_grad()
        with context:
            # Rank 0 alone: the strategy lets the other ranks serve its gathers meanwhile.
            if not trainer.is_global_zero:
                return
            ids = torch.from_numpy(tokenizer.encode(sample.prompt).astype("int64"))
            added = generate(
                pl_module,
                ids.to(strategy.root_device),
                num_tokens=sample.num_tokens,
                max_seq_len=model.max_seq_len,
                temperature=sample.temperature,
                seed=self.config.seed,
            )
        print(f"sample {sample.prompt}{tokenizer.decode(added.tolist())}", flush=True)
