"""What is learned: a LightningModule that trains a decoder on rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from zero_strategy.experiments.models.gpt import GPT
from zero_strategy.experiments.models.loss import token_loss
from zero_strategy.experiments.schema import RunConfig


@final
class TokenTask(pl.LightningModule):
    """Next-token prediction with AdamW.

    Batches are token ids, (B, T + 1), int64: each token after the first is a target. Validation
    logs `val_loss` (nats per token) and `val_bits_per_byte`, comparable between tokenizers.

    Args:
        config: the run; its model, optim and trainer sections are used.
        tokens_per_byte: of the corpus.
    """

    gpt: GPT

    def __init__(self, config: RunConfig, *, tokens_per_byte: float = 1.0) -> None:
        super().__init__()
        self.config = config
        self.tokens_per_byte = tokens_per_byte

    @override
    def configure_model(self) -> None:
        """Build the model where the strategy wants it; once, however often fit is called."""
        if "gpt" not in self._modules:
            self.gpt = GPT(self.config.model)

    @override
    def forward(self, token_BT: Tensor) -> Tensor:
        """Return logits, (B, T, V)."""
        return self.gpt(token_BT)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of the micro-batch, in nats per token."""
        return token_loss(self.gpt(batch[:, :-1]), batch[:, 1:])

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss and bits per byte over all ranks."""
        loss = token_loss(self.gpt(batch[:, :-1]), batch[:, 1:])
        figures = {
            "val_loss": loss,
            "val_bits_per_byte": loss / math.log(2) * self.tokens_per_byte,
        }
        self.log_dict(figures, sync_dist=True, batch_size=len(batch))

    @override
    def configure_optimizers(self) -> Any:
        """Return AdamW that decays matrices only, and its schedule per optimizer step."""
        optim, steps = self.config.optim, self.config.trainer.max_steps
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            # A loss scaler must see the gradients before the step does.
            fused=self.config.trainer.precision != "16-mixed",
        )
        factor = lr_factor(optim.warmup_steps, steps, optim.min_lr_ratio)
        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    @override
    def on_train_start(self) -> None:
        """Take the first learning rate from this run's schedule.

        A checkpoint brings the rate that its own schedule had set for the next step, and that
        schedule may have been a shorter one.
        """
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, LambdaLR), "configure_optimizers returns one"
        factors = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, (lr, factor) in zip(scheduler.optimizer.param_groups, factors, strict=True):
            group["lr"] = lr * factor(scheduler.last_epoch)

    def num_tokens(self, batch: Tensor) -> int:
        """Return the predicted tokens of this rank's batch."""
        return batch.shape[0] * (batch.shape[1] - 1)

    def flops_per_token(self) -> float:
        """Return model FLOPs per trained token, forward and backward, without recompute."""
        return self.gpt.flops_per_token(self.config.data.seq_len)


def lr_factor(warmup_steps: int, max_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Return the learning rate's part of its peak at a step: a ramp, then half a cosine.

    The first step has 1/warmup_steps and the last, max_steps - 1, has min_ratio.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        part = min(1.0, (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps))
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * part))

    return factor


def generate(
    model: Callable[[Tensor], Tensor],
    prompt_T: Tensor,
    *,
    num_tokens: int,
    max_seq_len: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """Continue a prompt by sampling; runs the whole context again for each token.

    Args:
        model: token ids (1, T) to logits (1, T, V).
        prompt_T: token ids, (T,), int64, T at least 1.
        num_tokens: tokens to add.
        max_seq_len: longest context the model takes; earlier tokens are dropped.
        temperature: divides the logits; small values choose the likeliest token.
        seed: of the draws.

    Returns:
        The added ids, (num_tokens,), on the prompt's device.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = prompt_T
    for _ in range(num_tokens):
        logits = model(ids[None, -max_seq_len:])[0, -1].float()
        weight = (logits / temperature).softmax(-1).cpu()
        drawn = torch.multinomial(weight, 1, generator=generator)
        ids = torch.cat((ids, drawn.to(ids.device)))
    return ids[len(prompt_T) :]
