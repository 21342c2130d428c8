"""A LightningModule under `Trainer.fit`, as users run it: our strategy, and Lightning's own."""

from __future__ import annotations

import logging
import warnings
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from typing_extensions import override

from zero_strategy.experiments.benchmarks.systems.fsdp2 import shard
from zero_strategy.experiments.benchmarks.watch import Watch
from zero_strategy.experiments.benchmarks.workload import (
    TokenBatches,
    Workload,
    build_model,
    loss_of,
    make_optimizer,
    rank_device,
    world_size,
)
from zero_strategy.experiments.models.gpt import GPT
from zero_strategy.strategy import ZeroStrategy


class TokenModule(pl.LightningModule):
    """The workload as a LightningModule that does not know how it is sharded."""

    gpt: GPT

    def __init__(self, workload: Workload, watch: Watch) -> None:
        super().__init__()
        self.workload = workload
        self.watch = watch

    @override
    def configure_model(self) -> None:
        if "gpt" not in self._modules:
            torch.manual_seed(self.workload.seed)
            self.gpt = GPT(self.workload.model)

    @override
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.trainer.gradient_clip_val = self.workload.max_norm_at(batch_idx)
        self.watch.begin(batch_idx)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.gpt, batch)
        self.watch.saw(loss)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.gpt, batch), sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.workload.lr)


@final
class ShardingTokenModule(TokenModule):
    """Shards itself in `configure_model`, which Lightning's own strategy leaves to the user."""

    @override
    def configure_model(self) -> None:
        if "gpt" not in self._modules:
            device = rank_device()
            self.gpt = shard(build_model(self.workload, device), device)


def train_zero1(workload: Workload, watch: Watch) -> None:
    """Train with `ZeroStrategy(stage=1)`."""
    _fit(TokenModule(workload, watch), ZeroStrategy(stage=1, init="meta"), "bf16-mixed")


def train_zero2(workload: Workload, watch: Watch) -> None:
    """Train with `ZeroStrategy(stage=2)`."""
    _fit(TokenModule(workload, watch), ZeroStrategy(stage=2, init="meta"), "bf16-mixed")


def train_zero3(workload: Workload, watch: Watch) -> None:
    """Train with `ZeroStrategy(stage=3)`."""
    _fit(TokenModule(workload, watch), ZeroStrategy(stage=3, init="meta"), "bf16-mixed")


def train_zero3_offload(workload: Workload, watch: Watch) -> None:
    """Train with `ZeroStrategy(stage=3, offload="auto")`, as `zero3_offload` is."""
    strategy = ZeroStrategy(stage=3, init="meta", offload="auto")
    _fit(TokenModule(workload, watch), strategy, "bf16-mixed")


def train_zero3_host(workload: Workload, watch: Watch) -> None:
    """Train with `ZeroStrategy(stage=3, offload="host")`: all optimizer state in host memory."""
    strategy = ZeroStrategy(stage=3, init="meta", offload="host")
    _fit(TokenModule(workload, watch), strategy, "bf16-mixed")


def train_model_parallel(workload: Workload, watch: Watch) -> None:
    """Train with Lightning's `ModelParallelStrategy`; precision is FSDP2's policy alone."""
    _fit(ShardingTokenModule(workload, watch), ModelParallelStrategy(), "32-true")


def _fit(module: TokenModule, strategy: Strategy, precision: Any) -> None:
    trainer = make_trainer(module.workload, strategy, precision)
    trainer.fit(module, TokenBatches(module.workload))
    if isinstance(strategy, ZeroStrategy) and (offloading := strategy.sharded.offloading):
        for clips, way in offloading.ways.chosen.items():
            module.watch.told("clipped " if clips else "", str(way))


def make_trainer(workload: Workload, strategy: Strategy, precision: Any) -> pl.Trainer:
    """Return a Trainer over this machine's ranks that neither logs nor saves."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    return pl.Trainer(
        strategy=strategy,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=world_size(),
        precision=precision,
        max_steps=workload.num_steps,
        max_epochs=1,
        accumulate_grad_batches=workload.accumulate,
        gradient_clip_val=workload.max_norm,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
