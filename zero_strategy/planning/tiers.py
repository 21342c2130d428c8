"""Bytes that one rank holds on the GPU and in host memory, purpose by purpose.

Pure functions of sizes: every rank that asks with the same numbers gets the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zero_strategy.planning.job import (
    NUM_WIRES,
    STREAM_SLOTS,
    Job,
    host_layout,
    host_slot_length,
    host_units,
    num_spare_slots,
)
from zero_strategy.planning.sizes import ROOT
from zero_strategy.telemetry import text

_WEIGHT_BYTES, _SUM_BYTES = 2, 4

Moment = Literal[
    "the loss", "the first unit's backward", "the last unit's backward", "the root's gradients"
]
"""When GPU memory may be fullest: on the way, activations shrink and gradients grow."""
_MOMENTS: tuple[Moment, ...] = (
    "the loss",
    "the first unit's backward",
    "the last unit's backward",
    "the root's gradients",
)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that one rank holds for one purpose."""

    purpose: str
    num_bytes: int
    reason: str
    """The product that gives them."""


def total_bytes(parts: Sequence[Part]) -> int:
    """Return the sum of parts."""
    return sum(part.num_bytes for part in parts)


# Host.


def host_parts(job: Job, share: float | None) -> tuple[Part, ...]:
    """Return what one rank holds in host memory, as the engine allocates it up to whole pages."""
    if not share:
        return ()
    layout = host_layout(job, share)
    num_chunks, slot, itemsize = len(layout.chunks), layout.slot_length, job.grad_itemsize
    spare = num_spare_slots(num_chunks)
    return (
        Part(
            "weights and moments",
            job.state_bytes * layout.length,
            f"{job.state_bytes} B x {text.count(layout.length)} offloaded parameters",
        ),
        Part(
            "gradients",
            itemsize * (num_chunks + spare) * slot,
            f"{itemsize} B x {num_chunks} + {spare} spare slots of {text.count(slot)}",
        ),
        Part(
            "weights on their way",
            _WEIGHT_BYTES * NUM_WIRES * slot,
            f"{_WEIGHT_BYTES} B x {NUM_WIRES} chunks of {text.count(slot)}",
        ),
    )


# GPU.


def gpu_parts(job: Job, share: float | None) -> tuple[Moment, tuple[Part, ...]]:
    """Return when one rank's GPU memory is fullest, and what is held then."""
    by_moment = {moment: _held(job, share, moment) for moment in _MOMENTS}
    peak_at = max(_MOMENTS, key=lambda moment: total_bytes(by_moment[moment]))
    return peak_at, by_moment[peak_at]


def _held(job: Job, share: float | None, moment: Moment) -> tuple[Part, ...]:
    state = _plain_state(job) if share is None else _split_state(job, share)
    parts = [*state, _gathered(job, moment), *_gradients(job, share, moment)]
    parts += _activations(job, moment)
    return tuple(part for part in parts if part.num_bytes)


def _activations(job: Job, moment: Moment) -> list[Part]:
    held = job.activations
    kept = Part("activations", held.kept_bytes, "kept for backward by all units")
    match moment:
        case "the loss":
            return [kept, Part("loss", held.loss_bytes, "logits, their gradient, a chunk in fp32")]
        case "the first unit's backward":
            return [kept, Part("unit in backward", held.unit_bytes, "its inner activations")]
        case "the last unit's backward":
            count = max(1, len(job.units) - 1)
            last = held.unit_bytes + held.kept_bytes // count
            return [Part("unit in backward", last, "its activations")]
        case "the root's gradients":
            return []


def _plain_state(job: Job) -> list[Part]:
    itemsize, trained = job.stored_itemsize, job.trained
    frozen = sum(size.frozen for size in job.units.values())
    return [
        Part("weights", itemsize * (trained + frozen), _of_rank(itemsize, trained + frozen)),
        Part("moments", 2 * itemsize * trained, _of_rank(2 * itemsize, trained)),
    ]


def _split_state(job: Job, share: float) -> list[Part]:
    offloaded = _offloaded(job, share)
    resident = job.trained - offloaded
    frozen = sum(size.frozen for size in job.units.values())
    parts = [
        Part("weights", _WEIGHT_BYTES * job.trained, _of_rank(_WEIGHT_BYTES, job.trained)),
        Part("frozen weights", job.stored_itemsize * frozen, _of_rank(job.stored_itemsize, frozen)),
        Part(
            "state that stays",
            job.resident_bytes * resident,
            f"{job.resident_bytes} B x {text.count(resident)} parameters: lower halves, moments",
        ),
    ]
    if offloaded and job.lanes != "cpu":
        slot = host_slot_length(job, share)
        # The state, two gradients and the weights of a preview.
        each = job.state_bytes + 2 * job.grad_itemsize + _WEIGHT_BYTES
        reason = f"{each} B x {STREAM_SLOTS} chunks of {text.count(slot)}"
        parts.append(Part("streamed state", each * STREAM_SLOTS * slot, reason))
    return parts


def _offloaded(job: Job, share: float) -> int:
    return sum(job.units[name].trained for name in host_units(job.units, share))


def _gathered(job: Job, moment: Moment) -> Part:
    """The root, the units in use, and below stage 3 those that were not let go yet."""
    wholes = {name: _whole(job, size.trained + size.frozen) for name, size in job.units.items()}
    root = wholes.pop(ROOT, 0)
    early = moment in ("the loss", "the first unit's backward")
    if job.zero_stage < 3 and (early or job.micro_batches > 1):
        count, which = root + sum(wholes.values()), "root and all units"
    elif moment == "the root's gradients":
        count, which = root, "root"
    else:
        count, which = root + sum(sorted(wholes.values())[-2:]), "root and two units"
    itemsize = job.compute_itemsize
    reason = f"{itemsize} B x {text.count(count)} parameters: {which}"
    return Part("gathered weights", itemsize * count, reason)


def _whole(job: Job, count: int) -> int:
    """Parameters of all ranks, where this one has `count`."""
    return count * job.world_size


def _gradients(job: Job, share: float | None, moment: Moment) -> list[Part]:
    """Gradients kept until the step, sums of micro-batches, and what is on its way."""
    offloaded = 0 if share is None else _offloaded(job, share)
    resident = job.trained - offloaded
    summed = job.micro_batches > 1
    parts = []
    whole = summed and job.zero_stage == 1
    if whole:
        # Reduced once, at the last micro-batch, where they give way to the shards.
        count = _whole(job, job.trained)
        reason = f"{_SUM_BYTES} B x {text.count(count)} whole gradients"
        parts.append(Part("sums", _SUM_BYTES * count, reason))
    elif summed and offloaded:
        parts.append(Part("sums", _SUM_BYTES * offloaded, _of_rank(_SUM_BYTES, offloaded)))
    early = moment in ("the loss", "the first unit's backward")
    if resident and not whole and (summed or not early):
        itemsize = job.stored_itemsize if share is None else job.grad_itemsize
        # The root's come last, and the unit's are among those on their way.
        absent = 0 if summed or moment == "the root's gradients" else _largest(job) + _root(job)
        count = max(0, resident - absent)
        reason = f"{itemsize} B x {text.count(count)} parameters, until the step"
        parts.append(Part("gradients", itemsize * count, reason))
    if moment != "the loss":
        parts += _on_their_way(job, share, moment)
    return parts


def _on_their_way(job: Job, share: float | None, moment: Moment) -> list[Part]:
    """A unit's gradients and the copy that is reduced; the root's, which wait for the end."""
    at_root = moment == "the root's gradients"
    count = _whole(job, _root(job) if at_root else _largest(job))
    itemsize = job.compute_itemsize + job.reduce_itemsize
    reason = f"{itemsize} B x {text.count(count)} parameters of a unit"
    parts = [Part("gradients being reduced", itemsize * count, reason)]
    if not at_root:
        root = _whole(job, _root(job))
        reason = f"{job.compute_itemsize} B x {text.count(root)} parameters"
        parts.append(Part("gradients of the root", job.compute_itemsize * root, reason))
    if _unit_at(job, moment) in host_units(job.units, share or 0.0):
        leaving = 2 * (_root(job) if at_root else _largest(job))
        reason = f"{job.reduce_itemsize} B x {text.count(leaving)} parameters of two units"
        parts.append(Part("gradients leaving", job.reduce_itemsize * leaving, reason))
    return parts


def _unit_at(job: Job, moment: Moment) -> str:
    """The unit whose gradients come at a moment: backward goes from the last to the root."""
    names = [name for name in job.units if name != ROOT]
    if moment == "the root's gradients" or not names:
        return ROOT
    return names[-1] if moment == "the first unit's backward" else names[0]


def _largest(job: Job) -> int:
    """Trained parameters of the largest unit but the root."""
    return max((size.trained for name, size in job.units.items() if name != ROOT), default=0)


def _root(job: Job) -> int:
    return job.units[ROOT].trained if ROOT in job.units else 0


def _of_rank(itemsize: int, count: int) -> str:
    return f"{itemsize} B x {text.count(count)} parameters of this rank"
