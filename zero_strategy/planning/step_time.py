"""Seconds of an optimizer step: what the GPU computes, and what of the rest it has to wait for.

A model of four queues: the GPU, copies down, the lane that steps, copies up. Chunks go through them
as the engine sends them, in backward order at arrival and in forward order once the norm is known.
Collectives between GPUs are taken as hidden.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from zero_strategy.planning.job import Job, host_units, num_held, num_spare_slots
from zero_strategy.planning.machines import Machine
from zero_strategy.telemetry import text

Pass = Literal["step", "deferred", "preview"]
Mode = Literal["deferred", "late", "staged"]
"""As in the engine: how a gradient is met whose step's norm is not known yet."""

# Bytes per parameter with bf16 gradients that a pass on the cores moves in host memory, and how
# often either moment is among them.
_CORE_BYTES: dict[Pass, int] = {"step": 26, "deferred": 30, "preview": 16}
_GRADS_READ: dict[Pass, int] = {"step": 1, "deferred": 2, "preview": 1}
_MOMENT_MOVES: dict[Pass, int] = {"step": 2, "deferred": 2, "preview": 1}
_WEIGHT_BYTES = 2
# The GPU's pass reads and writes 28 bytes; the norm reads the gradient, clipping changes it.
_GPU_STEP_BYTES, _GPU_NORM_BYTES, _GPU_CLIP_BYTES = 28, 4, 8
_SIMULATED_STEPS, _SETTLED_STEP = 6, 2
_MANY_CHUNKS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step."""

    compute_s: float
    """Forward and backward, slowed down by copies under them."""
    optimizer_s: float
    """Norm, clipping and step of what stays on the GPU."""
    exposed_s: float
    """Waiting for offloaded state, where no step is clipped."""
    exposed_clipped_s: float
    """The same where every step is clipped, in the fastest mode; equal without clipping."""
    clipped_mode: Mode
    """That mode."""
    lane_s: float
    """The lane's passes of an unclipped step, hidden or not."""
    down_s: float
    """Copies of gradients to the host, hidden or not."""
    up_s: float
    """Copies of weights to the GPU, hidden or not."""
    compute_reason: str
    optimizer_reason: str

    @property
    def parts(self) -> tuple[tuple[str, float, str], ...]:
        """Name, seconds and reason of what an unclipped step consists of."""
        under = ", ".join(
            f"{name} {text.duration(seconds)}"
            for name, seconds in (
                ("passes", self.lane_s),
                ("copies down", self.down_s),
                ("copies up", self.up_s),
            )
        )
        exposed = f"what is not hidden of {under}" if self.lane_s else "nothing is offloaded"
        return (
            ("compute", self.compute_s, self.compute_reason),
            ("optimizer", self.optimizer_s, self.optimizer_reason),
            ("exposed", self.exposed_s, exposed),
        )

    @property
    def step_s(self) -> float:
        """The whole step where none is clipped."""
        return self.compute_s + self.optimizer_s + self.exposed_s

    @property
    def clipped_step_s(self) -> float:
        """The whole step where every one is clipped."""
        return self.compute_s + self.optimizer_s + self.exposed_clipped_s

    @property
    def slowest(self) -> str:
        """The queue that has most to do."""
        work = {
            "compute": self.compute_s + self.optimizer_s,
            "optimizer passes": self.lane_s,
            "copies to the host": self.down_s,
            "copies to the GPU": self.up_s,
        }
        return max(work, key=lambda name: work[name])


def step_time(job: Job, machine: Machine, share: float | None) -> StepTime:
    """Predict one optimizer step.

    Args:
        job: what is trained.
        machine: where.
        share: of the trained parameters whose state lies in host memory; None without offload.

    Held against five measured steps of one H200 by `tests/test_plan.py`.
    """
    if job.lanes == "auto":
        ways = [replace(job, lanes="cpu"), replace(job, lanes="both")]
        return min((step_time(way, machine, share) for way in ways), key=lambda t: t.step_s)
    queues = _Queues.of(job, machine)
    chosen = set(host_units(job.units, share or 0.0))
    offloaded = sum(job.units[name].trained for name in chosen)
    down_s, up_s = offloaded * queues.down_s, offloaded * queues.up_s
    # Ranks without a GPU share the host's cores for everything.
    sharing = 1 if machine.num_gpus else job.num_local_ranks
    flops_per_s = machine.matmul_flops_per_s / sharing
    memory_per_s = machine.gpu_memory_bytes_per_s / sharing
    alone_s = job.flops_per_step / flops_per_s
    overlap = min(1.0, max(down_s, up_s) / alone_s) if alone_s else 0.0
    compute_s = alone_s * (1 + machine.copy_slowdown * overlap)
    step_bytes = _GPU_STEP_BYTES + _GPU_NORM_BYTES + (_GPU_CLIP_BYTES if job.clips else 0)
    if share is not None:  # both moments are read and written
        step_bytes -= 4 * (4 - job.moment_itemsize)
    resident = job.trained - offloaded
    steps = _steps(job, compute_s, chosen)
    modes: tuple[Mode, ...] = ("deferred", "late", "staged")
    exposed = _exposed(steps, queues, "deferred", clipped=False)
    clipped = {mode: _exposed(steps, queues, mode, clipped=True) for mode in modes}
    fastest = min(modes, key=lambda mode: clipped[mode])
    return StepTime(
        compute_s=compute_s,
        optimizer_s=resident * step_bytes / memory_per_s,
        exposed_s=exposed,
        exposed_clipped_s=clipped[fastest] if job.clips else exposed,
        clipped_mode=fastest,
        lane_s=offloaded * queues.pass_s["deferred"],
        down_s=down_s,
        up_s=up_s,
        compute_reason=_compute_reason(job, flops_per_s, machine.copy_slowdown * overlap),
        optimizer_reason=(
            f"{step_bytes} B x {text.count(resident)} parameters that stay, at "
            f"{text.count(memory_per_s)}B/s"
        ),
    )


def _compute_reason(job: Job, flops_per_s: float, slowdown: float) -> str:
    reason = f"{text.count(job.flops_per_step)} FLOP at {text.count(flops_per_s)}FLOP/s"
    return f"{reason}, {text.percent(slowdown)} slower by copies" if slowdown else reason


# How fast the queues go.


@dataclass(frozen=True, slots=True)
class _Queues:
    """Seconds per parameter."""

    down_s: float
    up_s: float
    pass_s: dict[Pass, float]
    commit_s: float
    """Of a commit ahead of its time, which is the cores'."""

    @classmethod
    def of(cls, job: Job, machine: Machine) -> _Queues:
        names: tuple[Pass, ...] = ("step", "deferred", "preview")
        cores = replace(job, lanes="cpu")
        return cls(
            down_s=job.grad_itemsize / machine.duplex_bytes_per_s,
            # A streamed pass leaves its weights on the GPU.
            up_s=_lane_times("deferred", job, machine).by_cores
            * _WEIGHT_BYTES
            / machine.duplex_bytes_per_s,
            pass_s={name: _lane_times(name, job, machine).pass_s for name in names},
            commit_s=_lane_times("step", cores if job.lanes == "both" else job, machine).pass_s,
        )


class _LaneTimes(NamedTuple):
    """Of one kind of pass, its chunks spread over the lanes."""

    pass_s: float
    """Seconds per parameter."""
    by_cores: float
    """Part of the parameters that the host's cores step."""


def _lane_times(name: Pass, job: Job, machine: Machine) -> _LaneTimes:
    """Return a pass's time with each lane taking what it can.

    Copies and both lanes draw on one host memory, which ranks of a host share.
    """
    rates: dict[Pass, float] = {
        "step": machine.step_params_per_s,
        "deferred": machine.deferred_params_per_s,
        "preview": machine.preview_params_per_s,
    }
    ranks = job.num_local_ranks
    grads = _GRADS_READ[name] * job.grad_itemsize
    # What came before the pass; a preview that is repeated has its gradient.
    arrived = 0 if name == "preview" else job.grad_itemsize
    core_bytes = _CORE_BYTES[name] + grads - 2 * _GRADS_READ[name]
    core_bytes -= 2 * _MOMENT_MOVES[name] * (4 - job.moment_itemsize)
    core_s = core_bytes / _CORE_BYTES[name] * ranks / rates[name]
    up, down = job.state_bytes + grads, 0 if name == "preview" else job.state_bytes
    link_s = up / (machine.duplex_bytes_per_s if down else machine.up_bytes_per_s)
    stream_s = max(link_s, 1 / machine.streamed_params_per_s if down else 0.0)
    by_cores = {"cpu": 1.0, "stream": 0.0, "both": stream_s / (core_s + stream_s)}[job.lanes]
    of_cores, of_stream = core_bytes + arrived + _WEIGHT_BYTES, up + down + arrived
    traffic = by_cores * of_cores + (1 - by_cores) * of_stream
    memory_s = traffic * ranks / machine.host_memory_bytes_per_s
    return _LaneTimes(max(by_cores * core_s, (1 - by_cores) * stream_s, memory_s), by_cores)


# How the chunks go through the queues.


@dataclass(frozen=True, slots=True)
class _Unit:
    forward_s: float
    backward_s: float
    chunks: Sequence[int]
    """Parameters of each; none where the unit's state stays on the GPU."""


@dataclass(frozen=True, slots=True)
class _Steps:
    units: Sequence[_Unit]
    between_s: float
    """Micro-batches between the first forward and the last backward."""
    spare_slots: int
    """Gradients that can have arrived without a pass, on the host and on the device."""
    compute_s: float


def _steps(job: Job, compute_s: float, chosen: set[str]) -> _Steps:
    per_batch = compute_s / job.micro_batches
    total = max(1, sum(size.trained + size.frozen for size in job.units.values()))
    units = []
    # Of a huge model several chunks go through the queues together: their number is the work here.
    offloaded = sum(job.units[name].trained for name in chosen)
    length = max(job.chunk_elements, offloaded // _MANY_CHUNKS)
    for name, size in job.units.items():
        part = per_batch * (size.trained + size.frozen) / total
        chunks = _chunks(size.trained, length) if name in chosen else ()
        units.append(_Unit(part * job.forward_share, part * (1 - job.forward_share), chunks))
    num_chunks = sum(len(unit.chunks) for unit in units)
    between_s = per_batch * (job.micro_batches - 1)
    return _Steps(units, between_s, num_spare_slots(num_chunks) + num_held(num_chunks), compute_s)


def _chunks(num_params: int, chunk_elements: int) -> tuple[int, ...]:
    count = -(-num_params // chunk_elements)
    return (num_params // count,) * count if count else ()


def _exposed(steps: _Steps, queues: _Queues, mode: Mode, *, clipped: bool) -> float:
    if not any(unit.chunks for unit in steps.units):
        return 0.0
    clock = _Clock(ready=[0.0] * len(steps.units))
    ends = []
    for _ in range(_SIMULATED_STEPS):
        clock.forward(steps)
        clock.backward(steps, queues, mode)
        if clipped:
            clock.after_norm(steps, queues, "step" if mode == "staged" else "preview")
        ends.append(clock.gpu)
    settled = (ends[-1] - ends[_SETTLED_STEP]) / (_SIMULATED_STEPS - 1 - _SETTLED_STEP)
    return max(0.0, settled - steps.compute_s)


@dataclass(slots=True)
class _Clock:
    """When each queue is free."""

    ready: list[float]
    """When a unit's weights of the last step are on the GPU."""
    gpu: float = 0.0
    down: float = 0.0
    lane: float = 0.0
    up: float = 0.0
    waiting: list[tuple[int, float, int]] = dataclasses.field(default_factory=list)
    """Unit, arrival and parameters of each gradient without its pass, as a heap."""

    def forward(self, steps: _Steps) -> None:
        for ready, unit in zip(self.ready, steps.units, strict=True):
            self.gpu = max(self.gpu, ready) + unit.forward_s
        self.gpu += steps.between_s

    def backward(self, steps: _Steps, queues: _Queues, mode: Mode) -> None:
        if mode == "late":
            # The step before is committed from here on, whenever the lane has nothing else to do.
            self.lane += sum(sum(u.chunks) for u in steps.units) * queues.commit_s
        for index, unit in reversed(list(enumerate(steps.units))):
            self.gpu += unit.backward_s
            for length in unit.chunks:
                self.down = max(self.down, self.gpu) + length * queues.down_s
                if mode != "deferred":
                    continue
                self._pass_those_before(self.down, queues)
                heapq.heappush(self.waiting, (index, self.down, length))
                if len(self.waiting) > steps.spare_slots:
                    # No slot is free, so the backward waits for a pass.
                    self._pass_next(queues)
                    self.gpu = max(self.gpu, self.lane)
        while self.waiting:
            self._pass_next(queues)

    def _pass_those_before(self, now: float, queues: _Queues) -> None:
        while self.waiting and max(self.lane, self.waiting[0][1]) < now:
            self._pass_next(queues)

    def _pass_next(self, queues: _Queues) -> None:
        """The first in forward order goes first; its unit is there once its last chunk is sent."""
        index, arrival, length = heapq.heappop(self.waiting)
        self.lane = max(self.lane, arrival) + length * queues.pass_s["deferred"]
        self.up = max(self.up, self.lane) + length * queues.up_s
        self.ready[index] = self.up

    def after_norm(self, steps: _Steps, queues: _Queues, name: Pass) -> None:
        self.lane = max(self.lane, self.gpu)
        for index, unit in enumerate(steps.units):
            for length in unit.chunks:
                self.lane = max(self.lane, self.down) + length * queues.pass_s[name]
                self.up = max(self.up, self.lane) + length * queues.up_s
            self.ready[index] = self.up if unit.chunks else 0.0
