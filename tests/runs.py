"""Runs of the small module from the start or from a checkpoint, compared as whole tensors.

Epochs have 3 steps and are saved at their end: Lightning replays an epoch that was left in the
middle, so only there does a resumed run see the batches of the uninterrupted one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests import lit

ROWS = 3 * lit.GLOBAL_BATCH
FP32_TOLERANCE = 2e-6  # see tests/test_parity.py


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run of some epochs leaves behind, as whole tensors."""

    losses: list[float]
    weights: dict[str, Tensor]
    slots: dict[str, Tensor]
    lrs: list[float]


class SaveAfter(Callback):
    """Saves at the end of one epoch."""

    def __init__(self, epoch: int, path: str, *, weights_only: bool = False) -> None:
        self.epoch, self.path, self.weights_only = epoch, path, weights_only

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path, self.weights_only)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def fit(
    strategy: Any,
    *,
    epochs: int = 2,
    module: pl.LightningModule | None = None,
    save: str | None = None,
    save_after: int = 0,
    resume: str | None = None,
    callbacks: list[Callback] | None = None,
    data: Any = None,
    weights_only: bool | None = None,
    **options: Any,
) -> Run:
    """Train from the start or from a checkpoint; ranks in a group must call it together."""
    module = module or lit.Lit()
    callbacks = [*(callbacks or []), *([SaveAfter(save_after, save)] if save else [])]
    run = lit.trainer(strategy, max_epochs=epochs, callbacks=callbacks, **options)
    data = data or lit.loader(ROWS)
    run.fit(module, data, ckpt_path=resume, weights_only=weights_only)
    names = {id(p): n for n, p in module.named_parameters()}
    return Run(
        losses=module.losses,
        weights=lit.whole(module),
        slots={
            f"{i}.{names[id(p)]}.{slot}": whole(value)
            for i, optimizer in enumerate(run.optimizers)
            for p, slots in optimizer.state.items()
            for slot, value in slots.items()
        },
        lrs=[group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups],
    )


def assert_same(run: Run, expected: Run, *, first: int = 0) -> None:
    """The run repeats the expected one from step `first` on."""
    wanted_losses = pytest.approx(expected.losses[first:], rel=FP32_TOLERANCE, abs=FP32_TOLERANCE)
    assert run.losses == wanted_losses
    assert run.lrs == pytest.approx(expected.lrs, rel=1e-12)
    for found, wanted in ((run.weights, expected.weights), (run.slots, expected.slots)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE, msg=name
            )


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message this rank is refused with, or nothing."""
    try:
        call(*args, **kwargs)
    except (ValueError, KeyError) as error:
        return str(error)
    return ""


class Unfreezing(BaseFinetuning):
    """The blocks stay frozen for one epoch, then join as a parameter group of their own."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.gpt.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.gpt.layers, optimizer, lr=2e-3)
        if epoch > 1:
            self.make_trainable(pl_module.gpt.layers)


class HeadFirst(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
