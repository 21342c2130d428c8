"""What every system trains: the same model, optimizer and tokens, from the same seed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.experiments.models.gpt import GPT, GPTConfig
from zero_strategy.experiments.models.loss import token_loss

# Different micro-batches in host memory; a run goes round them.
NUM_DISTINCT = 8
# Of every system's AdamW.
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training job.

    Attributes:
        model: shape of the decoder.
        batch_size: rows per rank and micro-batch.
        seq_len: predicted tokens per row.
        accumulate: micro-batches per optimizer step.
        warmup_steps: optimizer steps before anything is measured.
        steps: optimizer steps that are measured.
        lr: constant learning rate.
        max_norm: bound of the gradients' global norm.
        traced_steps: optimizer steps after the measured ones, and after the clipped ones, that
            are there to be profiled.
        settle_steps: optimizer steps between these and the clipped ones, not measured.
        clipped_steps: measured once more, bound by `clipped_max_norm`; 0 for none.
        clipped_max_norm: so small that every step is clipped.
        seed: chooses weights and tokens.
    """

    model: GPTConfig
    batch_size: int
    seq_len: int
    accumulate: int = 1
    warmup_steps: int
    steps: int
    lr: float = 3e-4
    max_norm: float = 1.0
    traced_steps: int = 0
    settle_steps: int = 0
    clipped_steps: int = 0
    clipped_max_norm: float = 0.01
    seed: int = 1

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Workload:
        """Return what `to_json` made plain."""
        return cls(**{**tree, "model": GPTConfig(**tree["model"])})

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    @property
    def num_batches(self) -> int:
        """Micro-batches per rank. One more step than measured: its start ends the last period."""
        return self.end_clipped + (self.traced_steps + 1) * self.accumulate

    @property
    def num_steps(self) -> int:
        """Optimizer steps in all."""
        return self.num_batches // self.accumulate

    @property
    def first_measured(self) -> int:
        """Index of the first measured micro-batch."""
        return self.warmup_steps * self.accumulate

    @property
    def end_measured(self) -> int:
        """Index of the first micro-batch after the measured ones."""
        return self.first_measured + self.steps * self.accumulate

    @property
    def first_clipped(self) -> int:
        """Index of the first measured micro-batch whose step is clipped."""
        return self._begin_clipping + self.settle_steps * self.accumulate

    @property
    def end_clipped(self) -> int:
        """Index of the first micro-batch after these."""
        if not self.clipped_steps:
            return self.end_measured
        return self.first_clipped + self.clipped_steps * self.accumulate

    @property
    def _begin_clipping(self) -> int:
        return self.end_measured + self.traced_steps * self.accumulate

    def max_norm_at(self, index: int) -> float:
        """Return the bound of the step that a micro-batch belongs to."""
        clips = self.clipped_steps and index >= self._begin_clipping
        return self.clipped_max_norm if clips else self.max_norm

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens per rank and optimizer step."""
        return self.batch_size * self.seq_len * self.accumulate

    def flops_per_token(self) -> float:
        """Model FLOPs per token, forward and backward, without what is computed twice."""
        return self._on_meta().flops_per_token(self.seq_len)

    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self._on_meta().parameters())

    def _on_meta(self) -> GPT:
        with torch.device("meta"):
            return GPT(self.model)


class TokenBatches:
    """Random token rows in pinned host memory, (B, T + 1), int64; each rank has its own."""

    def __init__(self, workload: Workload) -> None:
        self._num_batches = workload.num_batches
        rank_device()  # pinning starts CUDA, which must happen on this rank's own device
        generator = torch.Generator().manual_seed(1000 * workload.seed + global_rank())
        shape = (NUM_DISTINCT, workload.batch_size, workload.seq_len + 1)
        rows = torch.randint(0, workload.model.vocab_size, shape, generator=generator)
        self._batches = list(rows.pin_memory() if torch.cuda.is_available() else rows)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self._num_batches):
            yield self._batches[index % NUM_DISTINCT]


def build_model(workload: Workload, device: torch.device) -> GPT:
    """Return the whole model in fp32 on a device, drawn from the workload's seed."""
    torch.manual_seed(workload.seed)
    with device:
        return GPT(workload.model)


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Return the optimizer of every system."""
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def loss_of(model: nn.Module, row_BT: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch, in nats per token."""
    return token_loss(model(row_BT[:, :-1]), row_BT[:, 1:])


def global_rank() -> int:
    """Return this process's rank, as its launcher set it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks, as the launcher set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_device() -> torch.device:
    """Return this rank's device and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join_ranks(device: torch.device) -> None:
    """Start the process group of a system that brings none."""
    if device.type == "cuda":
        # gloo for what FSDP2 keeps in host memory and reduces there.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
