"""What the recorder is given: its sources, and where an earlier start left off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_strategy.offload.figures import OffloadFigures


@dataclass(kw_only=True, slots=True)
class Progress:
    """What a resumed run goes on counting from."""

    tokens: int = 0
    """Tokens trained on, over all ranks."""
    elapsed_s: float = 0.0
    """Wall time of training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probes:
    """Where the figures come from that the recorder cannot see itself. Read on log steps only."""

    gather: Callable[[Sequence[float]], list[list[float]]]
    """Brings a row from every rank to all; a collective."""
    exposed_comm_ms: Callable[[], float | None]
    """Communication waited for since the last call."""
    offload: Callable[[], OffloadFigures | None]
    """What offload did since the last call; None without it, on all ranks alike."""
    grad_norm: Callable[[], float | None]
    skipped_steps: Callable[[], int | None]
    memory_bytes: Callable[[], int]
    flops_per_token: float | None
    peak_flops: float | None
    """Peak FLOP/s of one device."""
