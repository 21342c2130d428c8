"""Forward and backward alone, in one process: the rate that no optimizer can exceed."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_strategy.experiments.benchmarks.watch import Watch
from zero_strategy.experiments.benchmarks.workload import (
    TokenBatches,
    Workload,
    build_model,
    loss_of,
    rank_device,
)


def train(workload: Workload, watch: Watch) -> None:
    """Compute losses and gradients in bf16; gradients are let go at once, nothing is stepped."""
    device = rank_device()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(workload, device)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_let_go)
    for index, host_rows in enumerate(TokenBatches(workload)):
        watch.begin(index)
        loss = loss_of(model, host_rows.to(device, non_blocking=True))
        watch.saw(loss)
        loss.backward()


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None
