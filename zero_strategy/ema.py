"""Exponential moving average of sharded weights, kept as shards."""

from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from zero_strategy.checkpoint.state import copy_whole
from zero_strategy.checkpoint.trainer_state import Stored
from zero_strategy.gradient import local
from zero_strategy.protocols import HoldsMasters, TellsSteps

_KEY = "ShardedEMA"


class ShardedEMA(Callback):
    """Average the trained weights, and validate and test with the average.

    After each optimizer step every rank updates the average of its own shards, so memory is one
    more shard and nothing is sent. Works under any strategy; a single process gives the same
    average.

    Args:
        decay: share of the old average kept per optimizer step, in [0, 1).
    Raises: ValueError: decay is no number in that range.
    Cost: 4 bytes per parameter of this rank's shard in fp32; no collective. Under offload the
        average lies where the optimizer state does, and each update takes as much for a copy of
        the weights and waits until the step is committed, which gives up its overlap.

    Example:
        >>> trainer = lightning.Trainer(strategy="zero3", callbacks=[ShardedEMA(decay=0.999)])
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not isinstance(decay, float | int) or not 0.0 <= decay < 1.0:
            raise ValueError(f"ema.decay = {decay!r}: must be in [0, 1). Use 0.999.")
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._step = 0
        self._swapped = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not earlier: a checkpoint is restored after `on_fit_start`.
        if not self.average:
            self.average = {n: p.detach().clone() for n, p in _trained(pl_module).items()}
        self._step = trainer.global_step

    @override
    @torch.no_grad()
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        strategy = trainer.strategy
        if isinstance(strategy, TellsSteps) and not strategy.step_taken:
            return
        weights = _trained(pl_module)
        for name, weight in weights.items():
            if name not in self.average:
                self.average[name] = weight.detach().clone()
            elif local(self.average[name]).device != local(weight).device:
                # Its offloaded state has moved to the device since.
                moved = torch.empty_like(weight).detach()
                local(moved).copy_(local(self.average[name]))
                self.average[name] = moved
        torch._foreach_lerp_(
            [local(self.average[n]) for n in weights],
            [local(p.detach()) for p in weights.values()],
            1.0 - self.decay,
        )

    @torch.no_grad()
    def swap(self, module: pl.LightningModule) -> None:
        """Exchange the module's weights and their average, in place. A second call undoes it."""
        masters = _masters(module)
        weights = {**dict(module.named_parameters()), **masters}
        self._swapped = not self._swapped
        for name, mean in self.average.items():
            here, there = local(weights[name].detach()), local(mean)
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        if masters:
            cast(HoldsMasters, module.trainer.strategy).write_masters(masters)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average:
            self.swap(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average:
            self.swap(pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average:
            self.swap(pl_module)

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.average:
            self.swap(pl_module)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # A checkpoint written now must hold the trained weights.
        if self._swapped:
            self.swap(pl_module)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint.setdefault("sharded_state", {})[_KEY] = dict(self.average)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        stored = checkpoint.get("sharded_state", {}).get(_KEY)
        if stored is None:
            return
        weights = {**dict(pl_module.named_parameters()), **_masters(pl_module)}
        self.average = {n: torch.empty_like(weights[n]).detach() for n in stored}
        if isinstance(stored, Stored):
            stored.fill(self.average)
            return
        for name, value in stored.items():
            copy_whole(self.average[name], value, f"{_KEY}.{name}")


def _trained(module: pl.LightningModule) -> dict[str, Tensor]:
    weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return {**weights, **_masters(module)}


def _masters(module: pl.LightningModule) -> dict[str, Tensor]:
    strategy = module.trainer.strategy
    if not isinstance(strategy, HoldsMasters):
        return {}
    # A tied parameter once.
    names = {n for n, _ in module.named_parameters()}
    return {n: t for n, t in strategy.masters().items() if n in names}
