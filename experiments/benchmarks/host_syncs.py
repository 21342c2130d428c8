"""How often the host waits for the GPU in a micro-batch of a warm run, seen by torch's profiler.

A wait forbids queueing ahead, so every gap of the host becomes a gap of the GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from zero_strategy.experiments.benchmarks.launch import Launcher, target_of
from zero_strategy.experiments.benchmarks.result import Findings, Row
from zero_strategy.experiments.benchmarks.systems.names import SYSTEMS
from zero_strategy.experiments.benchmarks.train_step import TINY
from zero_strategy.experiments.benchmarks.watch import Watch, follow
from zero_strategy.experiments.benchmarks.workload import Workload
from zero_strategy.experiments.config import load_config

MARK = "zero_strategy: micro-batch"
# Metric -> the profiler's names of what counts for it. A scalar of the GPU that is read is a sync
# as well; the reads beside that are of host tensors.
HOST_CALLS = {
    "host syncs": (
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
    ),
    "scalar reads": ("aten::_local_scalar_dense",),
    "driver allocations": ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"),
    "kernel launches": (
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
    ),
}
# A copy to memory that is not pinned waits, whatever the caller asked for.
BLOCKING_COPIES = "blocking copies"
PAGEABLE_COPY = "Memcpy DtoH (Device -> Pageable)"
METRICS = (*HOST_CALLS, BLOCKING_COPIES)


@final
class HostSyncs(Watch):
    """Profiles the measured micro-batches."""

    def __init__(self, workload: Workload) -> None:
        self._first, self._end = workload.first_measured, workload.end_measured
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, acc_events=True)

    @override
    def begin(self, index: int) -> None:
        if index == self._first:
            self._profiler.start()
        if self._first <= index <= self._end:
            with record_function(MARK):
                pass
        if index == self._end:
            self._profiler.stop()

    @override
    def saw(self, loss: Tensor) -> None:
        pass

    @override
    def report(self) -> dict[str, Any]:
        counts, callers = count_waits(self._profiler.events() or [])
        blind = torch.cuda.is_available() and not counts["kernel launches"]
        assert not blind, "a profile without a kernel launch proves no absence of waits"
        per_batch = {m: counts[m] / (self._end - self._first) for m in METRICS}
        return {"per_batch": per_batch, "callers": {m: dict(callers[m]) for m in METRICS}}


def count_waits(events: Iterable[FunctionEvent]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Count between the first and the last mark.

    The profiler waits for the device itself when it starts and stops; the marks leave that out.

    Args:
        events: of the profiler.

    Returns:
        Count by metric, and by metric the operations that the calls came from.
    """
    events = list(events)
    marks = [e.time_range for e in events if e.name == MARK and e.device_type == DeviceType.CPU]
    first, last = min(m.end for m in marks), max(m.start for m in marks)
    counts: Counter[str] = Counter()
    callers: dict[str, Counter[str]] = {metric: Counter() for metric in METRICS}
    metric_of = {name: metric for metric, names in HOST_CALLS.items() for name in names}
    for event in events:
        metric = metric_of.get(event.name)
        inside = first <= event.time_range.start <= last
        if event.name == PAGEABLE_COPY:
            # On the GPU's own time, which runs behind the marks.
            metric, inside = BLOCKING_COPIES, True
        if metric and inside:
            counts[metric] += 1
            parent = event.cpu_parent.name if event.cpu_parent else "no operation"
            if metric != "kernel launches":
                callers[metric][f"{event.name} in {parent}"] += 1
    return counts, callers


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HostSyncCase:
    """Waits per micro-batch of several systems, while accumulating gradients.

    Attributes:
        config: packaged configuration whose model is trained.
        systems: names in `SYSTEMS`.
        batch_size: rows per rank and micro-batch.
        seq_len: predicted tokens per row.
        accumulate: micro-batches per optimizer step.
        warmup_steps: optimizer steps before the profile.
        steps: optimizer steps in the profile.
        timeout_s: for one process, its start included.
        tiny: train a tiny model instead of the configuration's.
    """

    config: str
    systems: tuple[str, ...]
    batch_size: int
    seq_len: int
    accumulate: int
    warmup_steps: int
    steps: int
    timeout_s: int
    tiny: bool = False

    def quick(self) -> Self:
        """Return the same with a tiny model and few steps."""
        return dataclasses.replace(
            self, batch_size=2, seq_len=16, warmup_steps=1, steps=2, tiny=True
        )

    def measure(self, launcher: Launcher) -> Findings:
        """Profile each system. A wait of ours is a failure."""
        workload = Workload(
            model=TINY if self.tiny else load_config(self.config).model,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            accumulate=self.accumulate,
            warmup_steps=self.warmup_steps,
            steps=self.steps,
        )
        findings = Findings()
        for name in self.systems:
            report = launcher.run(
                follow,
                timeout_s=self.timeout_s,
                system=SYSTEMS[name],
                watch=target_of(HostSyncs),
                workload=workload.to_json(),
            )
            if report.reason:
                findings.rows.append(Row.failed(name, "host syncs", "1/batch", report.reason))
            else:
                findings.rows += [_row(name, m, report.value, workload) for m in METRICS]
        ours = self.systems[0]
        for metric in ("host syncs", BLOCKING_COPIES):
            if findings.median(ours, metric) != 0:
                findings.broken.append(f"{ours}: {metric} must be counted, and be 0")
        return findings


def _row(name: str, metric: str, value: dict[str, Any], workload: Workload) -> Row:
    callers = ", ".join(f"{n} x {who}" for who, n in sorted(value["callers"][metric].items()))
    num_batches = workload.steps * workload.accumulate
    note = f"in {num_batches} warm micro-batches, {workload.accumulate} per optimizer step"
    note = f"{note}: {callers}" if callers else note
    return Row.of(name, metric, "1/batch", [value["per_batch"][metric]], note[:400])
