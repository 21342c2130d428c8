"""What needs less host memory, and what it costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zero_strategy.planning.host_memory import Remedy
from zero_strategy.planning.job import Job, shares
from zero_strategy.planning.machines import Machine
from zero_strategy.planning.offload_plan import fits
from zero_strategy.planning.step_time import step_time
from zero_strategy.planning.tiers import host_parts, total_bytes
from zero_strategy.telemetry import text

_MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class _Change:
    action: str
    job: Job
    share: float
    times: int = 1
    """Its steps, or nodes, that take the place of one."""


def host_remedies(
    job: Job, machine: Machine, share: float, available_bytes: int, *, fixed: bool = False
) -> tuple[Remedy, ...]:
    """Return changes that need less host memory, with what each saves and costs.

    Args:
        job: what is trained. With `flops_per_step` of 0, what hides under compute is not known and
            counts as a cost.
        machine: its GPU decides how much may stay there; its rates decide what a change costs.
        share: of the state in host memory, as it is.
        available_bytes: host memory that this rank may take.
        fixed: the share cannot be changed.

    Example:
        >>> remedies = host_remedies(job, H200, 1.0, room.available_bytes)
        >>> check_host_memory(parts, room.available_bytes, remedies, bound=room.bound)
    """
    needed, now_s = total_bytes(host_parts(job, share)), _step_s(job, machine, share)
    remedies = [
        Remedy(
            action=change.action,
            saves_bytes=needed - total_bytes(host_parts(change.job, change.share)),
            cost_s=change.times * _step_s(change.job, machine, change.share) - now_s,
        )
        for change in (
            *([] if fixed else _smaller_share(job, machine, share, available_bytes)),
            *_cheaper_gradients(job, share),
            *_more_nodes(job, share, available_bytes),
        )
    ]
    return tuple(remedy for remedy in remedies if remedy.saves_bytes > 0)


def _step_s(job: Job, machine: Machine, share: float) -> float:
    return step_time(job, machine, share).clipped_step_s


def _smaller_share(job: Job, machine: Machine, share: float, available_bytes: int) -> list[_Change]:
    """The largest part that the host can take, or else the smallest that the GPU allows."""
    possible = [s for s in shares(job.units) if s < share and fits(job, machine, s)]
    enough = [s for s in possible if total_bytes(host_parts(job, s)) <= available_bytes]
    if not possible:
        return []
    chosen = max(enough) if enough else min(possible)
    kept = f"{text.percent(chosen)} of the parameters instead of {text.percent(share)}"
    return [_Change(f"offload {kept}, the GPU has room", job, chosen)]


def _cheaper_gradients(job: Job, share: float) -> list[_Change]:
    found = []
    if job.grad_itemsize == 4:
        action = 'zero.offload.grad_dtype = "bf16", a step\'s whole gradient is rounded once'
        found.append(_Change(action, dataclasses.replace(job, grad_dtype="bf16"), share))
    times = job.micro_batches
    single = dataclasses.replace(
        job,
        micro_batches=1,
        tokens_per_step=job.tokens_per_step // times,
        flops_per_step=job.flops_per_step / times,
    )
    if single.grad_itemsize < job.grad_itemsize:
        action = "accumulate=1, a gradient that is no sum is bf16 already"
        found.append(_Change(action, single, share, times))
    return found


def _more_nodes(job: Job, share: float, available_bytes: int) -> list[_Change]:
    """The fewest that are enough. Ranks of one node share its memory, so they are no help."""
    factor = 2
    while factor < _MAX_NODES and (
        total_bytes(host_parts(on_more_nodes(job, factor), share)) > available_bytes
    ):
        factor *= 2
    return [_Change(f"{factor} times as many nodes", on_more_nodes(job, factor), share, factor)]


def on_more_nodes(job: Job, factor: int) -> Job:
    """Return the job of a rank where `factor` times as many nodes share the parameters."""
    units = {
        name: dataclasses.replace(
            size, trained=-(-size.trained // factor), frozen=-(-size.frozen // factor)
        )
        for name, size in job.units.items()
    }
    return dataclasses.replace(job, units=units, world_size=job.world_size * factor)
