"""Time and memory of a step with optimizer state off the GPU, beside the rivals' own offload.

One process per system trains in two regimes: no step clipped, then every step clipped. Each system
shows first, on a small model, that it learns what the others learn.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from zero_strategy.experiments.benchmarks.launch import Launcher, target_of
from zero_strategy.experiments.benchmarks.offload_watch import OffloadTimes
from zero_strategy.experiments.benchmarks.result import Findings, Row, ratio
from zero_strategy.experiments.benchmarks.systems.names import SYSTEMS
from zero_strategy.experiments.benchmarks.trace import COMPUTE
from zero_strategy.experiments.benchmarks.train_step import TrainStep
from zero_strategy.experiments.benchmarks.watch import follow
from zero_strategy.experiments.benchmarks.workload import Workload
from zero_strategy.planning.hardware import peak_bf16_flops

GIB = 2**30
# So large that no step is clipped.
UNBOUND = 1e9
REGIMES = ("", "clipped ")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStep:
    """One model trained by several systems whose optimizer state lies off the GPU.

    Attributes:
        shape: the model and its batch; its systems, the first of which is ours.
        limits: systems that learn nothing, timed as what no system can exceed.
        kinds: ratio -> what the names of the systems begin with, whose fastest it compares ours to.
        settle_steps: between the regimes, not measured.
        clipped_steps: measured with every step clipped; 0 leaves this regime out.
        traced_steps: of each regime, profiled.
        rival_steps: measured of each regime of a system that is not ours, after one to warm up.
    """

    shape: TrainStep
    limits: tuple[str, ...] = ()
    kinds: Mapping[str, str]
    settle_steps: int
    clipped_steps: int
    traced_steps: int
    rival_steps: int

    def quick(self) -> Self:
        """Return the same with a tiny model and few steps."""
        return dataclasses.replace(
            self,
            shape=self.shape.quick(),
            settle_steps=1,
            clipped_steps=min(2, self.clipped_steps),
            rival_steps=1,
        )

    def measure(self, launcher: Launcher) -> Findings:
        """Check parity, then time what passed it."""
        findings = Findings()
        ours = self.shape.systems[0]
        for name in (*self.shape.check_parity(launcher, findings), *self.limits):
            workload = self._workload(name)
            report = launcher.run(
                follow,
                timeout_s=self.shape.timeout_s,
                system=SYSTEMS[name],
                watch=target_of(OffloadTimes),
                workload=workload.to_json(),
            )
            print(f"{name}: {report.reason or 'done'}", file=sys.stderr, flush=True)
            if report.reason:
                findings.rows.append(Row.failed(name, "step time", "s", report.reason))
            else:
                findings.rows += rows_of(name, report.value, workload, launcher)
        self.compare(findings)
        if findings.median(ours, "step time") is None:
            findings.broken.append(f"{ours}: no step time")
        return findings

    def _workload(self, name: str) -> Workload:
        is_ours = name.startswith("zero_strategy")
        few, settle = (None, self.settle_steps) if is_ours else (self.rival_steps, 1)
        steps = few or self.shape.steps
        return dataclasses.replace(
            self.shape.workload,
            max_norm=UNBOUND,
            warmup_steps=self.shape.warmup_steps if is_ours else 1,
            steps=steps,
            traced_steps=self.traced_steps,
            settle_steps=settle if self.clipped_steps else 0,
            clipped_steps=min(self.clipped_steps, few or self.clipped_steps),
        )

    def compare(self, findings: Findings) -> None:
        """Add the ratios of ours to the fastest system of each kind, in each regime."""
        ours = self.shape.systems[0]
        for name, prefix in self.kinds.items():
            for regime in REGIMES:
                metric = f"{regime}step time"
                times = [
                    time
                    for system in (*self.shape.systems, *self.limits)
                    if system.startswith(prefix)
                    and (time := findings.median(system, metric)) is not None
                ]
                x = ratio(min(times, default=None), findings.median(ours, metric))
                if x is not None:
                    findings.ratios[f"vs {name} {regime}".strip()] = x


def rows_of(
    name: str, report: Mapping[str, Any], workload: Workload, launcher: Launcher
) -> Iterator[Row]:
    """Yield a system's rows.

    Args:
        name: the system.
        report: of `OffloadTimes`.
        workload: what it trained.
        launcher: tells the machine.
    """
    tokens = workload.tokens_per_step * launcher.num_ranks
    peak_flops = peak_bf16_flops(launcher.machine()["device_name"])
    per_token = workload.flops_per_token()
    for regime, step_s in report["step_s"].items():
        bound = workload.clipped_max_norm if regime else workload.max_norm
        told = report["told"].get(regime)
        note = f"{len(step_s)} steps, max_norm {bound:g}; {tokens} tokens"
        note += f"; {told}" if told else ""
        yield Row.of(name, f"{regime}step time", "s", step_s, note)
        speeds = [tokens / s for s in step_s]
        yield Row.of(name, f"{regime}speed", "tokens/s", speeds, "of all ranks together")
        if peak_flops:
            part = per_token / (peak_flops * launcher.num_ranks)
            about = f"of {peak_flops / 1e12:.0f} TFLOP/s; recomputed work is not counted"
            yield Row.of(name, f"{regime}MFU", "%", [100 * part * s for s in speeds], about)
    for regime, trace in report["traces"].items():
        yield from _trace_rows(name, regime, trace, workload.traced_steps)
    if report["peak_bytes"]:
        peak = report["peak_bytes"] / GIB
        yield Row.of(name, "peak memory", "GiB", [peak], "allocated, rank 0, warm")
    process = report["host_process_bytes"] / GIB
    yield Row.of(name, "host memory", "GiB", [process], "most of the process resident, rank 0")
    each = report["host_bytes"] / workload.num_parameters()
    about = "what training added to the process, per parameter of the model"
    yield Row.of(name, "host memory per parameter", "B", [each], about)
    about = "from the imports' end to the first forward"
    yield Row.of(name, "start-up", "s", [report["start_s"]], about)


def _trace_rows(name: str, regime: str, trace: Mapping[str, float], steps: int) -> Iterator[Row]:
    if not trace:
        return
    whole = sum(trace.values())
    note = f"of {steps} profiled steps, {whole:.0f} ms each"
    idle = 100 * (1 - trace[COMPUTE] / whole)
    yield Row.of(name, f"{regime}GPU without compute", "%", [idle], note)
    for category, ms in trace.items():
        what = category if category == COMPUTE else f"exposed, {category}"
        yield Row.of(name, f"{regime}{what}", "ms", [ms], note)
