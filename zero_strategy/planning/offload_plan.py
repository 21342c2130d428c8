"""The plan of a job: bytes on every tier, seconds per step, and the placement that costs least.

Pure functions of sizes: every rank that asks with the same numbers gets the same answer.

Example:
    >>> share = choose_placement(job, H200)
    >>> plan = plan_job(job, H200, share)
    >>> check_host_memory(plan.host_bytes_by_purpose, room.available_bytes,
    ...                   host_remedies(job, H200, share, room.available_bytes), bound=room.bound)
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_strategy.planning.job import Job, host_units, shares
from zero_strategy.planning.machines import Machine
from zero_strategy.planning.step_time import StepTime, step_time
from zero_strategy.planning.tiers import Moment, Part, gpu_parts, host_parts, total_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one rank will need."""

    share: float | None
    """Part of the trained parameters whose state lies in host memory; None without offload."""
    host_units: tuple[str, ...]
    gpu: tuple[Part, ...]
    """What is held when GPU memory is fullest."""
    peak_at: Moment
    host: tuple[Part, ...]
    time: StepTime
    gpu_missing_bytes: int
    """Beyond what the machine has; 0 where it fits."""
    host_missing_bytes: int
    """The same, of this rank's part of the host."""

    @property
    def gpu_bytes(self) -> int:
        """Predicted peak of one GPU."""
        return total_bytes(self.gpu)

    @property
    def host_bytes(self) -> int:
        """Predicted host memory of one rank, the program itself not counted."""
        return total_bytes(self.host)

    @property
    def host_bytes_by_purpose(self) -> dict[str, int]:
        """As `check_host_memory` takes it."""
        return {part.purpose: part.num_bytes for part in self.host}

    @property
    def fits(self) -> bool:
        """Whether both tiers are large enough."""
        return not (self.gpu_missing_bytes or self.host_missing_bytes)


def plan_job(job: Job, machine: Machine, share: float | None) -> Plan:
    """Plan a job under one placement.

    Args:
        job: what is trained.
        machine: where.
        share: of the trained parameters whose optimizer state lies in host memory, in [0, 1]; None
            trains without the offload engine.

    Cost: about a microsecond per chunk of `job.chunk_elements` parameters and simulated step.
    """
    peak_at, gpu = gpu_parts(job, share)
    gpu_missing, host_missing = missing_bytes(job, machine, share)
    return Plan(
        share=share,
        host_units=host_units(job.units, share or 0.0),
        gpu=gpu,
        peak_at=peak_at,
        host=host_parts(job, share),
        time=step_time(job, machine, share),
        gpu_missing_bytes=gpu_missing,
        host_missing_bytes=host_missing,
    )


def choose_placement(job: Job, machine: Machine) -> float:
    """Return the smallest part of the state in host memory with which the GPU's budget is kept.

    Every parameter that stays costs the host nothing and no copy; so the smallest part is also the
    cheapest. Where none fits, all goes to the host, and the plan tells what is missing.
    """
    found = shares(job.units)
    return next((share for share in found if fits(job, machine, share)), found[-1])


def fits(job: Job, machine: Machine, share: float | None) -> bool:
    """Whether the GPU's budget is kept; the host's is not looked at."""
    return total_bytes(gpu_parts(job, share)[1]) <= _gpu_budget(job, machine)


def _gpu_budget(job: Job, machine: Machine) -> int:
    # Without a GPU both tiers are the host's memory.
    return machine.gpu_bytes if machine.num_gpus else machine.host_bytes // job.num_local_ranks


def missing_bytes(job: Job, machine: Machine, share: float | None) -> tuple[int, int]:
    """Return what one rank lacks on the GPU and in host memory; 0 where it has enough."""
    gpu, host = total_bytes(gpu_parts(job, share)[1]), total_bytes(host_parts(job, share))
    room = machine.host_bytes // job.num_local_ranks
    if not machine.num_gpus:
        return 0, max(0, gpu + host - room)
    return max(0, gpu - machine.gpu_bytes), max(0, host - room)
