"""Whether the disk holds the next checkpoint, asked before it is needed.

A checkpoint is written beside the one that it replaces, so it needs its whole size while that one
is still there. What a quota or another program leaves less is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zero_strategy.telemetry import text

_MOMENTS = 2


class NoRoomError(ValueError):
    """The disk does not hold a checkpoint that is about to be written, or will be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSize:
    """Bytes that a checkpoint holds at least, over all ranks."""

    weights_bytes: int
    moments_bytes: int

    @property
    def num_bytes(self) -> int:
        """Both together."""
        return self.weights_bytes + self.moments_bytes


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of whole tensors, however they are sharded."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def planned_size(
    weights: Iterable[Tensor], optimizers: Iterable[Optimizer], *, trained_itemsize: int | None
) -> CheckpointSize:
    """Return what a run's checkpoints will hold, before there is any optimizer state.

    Args:
        weights: parameters and buffers that are stored.
        optimizers: of the run; only Adam's and AdamW's moments are counted, whose number is known.
        trained_itemsize: bytes of a trained weight and of each moment where they are not kept in
            the weight's own dtype, as under offload.
    """

    def itemsize(tensor: Tensor) -> int:
        return trained_itemsize or tensor.dtype.itemsize

    unique = {id(tensor): tensor for tensor in weights}.values()
    trained = {
        id(parameter): parameter
        for optimizer in optimizers
        if isinstance(optimizer, Adam | AdamW)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }.values()
    return CheckpointSize(
        weights_bytes=sum(
            t.numel() * (itemsize(t) if t.requires_grad else t.dtype.itemsize) for t in unique
        ),
        moments_bytes=sum(_MOMENTS * t.numel() * itemsize(t) for t in trained),
    )


def free_bytes(path: Path, *, statvfs: Callable[[Path], Any] = os.statvfs) -> int:
    """Return what this user may still write where a path lies or will lie."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    disk = statvfs(there)
    return disk.f_bavail * disk.f_frsize


def check_save(path: Path, num_bytes: int, *, statvfs: Callable[[Path], Any] = os.statvfs) -> None:
    """Refuse a save that the disk does not hold, before anything is written.

    Args:
        path: of the checkpoint.
        num_bytes: of its tensors.
        statvfs: as `os.statvfs`.
    Raises: NoRoomError: with what is needed and what there is.
    """
    free = free_bytes(path, statvfs=statvfs)
    if num_bytes > free:
        raise NoRoomError(
            f"{path}: needs {text.gib(num_bytes)}, must fit into the {text.gib(free)} that are "
            "free on its disk. Free some, or save to another one. What was there before is whole."
        )


def check_run(
    path: Path,
    size: CheckpointSize,
    *,
    another_is_there: bool,
    statvfs: Callable[[Path], Any] = os.statvfs,
) -> str:
    """Refuse a run whose disk does not hold its next checkpoint, before the first step.

    Args:
        path: a checkpoint's, or of the folder in which they will lie.
        size: of a checkpoint.
        another_is_there: whether an earlier one lies there already.
        statvfs: as `os.statvfs`.

    Returns: a warning where the next one fits, but none beside it; or nothing.
    Raises: NoRoomError: with the sum.
    """
    free, needed = free_bytes(path, statvfs=statvfs), size.num_bytes
    parts = f"weights {text.gib(size.weights_bytes)} + moments {text.gib(size.moments_bytes)}"
    beside = " beside the one that is there" if another_is_there else ""
    if needed > free:
        raise NoRoomError(
            f"{path}: the next checkpoint needs {text.gib(needed)}{beside} ({parts}), must fit "
            f"into the {text.gib(free)} that are free on its disk, {text.gib(needed - free)} are "
            "missing. Free some, or save to another disk."
        )
    if not another_is_there and 2 * needed > free:
        return (
            f"{path}: the disk has room for one checkpoint of {text.gib(needed)} ({parts}), not "
            f"for a second one: {text.gib(free)} are free. The second save is written while the "
            "first one is still there, and will be refused. Free some, or save to another disk."
        )
    return ""
