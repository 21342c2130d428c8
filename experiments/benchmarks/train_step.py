"""Time and memory of a training step beside the rivals': parity first, then rounds of steps.

A round is a new process per system, or a turn of processes that live side by side. The order of the
systems turns round after each round, so that a drift of the machine's clocks falls on all alike.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from zero_strategy.experiments.benchmarks.launch import Launcher, Report, target_of
from zero_strategy.experiments.benchmarks.result import Findings, Row, ratio
from zero_strategy.experiments.benchmarks.systems.names import SYSTEMS
from zero_strategy.experiments.benchmarks.turns import SETTLE_STEPS, TurnTimes, conduct
from zero_strategy.experiments.benchmarks.watch import Losses, StepTimes, follow
from zero_strategy.experiments.benchmarks.workload import Workload
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.models.gpt import GPTConfig
from zero_strategy.planning.hardware import peak_bf16_flops

GIB = 2**30
TINY = GPTConfig(
    vocab_size=61,
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    intermediate_size=48,
    max_seq_len=32,
)
# Products in bf16 round by up to 1 in 256; in a mean over some hundred tokens that leaves a few
# thousandths of a nat. A wrong scale, order or clip is off by a tenth after these steps.
PARITY_TOLERANCE = 0.02
PARITY_STEPS = 8
PARITY_LR = 3e-3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """One model trained by several systems.

    Attributes:
        config: packaged configuration whose model is trained.
        systems: names in `SYSTEMS`; the first is ours, and ratios are taken to the others.
        batch_size: rows per rank and step.
        seq_len: predicted tokens per row.
        rounds: processes per system, or turns.
        warmup_steps: per process, not measured.
        steps: per round, measured.
        timeout_s: for one process, its start included.
        max_norm: bound of the gradients' norm; a large one clips no step.
        in_turns: the systems live side by side and take turns; their memory must fit together.
        processes: per system, where they take turns. Where the system puts a process changes its
            speed by a few percent for as long as it lives.
        tiny: train a tiny model instead of the configuration's.
    """

    config: str
    systems: tuple[str, ...]
    batch_size: int
    seq_len: int
    rounds: int
    warmup_steps: int
    steps: int
    timeout_s: int
    max_norm: float = 1.0
    in_turns: bool = False
    processes: int = 1
    tiny: bool = False

    def quick(self) -> Self:
        """Return the same with a tiny model and few steps."""
        return dataclasses.replace(
            self,
            batch_size=2,
            seq_len=16,
            rounds=1,
            warmup_steps=1,
            steps=3,
            processes=1,
            tiny=True,
        )

    @property
    def workload(self) -> Workload:
        """The job that is timed."""
        return Workload(
            model=TINY if self.tiny else load_config(self.config).model,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            warmup_steps=self.warmup_steps,
            steps=self.steps,
            max_norm=self.max_norm,
        )

    @property
    def parity_workload(self) -> Workload:
        """A small version of the same model, trained fast enough to show a difference."""
        big = self.workload
        head_dim = big.model.head_dim
        small = dataclasses.replace(
            big.model,
            num_layers=2,
            hidden_size=4 * head_dim,
            num_heads=4,
            num_kv_heads=4,
            intermediate_size=10 * head_dim,
        )
        return dataclasses.replace(
            big,
            model=small,
            batch_size=2,
            seq_len=min(256, big.seq_len),
            warmup_steps=0,
            steps=PARITY_STEPS - 1,
            lr=PARITY_LR,
        )

    def measure(self, launcher: Launcher) -> Findings:
        """Check parity, then time what passed it."""
        findings = Findings()
        timed = self.check_parity(launcher, findings)
        time_them = self._time_in_turns if self.in_turns else self._time_one_by_one
        reports = time_them(launcher, timed, findings)
        timed = list(reports)
        for name in timed:
            findings.rows += self._rows(name, reports[name], launcher)
        self._compare(findings)
        if self.systems[0] not in timed:
            findings.broken.append(f"{self.systems[0]}: no step time")
        return findings

    def _time_one_by_one(
        self, launcher: Launcher, names: list[str], findings: Findings
    ) -> dict[str, list[dict[str, Any]]]:
        reports: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for index in range(self.rounds):
            # A B C, then C B A.
            for name in list(reports)[:: 1 if index % 2 == 0 else -1]:
                report = self._follow(launcher, name, StepTimes, self.workload)
                if report.reason:
                    findings.rows.append(Row.failed(name, "step time", "s", report.reason))
                    del reports[name]
                else:
                    reports[name].append(report.value)
        return reports

    def _time_in_turns(
        self, launcher: Launcher, names: list[str], findings: Findings
    ) -> dict[str, list[dict[str, Any]]]:
        turn_steps = SETTLE_STEPS + self.steps
        workload = dataclasses.replace(self.workload, steps=self.rounds * turn_steps)
        runners = names * self.processes
        reports: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        with tempfile.TemporaryDirectory() as folder:
            outcomes = launcher.run_side_by_side(
                follow,
                [
                    {
                        "system": SYSTEMS[name],
                        "watch": target_of(TurnTimes),
                        "workload": workload.to_json(),
                        "options": {"folder": folder, "system": i, "turn_steps": turn_steps},
                    }
                    for i, name in enumerate(runners)
                ],
                timeout_s=self.timeout_s,
                conduct=lambda systems: conduct(systems, Path(folder), self.rounds),
            )
        for name, report in zip(runners, outcomes, strict=True):
            if report.reason and reports.pop(name, None) is not None:
                findings.rows.append(Row.failed(name, "step time", "s", report.reason))
            elif name in reports:
                reports[name].append(report.value)
        return reports

    def _follow(
        self, launcher: Launcher, name: str, watch: type[Losses | StepTimes], workload: Workload
    ) -> Report:
        report = launcher.run(
            follow,
            timeout_s=self.timeout_s,
            system=SYSTEMS[name],
            watch=target_of(watch),
            workload=workload.to_json(),
        )
        outcome = f"failed: {report.reason}" if report.reason else "done"
        print(f"{watch.__name__} of {name}: {outcome}", file=sys.stderr, flush=True)
        return report

    def check_parity(self, launcher: Launcher, findings: Findings) -> list[str]:
        """Add a row per system; return those that learn what the first one that ran learns."""
        workload, note = self.parity_workload, _parity_note(self.parity_workload)
        passed: list[str] = []
        reference: list[float] = []
        for name in self.systems:
            report = self._follow(launcher, name, Losses, workload)
            if report.reason:
                findings.rows.append(Row.failed(name, "loss difference", "nat", report.reason))
                continue
            losses = report.value["losses"]
            reference = reference or losses
            gaps = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
            findings.rows.append(Row.of(name, "loss difference", "nat", gaps, note))
            if max(gaps) <= PARITY_TOLERANCE:  # false for NaN too
                passed.append(name)
            else:
                findings.broken.append(f"{name}: loss differs by {max(gaps):.3g} nat, not timed")
        return passed

    def _rows(self, name: str, reports: list[dict[str, Any]], launcher: Launcher) -> list[Row]:
        workload = self.workload
        tokens = workload.tokens_per_step * launcher.num_ranks
        step_s = [s for report in reports for s in report["step_s"]]
        speeds = [tokens / s for s in step_s]
        turns = f"turns of each of {self.processes} processes a system, side by side, each"
        rounds = turns if self.in_turns else "rounds"
        note = (
            f"{self.rounds} {rounds} of {self.steps} steps after {self.warmup_steps}; "
            f"{launcher.num_ranks} ranks x {workload.batch_size} x {workload.seq_len} tokens"
        )
        rows = [
            Row.of(name, "step time", "s", step_s, note),
            Row.of(name, "speed", "tokens/s", speeds, "of all ranks together"),
        ]
        peak_flops = peak_bf16_flops(launcher.machine()["device_name"])
        if peak_flops:
            part = workload.flops_per_token() / (peak_flops * launcher.num_ranks)
            about = f"of {peak_flops / 1e12:.0f} TFLOP/s; recomputed work is not counted"
            rows.append(Row.of(name, "MFU", "%", [100 * part * s for s in speeds], about))
        peaks = [report["peak_bytes"] / GIB for report in reports]
        if all(peaks):
            rows.append(Row.of(name, "peak memory", "GiB", peaks, "allocated, rank 0, warm"))
        return rows

    def _compare(self, findings: Findings) -> None:
        ours, *rivals = self.systems
        for rival in rivals:
            for metric, suffix in (("step time", ""), ("peak memory", " memory")):
                x = ratio(findings.median(rival, metric), findings.median(ours, metric))
                if x is not None:
                    findings.ratios[f"vs {rival}{suffix}"] = x


def _parity_note(workload: Workload) -> str:
    model = workload.model
    return (
        f"{workload.num_steps} steps of {model.num_layers} layers of width {model.hidden_size}, "
        f"same seed and tokens; tolerance {PARITY_TOLERANCE} nat"
    )
