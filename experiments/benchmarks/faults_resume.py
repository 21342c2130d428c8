"""Runs that are resumed from random steps in the middle of an epoch, held against one that was not.

The model draws from every generator in each training step, validation runs in between and draws
too, and the run that resumes starts from another seed: an order, a draw or a gradient out of place
changes the weights.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from zero_strategy.strategy import ZeroStrategy

_WIDTH = 7
_EPOCHS = 2
_BATCHES = 22
"""Of an epoch on one rank."""


@final
class Rows(Dataset[tuple[int, Tensor]]):
    """Rows that know their number.

    Args:
        num_rows: how many.
        noise: each read draws, as an augmentation does.
    """

    def __init__(self, num_rows: int, *, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self._rows = torch.randn(num_rows, _WIDTH, generator=generator)
        self._noise = noise

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        """Return the number and the row, (7,), fp32."""
        row = self._rows[index]
        if self._noise:
            row = row + torch.rand(()) + random.random() + float(np.random.rand())
        return index, row


@final
class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.inner(x)), 0.3, self.training)


class Noisy(pl.LightningModule):
    """Dropout, and noise of numpy and Python, in training; draws in validation and in a hook.

    Attributes:
        losses: of each micro-batch of this rank, as it was trained.
        samples: numbers of its rows.
        weights: after training, whole.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(_WIDTH, 1)
        self.losses: list[float] = []
        self.samples: list[list[int]] = []

    @override
    def on_train_epoch_start(self) -> None:
        torch.rand(3)
        random.random()

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        number, x = batch
        x = x * (1 + 0.1 * float(np.random.randn())) + 0.1 * random.gauss(0, 1)
        for block in self.blocks:
            x = block(x)
        loss = (self.head(x).squeeze(-1) - torch.cos(number.float())).square().mean()
        self.losses.append(float(loss.detach()))
        self.samples.append(number.tolist())
        return loss

    @override
    def validation_step(self, batch: Any, index: int) -> None:
        torch.rand(())
        random.random()
        np.random.rand()

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run showed and learned on this rank."""

    losses: list[float]
    samples: list[list[int]]
    weights: list[Tensor]

    def repeats(self, other: Outcome, *, batches: int) -> bool:
        """Whether this run is the other one without its first micro-batches, bit by bit."""
        return (
            self.losses == other.losses[batches:]
            and self.samples == other.samples[batches:]
            and all(map(torch.equal, self.weights, other.weights))
        )


def seed_rank(seed: int) -> None:
    """Seed all generators, each rank's differently."""
    seed += 1000 * (dist.get_rank() if dist.is_initialized() else 0)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def outcome(module: Noisy) -> Outcome:
    """Return what a trained module has seen and become. Collective."""
    weights: Any = list(module.parameters())
    return Outcome(
        losses=module.losses,
        samples=module.samples,
        weights=[p.full_tensor().detach() for p in weights],
    )


@final
class _SaveAt(Callback):
    """Saves after some micro-batches, counted over all epochs."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self.folder, self.steps, self.trained = folder, steps, 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:  # type: ignore[override]
        self.trained += 1
        if self.trained in self.steps:
            trainer.save_checkpoint(self.folder / f"{self.trained}.ckpt")


def _train(*, seed: int, workers: int, resume: Path | None, callbacks: list[Callback]) -> Outcome:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    seed_rank(seed)
    module = Noisy()
    seed_rank(seed)
    rows = Rows(2 * _BATCHES * world_size, noise=not workers)
    # Where this process was spawned, workers would be too, and import everything anew.
    context = "fork" if workers else None
    trainer = pl.Trainer(
        strategy=ZeroStrategy(stage=3),
        accelerator="cpu",
        devices=world_size,
        max_epochs=_EPOCHS,
        val_check_interval=4,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(rows, batch_size=2, num_workers=workers, multiprocessing_context=context),
        DataLoader(Rows(4 * world_size), batch_size=2),
        ckpt_path=resume,
    )
    return outcome(module)


def run(num_steps: int) -> dict[str, int]:
    """Resume from random steps in the middle of epochs, with 0 and with 2 loader workers.

    Every rank calls it; one rank of a run started by hand is enough.

    Args:
        num_steps: steps to resume from, for each number of workers.

    Returns: "cases" resumed, and of these "bit_equal" on this rank: losses, samples and weights.
    """
    inside = [n for n in range(1, _EPOCHS * _BATCHES) if n % _BATCHES]
    steps = random.Random(20).sample(inside, num_steps)
    equal = 0
    for workers in (0, 2):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(_from_first_rank(folder))
            whole = _train(seed=0, workers=workers, resume=None, callbacks=[_SaveAt(path, steps)])
            for step in steps:
                resumed = _train(
                    seed=99, workers=workers, resume=path / f"{step}.ckpt", callbacks=[]
                )
                equal += resumed.repeats(whole, batches=step)
            if dist.is_initialized():
                dist.barrier()
    return {"cases": 2 * num_steps, "bit_equal": equal}


def _from_first_rank(text: str) -> str:
    if not dist.is_initialized():
        return text
    told: list[Any] = [text]
    dist.broadcast_object_list(told, src=0)
    return told[0]
