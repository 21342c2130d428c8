"""What a GPU did in some steps: how long it computed, and what was going on while it did not.

Read from a trace of torch's profiler: a moment in which a kernel of the model runs is compute.
Any other is exposed, and belongs to the first that is under way of: copies to the GPU, copies to
the host, kernels of the optimizer, nothing, when the host has not queued anything that could run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Span = tuple[float, float]

COMPUTE = "compute"
EXPOSED = ("copies to the GPU", "copies to the host", "optimizer kernels", "nothing")
# Of names of kernels: our own, and torch's fused and foreach optimizers.
_OPTIMIZER = ("adam", "multi_tensor", "lpnorm")


def summarize_file(path: Path, num_steps: int) -> dict[str, float]:
    """Return milliseconds per step of each category, from a trace in Chrome's format.

    Args:
        path: what `torch.profiler.profile.export_chrome_trace` wrote.
        num_steps: optimizer steps in it.
    """
    return summarize(json.loads(path.read_text())["traceEvents"], num_steps)


def summarize(events: Iterable[Mapping[str, Any]], num_steps: int) -> dict[str, float]:
    """As `summarize_file`, of the events themselves; empty where no kernel ran."""
    spans: dict[str, list[Span]] = {name: [] for name in (COMPUTE, *EXPOSED[:-1])}
    for event in events:
        category = _category(event)
        if category:
            spans[category].append((event["ts"], event["ts"] + event["dur"]))
    if not spans[COMPUTE]:
        return {}
    begin = min(start for of_kind in spans.values() for start, _ in of_kind)
    end = max(stop for of_kind in spans.values() for _, stop in of_kind)
    left = [(begin, end)]
    found: dict[str, float] = {}
    for name, of_kind in spans.items():
        before = _length(left)
        left = _without(left, _union(of_kind))
        found[name] = before - _length(left)
    found[EXPOSED[-1]] = _length(left)
    return {name: micros / 1e3 / num_steps for name, micros in found.items()}


def _category(event: Mapping[str, Any]) -> str:
    name, kind = str(event.get("name", "")), event.get("cat")
    if event.get("ph") != "X":
        return ""
    if kind == "gpu_memcpy":
        return EXPOSED[0] if "HtoD" in name else EXPOSED[1] if "DtoH" in name else COMPUTE
    if kind == "kernel":
        steps = any(word in name.lower() for word in _OPTIMIZER)
        return EXPOSED[2] if steps else COMPUTE
    return COMPUTE if kind == "gpu_memset" else ""


def _union(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _without(spans: list[Span], taken: list[Span]) -> list[Span]:
    """Return what of `spans` lies in none of `taken`; both sorted, each without overlaps."""
    left: list[Span] = []
    index = 0
    for start, stop in spans:
        while index < len(taken) and taken[index][1] <= start:
            index += 1
        at, position = index, start
        while at < len(taken) and taken[at][0] < stop:
            if taken[at][0] > position:
                left.append((position, taken[at][0]))
            position = max(position, taken[at][1])
            at += 1
        if position < stop:
            left.append((position, stop))
    return left


def _length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)
