"""Sizes of units, from shapes alone: a module on the meta device is enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from zero_strategy.blocks import Units, unit_parameters

ROOT = ""
"""Name of the unit that holds what no other unit holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSize:
    """Parameters of a unit that the fullest rank holds."""

    trained: int
    frozen: int = 0


def unit_sizes(module: nn.Module, units: Units, world_size: int) -> dict[str, UnitSize]:
    """Return each unit's size on rank 0, whose shards are the largest, so every rank agrees.

    Args:
        module: built or on meta, not yet sharded.
        units: what becomes a unit.
        world_size: ranks over which each parameter is cut along its first dim.

    Returns:
        Unit -> size, the root first, then in forward order.
    """
    counts = {name: [0, 0] for name in (ROOT, *units.modules)}
    for unit, _, parameter in unit_parameters(module, units):
        rows, *others = parameter.shape or (1,)
        counts[unit][not parameter.requires_grad] += -(-rows // world_size) * math.prod(others)
    return {name: UnitSize(trained=t, frozen=f) for name, (t, f) in counts.items()}
