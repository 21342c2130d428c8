"""What one rank is asked to train, as numbers: all that planning knows of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero_strategy.config import GradDtype, Lanes, Moments, ZeroStage, grad_itemsize
from zero_strategy.offload.layout import Layout, longest_chunk
from zero_strategy.planning.sizes import UnitSize

NUM_WIRES = 8
"""Chunks of weights that can be on their way to the GPU at once."""
STREAM_LEAVES = 16
"""Waiting chunks that are the cores': the GPU helps beyond, since its help costs it time."""
STREAM_SLOTS = 2
"""Chunks of streamed state that can be on the GPU at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes that one micro-batch keeps on the GPU."""

    kept_bytes: int = 0
    """Grows over the forward and shrinks over the backward, unit by unit."""
    unit_bytes: int = 0
    """Of the unit whose backward runs, with its temporaries, beside what is kept."""
    loss_bytes: int = 0
    """Between the last unit's forward and its backward: logits, their gradient, the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's part of a run."""

    units: Mapping[str, UnitSize]
    """In forward order, the root first; the same on every rank."""
    zero_stage: ZeroStage
    world_size: int
    num_local_ranks: int
    """Ranks of one host, which share its memory and cores."""
    stored_itemsize: int = 4
    """Of weights, gradients and moments where nothing is offloaded; of frozen weights."""
    compute_itemsize: int = 2
    """Of gathered weights and their gradients."""
    reduce_itemsize: int = 4
    """Of gradients while they are reduced."""
    grad_dtype: GradDtype
    """Of gradients on their way to the host, as in `OffloadConfig`."""
    lanes: Lanes
    """What steps the state in host memory, as in `OffloadConfig`."""
    moments: Moments
    """Of offloaded parameters, as in `OffloadConfig`."""
    chunk_elements: int
    """As in `OffloadConfig`."""
    micro_batches: int = 1
    """Per optimizer step."""
    tokens_per_step: int = 0
    """Of this rank."""
    flops_per_step: float = 0.0
    """Executed by this rank, what is computed again included."""
    forward_share: float = 1 / 4
    """Of the operations that are the first forward: a quarter with recompute, a third without."""
    activations: Activations = Activations()
    clips: bool = True
    """Whether gradients are clipped by their global norm."""

    @property
    def sums(self) -> bool:
        """Whether a step's gradient is a sum, which bf16 would round."""
        return self.world_size > 1 or self.micro_batches > 1

    @property
    def grad_itemsize(self) -> int:
        """Bytes of an offloaded parameter's gradient on its way to the host."""
        return grad_itemsize(self.grad_dtype, sums=self.sums)

    @property
    def moment_itemsize(self) -> int:
        """Bytes of each of an offloaded parameter's two moments."""
        return 2 if self.moments == "bf16" else 4

    @property
    def state_bytes(self) -> int:
        """Host bytes of an offloaded parameter: both halves of its weight, two moments."""
        return 4 + 2 * self.moment_itemsize

    @property
    def resident_bytes(self) -> int:
        """GPU bytes of a parameter that stays, beside the weight: lower half, two moments."""
        return 2 + 2 * self.moment_itemsize

    @property
    def trained(self) -> int:
        """Trained parameters of this rank's shards."""
        return sum(size.trained for size in self.units.values())


def host_units(units: Mapping[str, UnitSize], share: float) -> tuple[str, ...]:
    """Choose the units whose optimizer state lies in host memory.

    They are the last in forward order: their gradients come first and their weights are needed
    last, which leaves most time for both.

    Args:
        units: unit -> size, in forward order.
        share: of the trained parameters, in [0, 1]; the fewest units that hold as many.

    Returns: names, in forward order.
    """
    wanted = share * sum(size.trained for size in units.values())
    chosen: list[str] = []
    held = 0
    for name, size in reversed(list(units.items())):
        # Half a parameter of tolerance: a share that came from a quotient must give its units back.
        if held >= wanted - 0.5:
            break
        held += size.trained
        chosen.append(name)
    return tuple(reversed(chosen))


def shares(units: Mapping[str, UnitSize]) -> list[float]:
    """Return every share at which another unit goes to the host, from 0 to 1."""
    total = max(1, sum(size.trained for size in units.values()))
    held, found = 0, [0.0]
    for size in reversed(list(units.values())):
        held += size.trained
        if size.trained:
            found.append(held / total)
    return found


def host_layout(job: Job, share: float) -> Layout:
    """Return the chunks of the state in host memory."""
    chosen = {name: {name: job.units[name].trained} for name in host_units(job.units, share)}
    return Layout.of(chosen, job.chunk_elements)


def host_slot_length(job: Job, share: float) -> int:
    """Return the elements of the longest chunk in host memory, without making the chunks."""
    units = host_units(job.units, share)
    return max(
        (longest_chunk(job.units[name].trained, job.chunk_elements) for name in units), default=0
    )


def num_spare_slots(num_chunks: int) -> int:
    """Return how many gradients the host has room for while every chunk holds one to commit."""
    return max(2, min(8, num_chunks // 5))


def num_held(num_chunks: int) -> int:
    """Return how many gradients may wait on the device for room on the host.

    They come when the backward lets activations go, which are more, and so add nothing to the peak.
    """
    return num_chunks // 5
