"""Figures of offload, from one rank's reading to a log step's fields."""

import math
from collections.abc import Sequence
from typing import TypedDict

from zero_strategy.offload.figures import OffloadFigures
from zero_strategy.planning.machines import MACHINES


class OffloadFields(TypedDict, total=False):
    """The fields of `Step` that offload fills."""

    host_share: float
    host_state_bytes: int
    offload_exposed_ms: float | None
    offload_slot_wait_ms: float
    offload_down_bytes: float
    offload_up_bytes: float
    offload_waiting: int
    offload_redone: float
    offload_cpu_passes: float
    offload_stream_passes: float


def offload_row(figures: OffloadFigures | None, num_steps: int) -> list[float]:
    """One rank's figures, for `offload_fields`; none without offload.

    Args:
        figures: the reading.
        num_steps: optimizer steps since the one before.
    """
    if figures is None:
        return []
    engine = figures.engine
    exposed_ms = math.nan if figures.exposed_ms is None else figures.exposed_ms
    sums = (
        exposed_ms,
        engine.slot_wait_ms,
        engine.down_bytes,
        engine.up_bytes,
        engine.num_redone,
        engine.num_passes("cpu"),
        engine.num_passes("stream"),
    )
    state = (figures.host_share, float(engine.state_bytes), float(engine.max_waiting))
    return [*state, *(total / num_steps for total in sums)]


def offload_fields(rows: Sequence[Sequence[float]]) -> OffloadFields:
    """Bring the ranks' rows together: means, but for what one rank alone can suffer from.

    Args:
        rows: of `offload_row`, by rank; all empty without offload.
    """
    if not rows[0]:
        return {}
    share, state_bytes, waiting, *sums = zip(*rows, strict=True)
    exposed_ms, slot_wait_ms, down, up, redone, cpu, stream = (sum(s) / len(rows) for s in sums)
    return {
        "host_share": sum(share) / len(rows),
        "host_state_bytes": int(max(state_bytes)),
        "offload_exposed_ms": None if math.isnan(exposed_ms) else exposed_ms,
        "offload_slot_wait_ms": slot_wait_ms,
        "offload_down_bytes": down,
        "offload_up_bytes": up,
        "offload_waiting": int(max(waiting)),
        "offload_redone": redone,
        "offload_cpu_passes": cpu,
        "offload_stream_passes": stream,
    }


def link_ceiling(device_name: str) -> float | None:
    """Bytes per second of one way between host and device, where such a device was measured.

    Args:
        device_name: as the driver gives it. Slices of a device have rates of their own.
    """
    machine = MACHINES.get(device_name.removeprefix("NVIDIA ").lower())
    return None if machine is None else min(machine.down_bytes_per_s, machine.up_bytes_per_s)
