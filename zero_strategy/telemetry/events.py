"""What happens in a run, as plain values; every sink reads the same four kinds."""

from dataclasses import dataclass
from typing import Protocol

from zero_strategy.offload.figures import OffloadFigures
from zero_strategy.planning.estimate import MemoryPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What is known when training starts."""

    model: str
    num_params: int
    num_trainable: int
    world_size: int
    device_name: str
    """As the driver names it, or `cpu`."""
    strategy: str
    precision: str
    start_step: int
    """Optimizer steps done before this start; above 0 in a resumed run."""
    total_steps: int | None
    """Optimizer steps at which training ends, where known."""
    plan: MemoryPlan | None
    checks: dict[str, str]
    offload: OffloadFigures | None = None
    """Where optimizer state lies at the start; None without offload."""
    link_bytes_per_s: float | None = None
    """Highest rate of copies one way between host and device, where known."""

    @property
    def rank_word(self) -> str:
        """What one rank is called beside a rate: `gpu`, or `rank` on the host."""
        return "rank" if self.device_name == "cpu" else "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Figures of one log step; its fields are the columns of `metrics.csv`.

    Rates and times are means over the steps since the last log step and over the ranks. Phase
    times add up to `step_ms`. None means not measured, not zero.
    """

    step: int
    epoch: int
    tokens: int | None
    """Tokens trained on so far, over all ranks and starts."""
    elapsed_s: float
    """Wall time so far, over all starts."""
    loss: float | None
    """Mean over the micro-batches of this step, and over the ranks."""
    grad_norm: float | None
    """Global norm before clipping."""
    lr: float | None
    tokens_per_s: float | None
    """Per rank."""
    mfu: float | None
    """Share of the peak dense bf16 FLOP/s, 0 to 1."""
    step_ms: float
    data_ms: float
    forward_ms: float
    backward_ms: float
    exposed_comm_ms: float | None
    optimizer_ms: float
    memory_bytes: int
    """Peak since the process started, on the fullest rank."""
    planned_bytes: int | None
    rank_skew_ms: float
    """Busy time of the slowest rank less that of the fastest."""
    skipped_steps: int | None
    """Steps dropped for an overflow of the scaled gradients, over all starts."""
    eta_s: float | None
    host_share: float | None = None
    """Of the trained parameters, whose optimizer state lies in host memory, 0 to 1. This and all
    that follow are None without offload; what is counted is per step and rank."""
    host_state_bytes: int | None = None
    """State there, on the fullest rank."""
    offload_exposed_ms: float | None = None
    """Time that forwards waited for weights; a part of `forward_ms`."""
    offload_slot_wait_ms: float | None = None
    """Time that backwards waited for room for gradients in host memory; a part of
    `backward_ms`."""
    offload_down_bytes: float | None = None
    """Copied to the host."""
    offload_up_bytes: float | None = None
    """Copied to the device."""
    offload_waiting: int | None = None
    """Most chunks that waited for a pass at one time, on any rank."""
    offload_redone: float | None = None
    """Chunks whose weights were sent again, since the step was clipped."""
    offload_cpu_passes: float | None = None
    """Passes over chunks by the host's cores."""
    offload_stream_passes: float | None = None
    """Passes over chunks by the device."""

    @property
    def exposed_share(self) -> float | None:
        """Share of the step that waited for communication, 0 to 1."""
        if self.exposed_comm_ms is None or not self.step_ms:
            return None
        return self.exposed_comm_ms / self.step_ms

    @property
    def offload_exposed_share(self) -> float | None:
        """Share of the step that waited for offloaded weights, 0 to 1."""
        if self.offload_exposed_ms is None or not self.step_ms:
            return None
        return self.offload_exposed_ms / self.step_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """One pass over the validation data; its fields are the columns of `validation.csv`."""

    step: int
    tokens: int | None
    elapsed_s: float
    loss: float | None
    bits_per_byte: float | None
    others: dict[str, float]
    """Whatever else was logged under `val_` or `val/`, without that prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """A checkpoint was written."""

    step: int
    name: str | None
    """Its file or folder name, where known."""
    blocking_s: float
    """Time until training went on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Training ended."""

    step: int
    wall_s: float
    """Wall time of this start."""
    productive_share: float
    """Share of it spent in forward, backward and optimizer, 0 to 1."""
    reason: str | None
    """What stopped it early, or None."""


Event = Step | Validation | Save | Done


class Sink(Protocol):
    """Somewhere events go. Only global rank 0 has sinks."""

    def write(self, event: Event) -> None:
        """Take one event; must not raise for kinds it has no use for."""
        ...
