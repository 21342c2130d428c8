"""Validate, fit, validate again in one process, at each stage: losses are finite and agree.

Evaluation must leave nothing behind that breaks or changes the training after it. Under NCCL
Lightning would evaluate in inference mode, which gloo runs never meet.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self, final

from zero_strategy.experiments.benchmarks.launch import Launcher
from zero_strategy.experiments.benchmarks.result import Findings, Row
from zero_strategy.experiments.benchmarks.train_step import PARITY_TOLERANCE, TrainStep
from zero_strategy.experiments.benchmarks.watch import Losses
from zero_strategy.experiments.benchmarks.workload import TokenBatches, Workload

MOMENTS = ("validation loss before", "training loss", "validation loss after")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateThenFit:
    """All three stages on the small model of a training case.

    Attributes:
        shape: case whose parity model is trained.
        timeout_s: for one stage, its start included.
    """

    shape: TrainStep
    timeout_s: int

    def quick(self) -> Self:
        """Return the same with a tiny model."""
        return dataclasses.replace(self, shape=self.shape.quick())

    def measure(self, launcher: Launcher) -> Findings:
        """Run each stage; what differs from stage 3, or is not finite, is broken."""
        findings = Findings()
        reference: dict[str, list[float]] = {}
        for stage in (3, 2, 1):
            system = f"zero_strategy zero{stage}"
            report = launcher.run(
                run_stage,
                timeout_s=self.timeout_s,
                stage=stage,
                workload=self.shape.parity_workload.to_json(),
            )
            if report.reason:
                findings.rows.append(Row.failed(system, MOMENTS[0], "nat", report.reason))
                findings.broken.append(f"{system}: {report.reason}")
                continue
            losses: dict[str, list[float]] = report.value["losses"]
            note = f"{report.value['backend']}, precision {report.value['precision']}"
            reference = reference or losses
            findings.broken += losses_apart(system, losses, reference)
            findings.rows += [
                Row.of(system, moment, "nat", [x for x in losses[moment] if math.isfinite(x)], note)
                for moment in MOMENTS
                if any(map(math.isfinite, losses[moment]))
            ]
        return findings


def losses_apart(
    system: str, losses: dict[str, list[float]], reference: dict[str, list[float]]
) -> list[str]:
    """Return a line for each moment whose losses are not finite or leave the tolerance."""
    lines = []
    for moment in MOMENTS:
        gap = max(abs(a - b) for a, b in zip(losses[moment], reference[moment], strict=True))
        # NaN compares false, and inf minus inf is NaN.
        if not all(map(math.isfinite, losses[moment])) or not gap <= PARITY_TOLERANCE:
            lines.append(f"{system}: {moment} = {losses[moment]}, {gap:.3g} nat apart")
    first, last = losses[MOMENTS[0]][0], losses[MOMENTS[2]][0]
    if not last < first:
        lines.append(f"{system}: validation loss rose from {first:.4f} to {last:.4f}")
    return lines


def run_stage(*, stage: int, workload: dict[str, Any]) -> dict[str, Any]:
    """Validate, fit and validate in this rank; a worker's entry."""
    # Here, so that the process that launches stays without Lightning.
    import torch.distributed as dist

    from zero_strategy.experiments.benchmarks.systems.lightning_fit import TokenModule, make_trainer
    from zero_strategy.strategy import ZeroStrategy

    job = Workload.from_json(workload)
    watch = Losses(job)
    module = TokenModule(job, watch)
    trainer = make_trainer(job, ZeroStrategy(stage=stage, init="meta"), "bf16-mixed")
    (before,) = trainer.validate(module, TokenBatches(job), verbose=False)
    trainer.fit(module, TokenBatches(job))
    (after,) = trainer.validate(module, TokenBatches(job), verbose=False)
    losses = ([before["val_loss"]], watch.report()["losses"], [after["val_loss"]])
    return {
        "losses": dict(zip(MOMENTS, losses, strict=True)),
        "backend": dist.get_backend(),
        "precision": str(trainer.precision),
    }
