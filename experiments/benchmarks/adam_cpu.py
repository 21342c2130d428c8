"""One optimizer step on the host's cores beside the rivals', at equal wire format.

Offload takes a gradient from host memory and leaves new weights there. Here both are bf16 for every
system, so what differs is how many bytes a step moves and how well threads share them. Parity with
torch's fused AdamW comes first; each system is built, checked and timed in processes of its own.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, final

import torch

from zero_strategy.experiments.benchmarks.adam_systems import (
    DEEPSPEED,
    OURS,
    PARITY_PARAMS,
    PARITY_STEPS,
    TORCH,
    build,
    compare,
    metric_of,
    time_passes,
)
from zero_strategy.experiments.benchmarks.launch import Launcher
from zero_strategy.experiments.benchmarks.result import Findings, Row, ratio

THREAD_COUNTS = (1, 2, 4, 8, 16)
# Three steps of the same operations in another order, in fp32.
PARITY_TOLERANCE = 2e-6
WIRE = "bf16 wire, 2 bytes of gradient in and 2 of weights out per parameter"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamCpu:
    """Steps over one flat parameter.

    Attributes:
        systems: names in `adam_systems.SYSTEMS`; the first is ours, and ratios are taken to the
            others.
        num_params: parameters; each takes up to 20 bytes of a process.
        repeats: measured steps per number of threads, after one that is not.
        timeout_s: for one process, its start included.
        build_timeout_s: for the compilation of a system that has to be compiled.
    """

    systems: tuple[str, ...]
    num_params: int
    repeats: int
    timeout_s: int
    build_timeout_s: int

    def quick(self) -> Self:
        """Return the same with few parameters."""
        return dataclasses.replace(self, num_params=1 << 20)

    def measure(self, launcher: Launcher) -> Findings:
        """Build, check and time each system.

        Raises:
            ValueError: more than one rank; the cores are those of one process.
        """
        if launcher.num_ranks != 1:
            raise ValueError(
                f"devices = {launcher.num_ranks}: must be 1, because one process has all cores. "
                "Add devices=1."
            )
        threads = thread_counts(len(os.sched_getaffinity(0)))
        findings = Findings()
        with tempfile.TemporaryDirectory() as build_folder:
            for name in self.systems:
                self._measure_system(launcher, name, threads, build_folder, findings)
        ours, metric = self.systems[0], metric_of("speed", threads[-1])
        if findings.median(ours, metric) is None:
            findings.broken.append(f"{ours}: no {metric}")
        self._compare(findings, threads[-1])
        return findings

    def _measure_system(
        self,
        launcher: Launcher,
        name: str,
        threads: list[int],
        build_folder: str,
        findings: Findings,
    ) -> None:
        """Add the rows of a system, up to the first process that fails."""

        def call(
            function: Callable[..., Any], metric: str, unit: str, timeout_s: int, **arguments: Any
        ) -> Any:
            arguments |= {"system": name, "build_folder": build_folder}
            report = launcher.run(function, timeout_s=timeout_s, **arguments)
            outcome = f"failed: {report.reason}" if report.reason else "done"
            print(f"{metric} of {name}: {outcome}", file=sys.stderr, flush=True)
            if report.reason:
                findings.rows.append(Row.failed(name, metric, unit, report.reason))
            return report.value

        if name == DEEPSPEED:
            build_s = call(build, "build", "s", self.build_timeout_s)
            if build_s is None:
                return
            note = "first use without a cache: ninja compiles its C++ for this machine"
            findings.rows.append(Row.of(name, "build", "s", [build_s], note))
        if name != TORCH:
            metric, unit = "weight difference", "relative"
            parity = call(compare, metric, unit, self.timeout_s, threads=threads[-1])
            if parity is None:
                return
            findings.rows.append(_parity_row(name, metric, unit, parity))
            if problem := parity_problem(parity, bitwise=name == OURS and has_vectors()):
                findings.broken.append(f"{name}: {problem}, not timed")
                return
        timed = call(
            time_passes,
            metric_of("speed", threads[-1]),
            "Gparam/s",
            self.timeout_s,
            num_params=self.num_params,
            repeats=self.repeats,
            threads=threads,
        )
        findings.rows += [self._row(name, one) for one in timed or ()]

    def _row(self, name: str, timed: dict[str, Any]) -> Row:
        speeds = [self.num_params / s / 1e9 for s in timed["seconds"]]
        note = f"{self.num_params} parameters; {WIRE}; {timed['about']}"
        return Row.of(name, timed["metric"], "Gparam/s", speeds, note)

    def _compare(self, findings: Findings, most_threads: int) -> None:
        ours, *rivals = self.systems
        for rival in rivals:
            for threads, suffix in ((most_threads, ""), (1, " 1 thread")):
                metric = metric_of("speed", threads)
                x = ratio(findings.median(ours, metric), findings.median(rival, metric))
                if x is not None:
                    findings.ratios[f"vs {rival}{suffix}"] = x


def thread_counts(num_cores: int) -> list[int]:
    """Return the numbers of threads that a machine is measured with.

    Args:
        num_cores: that this process may run on.
    """
    return [count for count in THREAD_COUNTS if count <= num_cores]


def has_vectors() -> bool:
    """Whether torch's fused kernel runs on vectors here; elsewhere it fuses no products."""
    return torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}


def parity_problem(parity: dict[str, Any], *, bitwise: bool) -> str:
    """Return what differs from torch's fused AdamW by more than it may, or nothing.

    Args:
        parity: what `adam_systems.compare` returns.
        bitwise: weights and moments must have the same bits.
    """
    gaps: list[float] = parity["gaps"]
    if not all(gap <= PARITY_TOLERANCE for gap in gaps):  # false for NaN too
        return f"weights differ by {max(gaps):.3g} of their size"
    if bitwise and not parity["same_bits"]:
        return "weights and moments must have the bits of torch's"
    return ""


def _parity_row(name: str, metric: str, unit: str, parity: dict[str, Any]) -> Row:
    gaps: list[float] = parity["gaps"]
    if not all(map(math.isfinite, gaps)):
        return Row.failed(name, metric, unit, "weights are not finite")
    bits = "same bits of weights and moments" if parity["same_bits"] else "bits differ"
    note = (
        f"largest of {PARITY_PARAMS} weights after each of {PARITY_STEPS} steps, against torch "
        f"fused; {bits}; tolerance {PARITY_TOLERANCE:g}"
    )
    return Row.of(name, metric, unit, gaps, note)
