"""What is written down while a system trains. No watch waits for the device before the end.

A system calls `begin` before each micro-batch and `saw` with its loss; the rest is the watch's.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zero_strategy.experiments.benchmarks.worker import resolve
from zero_strategy.experiments.benchmarks.workload import Workload


class Watch(Protocol):
    """Follows a run from micro-batch to micro-batch."""

    def begin(self, index: int) -> None:
        """Before the transfer or the forward of micro-batch `index`, counted from 0."""
        ...

    def saw(self, loss: Tensor) -> None:
        """The loss of the micro-batch just run forward; 0-dim, on the device."""
        ...

    def told(self, regime: str, text: str) -> None:
        """What a system says of how it trained in a regime."""

    def report(self) -> dict[str, Any]:
        """After the last micro-batch: what was seen, as plain data."""
        ...


def follow(
    *, system: str, watch: str, workload: dict[str, Any], options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train in this rank and return what the watch saw; a worker's entry.

    Args:
        system: "module:function" of `train(workload, watch)`.
        watch: "module:class" of the watch.
        workload: the job, as `Workload.to_json` gives it.
        options: keyword arguments of the watch.
    """
    job = Workload.from_json(workload)
    seen: Watch = resolve(watch)(job, **(options or {}))
    resolve(system)(job, seen)
    return seen.report()


def device_mark() -> Any:
    """Return a point in time: of the device's queue on a GPU, of this process on a CPU."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks: list[Any]) -> list[float]:
    """Return the time from each mark to the next. Cost: waits for the device."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 if on_gpu else b - a for a, b in itertools.pairwise(marks)]


@final
class StepTimes(Watch):
    """Time from the start of each optimizer step to the start of the next, and peak memory.

    On a GPU the times are the device's: events queued between the steps' kernels.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._on_gpu = torch.cuda.is_available()
        self._marks: list[Any] = []
        self._peak_bytes = 0

    @override
    def begin(self, index: int) -> None:
        if not self._workload.first_measured <= index <= self._workload.end_measured:
            return
        if self._on_gpu and index == self._workload.first_measured:
            torch.cuda.reset_peak_memory_stats()
        if self._on_gpu and index == self._workload.end_measured:
            self._peak_bytes = torch.cuda.max_memory_allocated()
        if index % self._workload.accumulate == 0:
            self._marks.append(device_mark())

    @override
    def saw(self, loss: Tensor) -> None:
        pass

    @override
    def report(self) -> dict[str, Any]:
        step_s = seconds_between(self._marks)
        assert len(step_s) == self._workload.steps, "one mark per measured step, and one after them"
        return {"step_s": step_s, "peak_bytes": self._peak_bytes}


@final
class Losses(Watch):
    """The loss of every micro-batch, averaged over the ranks."""

    def __init__(self, workload: Workload) -> None:
        self._losses: list[Tensor] = []

    @override
    def begin(self, index: int) -> None:
        pass

    @override
    def saw(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().float().clone())

    @override
    def report(self) -> dict[str, Any]:
        losses = torch.stack(self._losses)
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        return {"losses": losses.tolist()}
