"""A small run whose batches can be spoilt one by one, and the bytes of its whole state.

A forward changes the model's buffers before anyone knows of a bad gradient, one in place and one
by another tensor.
"""

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests import lit
from zero_strategy.gradient import local

WIDTH = 10
GLOBAL_BATCH = 8


class Centre(nn.Module):
    """Subtracts a running mean; BatchNorm takes no bf16 weights beside fp32 buffers on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().to(self.mean.dtype).mean(0), 0.1)
                self.count = self.count + 1
        return x - self.mean.to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Centre()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(pl.LightningModule):
    """Regression; spoils chosen micro-batches on the last rank.

    Args:
        nan_at: micro-batches whose input is NaN there.
        bad_gradient_at: those with a finite loss and a gradient that is NaN.
        bad_loss_at: those with a loss that is NaN and finite gradients.
        loud_at: those whose loss is a hundred million times as large, on all ranks.
    """

    def __init__(
        self,
        *,
        nan_at: Collection[int] = (),
        bad_gradient_at: Collection[int] = (),
        bad_loss_at: Collection[int] = (),
        loud_at: Collection[int] = (),
        lr: float = 0.01,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.nan_at, self.bad_gradient_at = nan_at, bad_gradient_at
        self.bad_loss_at, self.loud_at = bad_loss_at, loud_at
        self.lr = lr
        self.seen: list[int] = []
        """The micro-batches by their number in the data; each is one read of a tensor."""

    def output(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        self.seen.append(int(y[0, 0]) // GLOBAL_BATCH)
        spoils = self.trainer.global_rank == self.trainer.world_size - 1
        if spoils and index in self.nan_at:
            x = x * float("nan")
        out = self.output(x)
        loss = F.mse_loss(out, y[:, 1:])
        if spoils and index in self.bad_gradient_at:
            loss = loss + (out[0] * 0).sum().sqrt()
        if spoils and index in self.bad_loss_at:
            loss = loss + float("nan") * out[0].detach().sum()
        return loss * 1e8 if index in self.loud_at else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(num_batches: int, *, without: Collection[int] = ()) -> DataLoader:
    """This rank's rows of so many global micro-batches, in order, without some of them."""
    generator = torch.Generator().manual_seed(11)
    rows = num_batches * GLOBAL_BATCH
    x = torch.randn(rows, WIDTH, generator=generator)
    y = torch.cat([torch.arange(rows)[:, None], x.sum(1, keepdim=True)], dim=1)
    kept = torch.tensor([i for i in range(rows) if i // GLOBAL_BATCH not in without])
    data = TensorDataset(x[kept], y[kept])
    if not dist.is_initialized():
        return DataLoader(data, batch_size=GLOBAL_BATCH)
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)


def fit(strategy: Any, module: pl.LightningModule, data: DataLoader, **options: Any) -> pl.Trainer:
    """Train on all batches once; the Trainer of the run."""
    run = lit.trainer(strategy, **({"max_epochs": 1} | options))
    run.fit(module, data)
    return run


def as_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def state(run: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """All that a step may change on this rank, as bytes and plain numbers."""
    strategy: Any = run.strategy
    tensors = {f"weight.{n}": p for n, p in module.named_parameters()}
    tensors |= {f"master.{n}": t for n, t in strategy.masters().items()}
    tensors |= {f"buffer.{n}": b for n, b in module.named_buffers()}
    for optimizer in run.optimizers:
        for name, slots in strategy.optimizer_state(optimizer)["state"].items():
            tensors |= {f"{name}.{slot}": slots[slot] for slot in slots}
    found: dict[str, Any] = {name: as_bytes(local(t.detach())) for name, t in tensors.items()}
    found["lr"] = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
    found["schedule"] = [c.scheduler.last_epoch for c in run.lr_scheduler_configs]
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same in both."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


class Late:
    """The end of a copy that takes so many questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.left = 0
