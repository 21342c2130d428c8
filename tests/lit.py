"""A small LightningModule with odd sizes, and runs of it on any number of ranks.

The global batch is the same whatever the world size: rank r of W takes samples r, r + W, ... of
each global batch, so every run sees the same samples at every optimizer step.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from zero_strategy.experiments.models.gpt import GPT, GPTConfig

GLOBAL_BATCH = 12
TINY = GPTConfig(
    vocab_size=61,
    num_layers=3,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=37,
    max_seq_len=16,
)


class Tokens(Dataset):
    """Random token rows, the same for every process."""

    def __init__(self, num_rows: int = 300, seq_len: int = 13) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randint(0, TINY.vocab_size, (num_rows, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def loader(num_rows: int = 300, global_batch: int = GLOBAL_BATCH) -> DataLoader:
    """This rank's part of the rows, in order."""
    data = Tokens(num_rows)
    if not dist.is_initialized():
        return DataLoader(data, batch_size=global_batch)
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=global_batch // dist.get_world_size(), sampler=sampler)


class Lit(pl.LightningModule):
    """Next-token prediction with the tiny GPT."""

    def __init__(self, config: GPTConfig = TINY, *, lr: float = 3e-3, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gpt = GPT(config)
        self.lr = lr
        self.losses: list[float] = []
        self.norms: list[float] = []

    def forward(self, token_BT: Tensor) -> Tensor:
        return self.gpt(token_BT)

    def loss(self, row_BT: Tensor) -> Tensor:
        logits = self(row_BT[:, :-1])
        logits = logits.float() if logits.dtype != torch.float64 else logits
        return F.cross_entropy(logits.flatten(0, 1), row_BT[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch[:, :-1]).argmax(-1)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.05},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(strategy: Any = "auto", **options: Any) -> pl.Trainer:
    """A quiet CPU trainer over all ranks of this process group."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else _world_size(strategy),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(strategy=strategy, **(defaults | options))


def _world_size(strategy: Any) -> int:
    import os

    return 1 if strategy == "auto" else int(os.environ.get("WORLD_SIZE", "1"))


def whole(module: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter as one tensor on the CPU. Collective for a sharded module."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in module.named_parameters()
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run learned."""

    losses: list[float]
    parameters: dict[str, Tensor]


def fit(strategy: Any, *, steps: int = 8, accumulate: int = 1, **options: Any) -> Outcome:
    """Train the small module; ranks in a group must call it together."""
    module = options.pop("module", None) or Lit(options.pop("config", TINY))
    data = options.pop("data", None) or loader()
    run = trainer(strategy, max_steps=steps, accumulate_grad_batches=accumulate, **options)
    run.fit(module, data)
    return Outcome(losses=module.losses, parameters=whole(module))
