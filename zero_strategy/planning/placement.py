"""Which part of the optimizer state lies in host memory: at first, and once a step was measured.

What a step needs on the device is not known before the first. So it is taken with as much of the
state in host memory as that holds; then what fits the device's measured room moves there. Where
state lies never changes a result.
"""

from __future__ import annotations

import torch

from zero_strategy.config import Placement
from zero_strategy.planning.job import Job, host_units, shares
from zero_strategy.planning.tiers import host_parts, total_bytes
from zero_strategy.telemetry import text

_WEIGHT_BYTES = 2

HOST_SHARE = 0.95
"""Of the host memory that is left, for the state; the rest is for workers and files."""
GPU_MARGIN = 0.03
"""Of the device's memory, left free when state moves there: later steps may differ a little."""


def starting_share(
    job: Job, placement: Placement | float, *, host_bytes: int, device_bytes: int
) -> float:
    """Return the part of the trained parameters whose state lies in host memory at first.

    Args:
        job: what is trained.
        placement: as in `OffloadConfig`.
        host_bytes: of host memory that this rank may take; the same on every rank.
        device_bytes: of this rank's GPU; 0 without one, where all state lies in the host's memory.

    Raises:
        ValueError: the state that the host cannot hold does not fit beside the weights on the GPU.
    """
    if placement not in ("auto", "host"):
        return float(placement)
    if placement == "host" or not device_bytes:
        return 1.0
    # The last asks the host for nothing.
    share = next(s for s in reversed(shares(job.units)) if _host_need(job, s) <= host_bytes)
    resident = job.trained - _held(job, share)
    parts = {
        "weights": _WEIGHT_BYTES * job.trained,
        "state and gradients that host memory cannot hold": _resident_bytes(job, resident),
    }
    needed = sum(parts.values())
    if needed > device_bytes:
        sums = {**parts, "one GPU": device_bytes, "host memory that is left": host_bytes}
        width = max(map(len, sums))
        lines = [f"  {name:<{width}}  {text.gib(size):>9}" for name, size in sums.items()]
        message = (
            f"zero.offload = {text.gib(needed)} of one GPU, activations not counted: must be at "
            f"most {text.gib(device_bytes)}."
        )
        advice = "Use more ranks, over which the state is cut, or a smaller model."
        raise ValueError("\n".join([message, *lines, advice]))
    return share


def _host_need(job: Job, share: float) -> float:
    return total_bytes(host_parts(job, share)) / HOST_SHARE


def fitting_share(job: Job, share: float, room_bytes: int) -> float:
    """Return the smallest part in host memory for which the device has room.

    Args:
        job: what is trained.
        share: as it is now.
        room_bytes: of the device, that a step with this share did not need.
    """
    held = _held(job, share)
    possible = shares(job.units)
    fitting = (s for s in possible if _resident_bytes(job, held - _held(job, s)) <= room_bytes)
    return min(share, next(fitting, share))


def _resident_bytes(job: Job, num_params: int) -> int:
    return (job.resident_bytes + job.grad_itemsize) * num_params


def _held(job: Job, share: float) -> int:
    return sum(job.units[name].trained for name in host_units(job.units, share))


def device_bytes(device: torch.device) -> int:
    """Return a device's memory; 0 without a GPU."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0


def device_room(device: torch.device) -> int:
    """Return the bytes of a device that no step has needed so far; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - int(GPU_MARGIN * total))
