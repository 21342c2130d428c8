"""FSDP2 in a plain loop: what the strategy stands on, without anything around it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.utils import clip_grad_norm_

from zero_strategy.experiments.benchmarks.watch import Watch
from zero_strategy.experiments.benchmarks.workload import (
    TokenBatches,
    Workload,
    build_model,
    join_ranks,
    loss_of,
    make_optimizer,
    rank_device,
    world_size,
)
from zero_strategy.experiments.models.gpt import GPT


def train(workload: Workload, watch: Watch) -> None:
    """Train the workload: fp32 masters, bf16 compute, fp32 reduction, resharded after forward."""
    _train(workload, watch, OffloadPolicy())


def train_offload(workload: Workload, watch: Watch) -> None:
    """Train with FSDP2's own offload: fp32 masters and moments in host memory, stepped there."""
    _train(workload, watch, CPUOffloadPolicy())


def _train(workload: Workload, watch: Watch, offload: OffloadPolicy) -> None:
    device = rank_device()
    join_ranks(device)
    model = shard(build_model(workload, device), device, offload)
    optimizer = make_optimizer(model.parameters(), workload.lr)
    for index, host_rows in enumerate(TokenBatches(workload)):
        watch.begin(index)
        loss = loss_of(model, host_rows.to(device, non_blocking=True))
        watch.saw(loss)
        (loss / workload.accumulate).backward()
        if (index + 1) % workload.accumulate == 0:
            clip_grad_norm_(model.parameters(), workload.max_norm_at(index))
            optimizer.step()
            optimizer.zero_grad()


def shard(model: GPT, device: torch.device, offload: OffloadPolicy | None = None) -> GPT:
    """Make each block a unit and the rest the root unit, in place."""
    mesh = init_device_mesh(device.type, (world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = offload or OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model
