"""Puts an engine together as a configuration asks, for the machine it runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from zero_strategy.config import OffloadConfig
from zero_strategy.offload.engine import OffloadEngine
from zero_strategy.offload.host import HostState
from zero_strategy.offload.lanes import CpuLane, Lane, StreamLane
from zero_strategy.offload.link import CudaLink, Link, link_for
from zero_strategy.offload.tiers import TieredState
from zero_strategy.planning.job import (
    NUM_WIRES,
    STREAM_LEAVES,
    STREAM_SLOTS,
    num_held,
    num_spare_slots,
)


def make_engine(
    state: TieredState,
    weights: Mapping[str, Tensor],
    *,
    device: torch.device,
    config: OffloadConfig,
    grad_dtype: torch.dtype,
) -> OffloadEngine:
    """Return an engine with its link and its lanes.

    Args:
        state: weights and moments.
        weights: as in `OffloadEngine`.
        device: where the weights are computed with.
        config: what the user asked for.
        grad_dtype: of gradients on their way and until they are committed.
    """
    link = link_for(device)
    return OffloadEngine(
        state=state,
        weights=weights,
        lanes=_make_lanes(state.host, link, config, grad_dtype),
        link=link,
        grad_dtype=grad_dtype,
        spare_slots=num_spare_slots(len(state.host.layout.chunks)),
        max_held=num_held(len(state.host.layout.chunks)),
        pinned=isinstance(link, CudaLink),
    )


def _make_lanes(
    state: HostState, link: Link, config: OffloadConfig, grad_dtype: torch.dtype
) -> list[Lane]:
    chunks, length = state.layout.chunks, state.layout.slot_length
    on_gpu = isinstance(link, CudaLink)
    if on_gpu and config.lanes != "cpu":
        state.pin(state.layout.within(state.parameter_bytes, config.pin_budget_gib))
    lanes: list[Lane] = []
    if config.lanes != "stream" or len(state.pinned) < len(chunks):
        threads = config.threads or _default_threads()
        lanes.append(CpuLane(link, length, num_wires=NUM_WIRES, threads=threads, pinned=on_gpu))
    if isinstance(link, CudaLink) and state.pinned:
        leaves = STREAM_LEAVES if lanes else 0
        lanes.append(
            StreamLane(
                link,
                length,
                grad_dtype=grad_dtype,
                moments=state.moments,
                num_slots=STREAM_SLOTS,
                leaves=leaves,
            )
        )
    return lanes


def _default_threads() -> int:
    """This rank's cores but for two, where threads queue the device's work and copies."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // ranks - 2)
