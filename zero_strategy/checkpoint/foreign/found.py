"""What a reader of another program's checkpoint hands over."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_strategy.checkpoint import state
from zero_strategy.checkpoint.foreign.settle import canonical, settled
from zero_strategy.checkpoint.foreign.tensors import Built, FileTensor, late
from zero_strategy.checkpoint.foreign.unpickle import refuse
from zero_strategy.checkpoint.late import LateDict


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A checkpoint as a Trainer would hand it to the strategy, with tensors that are not read yet.

    Attributes:
        checkpoint: weights, optimizer states and the rest.
        notes: what the checkpoint did not hold, or was left out; a line each.
    """

    checkpoint: dict[str, Any]
    notes: tuple[str, ...]


def by_canonical_name(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state dict without what wrappers put into its names.

    Raises:
        RefusedError: two names become one, or an entry is no tensor.
    """
    named = {canonical(name): value for name, value in weights.items()}
    if len(named) != len(weights):
        refuse("has weights whose names differ by the names of wrappers alone")
    for name, value in named.items():
        if not state.is_extra_state(name) and not isinstance(value, FileTensor | Built):
            refuse(f"has {name!r:.60} among the weights, which is no tensor")
    return named


def module_state(weights: Mapping[str, Any], *, widen: bool = False) -> LateDict:
    """Return weights as they are saved from: read when their turn comes.

    Args:
        weights: by canonical name, tensors not read.
        widen: store 16-bit floating-point numbers as float32, which changes no value.
    """
    return LateDict(
        {
            name: settled(value, f"model.{name}")
            if state.is_extra_state(name)
            else late(value, dtype=_widened(value.dtype) if widen else None)
            for name, value in weights.items()
        }
    )


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def trainer_keys(optimizers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a Trainer looks for where no Trainer wrote a checkpoint: a run at its start.

    Args:
        optimizers: none leaves weights alone.
    """
    keys: dict[str, Any] = {
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
        "epoch": 0,
        "global_step": 0,
    }
    if optimizers:
        keys |= {"callbacks": {}, "optimizer_states": list(optimizers), "lr_schedulers": []}
    return keys
