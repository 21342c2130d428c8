"""What is written down while a system trains with its state off the GPU, in two regimes.

First no step is clipped, then every one is; some steps after each are profiled, not timed.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from zero_strategy.experiments.benchmarks.trace import summarize_file
from zero_strategy.experiments.benchmarks.watch import Watch, device_mark, seconds_between
from zero_strategy.experiments.benchmarks.workload import Workload


@final
class OffloadTimes(Watch):
    """Time of each step in both regimes, memory of both tiers, and what the GPU waited for."""

    def __init__(self, workload: Workload) -> None:
        self._regimes = {
            "": (workload.first_measured, workload.end_measured),
            "clipped ": (workload.first_clipped, workload.end_clipped),
        }
        if not workload.clipped_steps:
            del self._regimes["clipped "]
        self._accumulate = workload.accumulate
        self._traced = workload.traced_steps
        self._marks: dict[str, list[Any]] = {name: [] for name in self._regimes}
        self._peak_bytes = 0
        self._profiler: profile | None = None
        self._traces: dict[str, dict[str, float]] = {}
        self._told: dict[str, str] = {}
        self._host_before = _resident_bytes("VmRSS")
        self._host_peak = 0
        self._born_s = time.perf_counter()
        self._start_s = 0.0

    @override
    def begin(self, index: int) -> None:
        if index == 0:
            self._start_s = time.perf_counter() - self._born_s
        on_gpu = torch.cuda.is_available()
        for name, (first, end) in self._regimes.items():
            if on_gpu and index == first and not name:
                torch.cuda.reset_peak_memory_stats()
            if first <= index <= end and (index - first) % self._accumulate == 0:
                self._marks[name].append(device_mark())
            if on_gpu and index == end:
                self._peak_bytes = torch.cuda.max_memory_allocated()
            if on_gpu and self._traced and index == end:
                self._start_trace()
            if self._profiler and index == end + self._traced * self._accumulate:
                self._traces[name] = self._end_trace()
        # Before the process ends, in which some systems map their state once more.
        self._host_peak = _resident_bytes("VmHWM")

    @override
    def saw(self, loss: Tensor) -> None:
        pass

    @override
    def told(self, regime: str, text: str) -> None:
        self._told[regime] = text

    @override
    def report(self) -> dict[str, Any]:
        return {
            "step_s": {name: seconds_between(marks) for name, marks in self._marks.items()},
            "peak_bytes": self._peak_bytes,
            "host_bytes": self._host_peak - self._host_before,
            "host_process_bytes": self._host_peak,
            "start_s": self._start_s,
            "traces": self._traces,
            "told": self._told,
        }

    def _start_trace(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()

    def _end_trace(self) -> dict[str, float]:
        assert self._profiler is not None, "started at the regime's end"
        torch.cuda.synchronize()
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            return summarize_file(path, self._traced)


def _resident_bytes(key: str) -> int:
    """Return this process's resident memory now ("VmRSS") or at its highest ("VmHWM")."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{key}:"))
