"""From a run's configuration to what planning knows of it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from zero_strategy.blocks import Units, find_units
from zero_strategy.config import OffloadConfig
from zero_strategy.experiments.models.activations import activations
from zero_strategy.experiments.models.gpt import GPT, GPTConfig
from zero_strategy.experiments.schema import RunConfig
from zero_strategy.planning.job import Job
from zero_strategy.planning.machines import Machine
from zero_strategy.planning.offload_plan import Plan, choose_placement, plan_job
from zero_strategy.planning.sizes import UnitSize, unit_sizes
from zero_strategy.presets import PRESETS

_CPU_RANKS = 2
# Bytes of a weight as it is stored, computed with and reduced.
_ITEMSIZES = {
    "32-true": (4, 4, 4),
    "bf16-mixed": (4, 2, 4),
    "16-mixed": (4, 2, 4),
    "bf16-true": (2, 2, 2),
}


class Planned(NamedTuple):
    """A job and its plan."""

    job: Job
    plan: Plan


def planned(config: RunConfig, machine: Machine, host_share: float | None = None) -> Planned:
    """Plan a run.

    Args:
        config: the run; its strategy shards.
        machine: where.
        host_share: as in `plan_job`; by default all, and None without offload.
    """
    job = job_of(config, machine)
    share = default_share(config, job, machine) if host_share is None else host_share
    return Planned(job, plan_job(job, machine, share))


def default_share(config: RunConfig, job: Job, machine: Machine) -> float | None:
    """Return the part of the state that the strategy puts in host memory; None without offload."""
    if "offload" not in PRESETS[config.trainer.strategy]:
        return None
    return choose_placement(job, machine) if machine.num_gpus else 1.0


def job_of(config: RunConfig, machine: Machine) -> Job:
    """Return a rank's part of a run.

    Args:
        config: the run; its strategy shards.
        machine: tells how many ranks there are where the run takes every GPU.
    """
    trainer, data, model = config.trainer, config.data, config.model
    num_local_ranks = trainer.devices or machine.num_gpus or _CPU_RANKS
    world_size = num_local_ranks * trainer.num_nodes
    offloads = "offload" in PRESETS[trainer.strategy]
    module, _ = built(model, offloads=offloads)
    stored, compute, reduced = _ITEMSIZES[trainer.precision]
    tokens = data.batch_size * data.seq_len * trainer.accumulate
    trained_flops = module.flops_per_token(data.seq_len)
    # A block's forward is a third of its operations; the head runs once in any case.
    head_flops = 6.0 * model.hidden_size * model.vocab_size
    again = (trained_flops - head_flops) / 3 if model.recompute else 0.0
    preset: Any = PRESETS[trainer.strategy]
    return Job(
        units=_sizes(model, offloads, world_size),
        zero_stage=preset["stage"],
        world_size=world_size,
        num_local_ranks=num_local_ranks,
        stored_itemsize=stored,
        compute_itemsize=compute,
        reduce_itemsize=reduced,
        grad_dtype=OffloadConfig().grad_dtype,
        lanes=OffloadConfig().lanes if machine.num_gpus else "cpu",
        moments=OffloadConfig().moments,
        chunk_elements=OffloadConfig().chunk_elements,
        micro_batches=trainer.accumulate,
        tokens_per_step=tokens,
        flops_per_step=(trained_flops + again) * tokens,
        forward_share=trained_flops / 3 / (trained_flops + again),
        activations=activations(
            model, batch_size=data.batch_size, seq_len=data.seq_len, itemsize=compute
        ),
        clips=config.optim.clip_norm is not None,
    )


@cache
def built(config: GPTConfig, *, offloads: bool) -> tuple[GPT, Units]:
    """Return the model on the meta device, and its units as the strategy chooses them."""
    with torch.device("meta"), _NoDraws():
        module = GPT(config)
    return module, find_units(module, None, every_child=False, large_leaves=offloads)


@cache
def _sizes(config: GPTConfig, offloads: bool, world_size: int) -> dict[str, UnitSize]:
    return unit_sizes(*built(config, offloads=offloads), world_size)


class _NoDraws(TorchFunctionMode):
    """Leaves out random values, which meta tensors do not have, and counts on the CPU.

    For either of them on meta torch loads its compiler, which takes longer than the whole plan.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = kwargs or {}
        if func is nn.init.normal_:
            return next(iter((*args, *named.values())))
        if func is torch.arange:
            named = {**named, "device": "cpu"}
        return func(*args, **named)
