"""What a run will need and how long its steps will take, told before it starts, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from zero_strategy.config import refusal
from zero_strategy.experiments.plan_changes import fitting_changes
from zero_strategy.experiments.plan_job import Planned, built, planned
from zero_strategy.experiments.rules import ConfigError
from zero_strategy.experiments.schema import RunConfig
from zero_strategy.kernels.build import BuildError
from zero_strategy.planning.job import Job
from zero_strategy.planning.machines import MACHINES, Machine
from zero_strategy.planning.measure import measured
from zero_strategy.planning.offload_plan import Plan
from zero_strategy.planning.tiers import Part
from zero_strategy.presets import PRESETS
from zero_strategy.telemetry import text

THIS = "this"
"""Name of the machine on which the plan is made."""
SHOWN_CHANGES = 3
_LABEL_WIDTH = 7


def plan(config: RunConfig, *, machine: str, host_share: float | None = None) -> str:
    """Return the plan of a run as lines of text.

    Args:
        config: the run.
        machine: "h200", or "this" to measure the one this runs on.
        host_share: part of the optimizer state in host memory, in [0, 1]; by default all of it.
            Without offload it must be left out.

    Raises:
        ConfigError: a strategy that shards nothing, a wrong share, or no place to keep what was
            measured.

    Cost: the model is built on the meta device, which takes no memory.
    """
    preset = PRESETS.get(config.trainer.strategy)
    if preset is None:
        zero = [name for name in PRESETS if not name.endswith("nvme")]
        fix = "Use trainer.strategy=zero3."
        raise ConfigError(refusal("trainer.strategy", config.trainer.strategy, zero, fix))
    if host_share is not None:
        _check_share(host_share, offloads="offload" in preset)
    on = _this_machine() if machine == THIS else MACHINES[machine]
    result = planned(config, on, host_share)
    module, units = built(config.model, offloads="offload" in preset)
    lines = [
        _line("run", _run_words(config, module, result.job, on)),
        _line("on", _machine_words(on)),
        _line("units", _unit_words(result, units.class_names)),
        *_tier_lines("gpu" if on.num_gpus else "device", result.plan.gpu, _gpu_words(result, on)),
        *_tier_lines("host", result.plan.host, _host_words(result, on)),
        *_step_lines(result),
        _line("limit", _limit_words(result.plan)),
        *_change_lines(config, on, result.plan),
    ]
    return "\n".join(lines)


def _this_machine() -> Machine:
    try:
        return measured()
    except BuildError as error:
        raise ConfigError(str(error)) from error


def _check_share(share: float, *, offloads: bool) -> None:
    if not offloads:
        fix = "Leave --host-share out, or use trainer.strategy=zero3_offload."
        raise ConfigError(refusal("host share", share, ["left out without offload"], fix))
    if not 0 <= share <= 1:
        fix = "Use 1 for all, or leave --host-share out."
        raise ConfigError(refusal("host share", share, ["between 0 and 1"], fix))


# Words of the lines.


def _line(label: str, words: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{words}"


def _run_words(config: RunConfig, module: nn.Module, job: Job, machine: Machine) -> str:
    num_params = sum(p.numel() for p in module.parameters())
    num_trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return " · ".join(
        [
            Path(config.out_dir).name,
            f"{text.count(num_params)} params ({text.count(num_trainable)} trainable)",
            f"{job.world_size} x {machine.name if machine.num_gpus else 'cpu'}",
            config.trainer.strategy,
            config.trainer.precision,
            f"{text.count(job.tokens_per_step)} tokens per rank and step",
        ]
    )


def _machine_words(machine: Machine) -> str:
    gpu = f"GPU {text.gib(machine.gpu_bytes)} · " if machine.num_gpus else ""
    host = f"host {text.gib(machine.host_bytes)}, {machine.cores} cores"
    return f"{machine.name} · {gpu}{host} · {machine.source}"


def _unit_words(result: Planned, class_name: str) -> str:
    job, plan = result
    units = f"{len(job.units) - 1} units of {class_name} and the root"
    if plan.share is None:
        return f"{units} · no offload"
    held = sum(job.units[name].trained for name in plan.host_units) / max(1, job.trained)
    return f"{units} · optimizer state of {len(plan.host_units)} in host memory ({held:.0%})"


def _gpu_words(result: Planned, machine: Machine) -> str:
    plan = result.plan
    of = text.gib(machine.gpu_bytes) if machine.num_gpus else "the host's memory"
    return f"{text.gib(plan.gpu_bytes)} of {of} per rank, fullest at {plan.peak_at}"


def _host_words(result: Planned, machine: Machine) -> str:
    job, plan = result
    if not plan.host:
        return "none"
    ranks = job.num_local_ranks
    shared = f" ({ranks} ranks share {text.gib(machine.host_bytes)})" if ranks > 1 else ""
    room = text.gib(machine.host_bytes // ranks)
    return f"{text.gib(plan.host_bytes)} of {room} per rank{shared}"


def _tier_lines(label: str, parts: Sequence[Part], words: str) -> Iterator[str]:
    yield _line(label, words)
    width = max((len(part.purpose) for part in parts), default=0)
    for part in parts:
        yield _line("", f"{part.purpose:<{width}}  {text.gib(part.num_bytes):>9}  {part.reason}")


def _step_lines(result: Planned) -> Iterator[str]:
    job, plan = result
    time = plan.time
    speed = text.count(job.tokens_per_step / time.step_s)
    words = f"{text.duration(time.step_s)} per optimizer step, {speed} tok/s per rank"
    if plan.share and job.clips:
        clipped = f"{text.duration(time.clipped_step_s)} where every step is clipped"
        words = f"{words} · {clipped}, gradients met {time.clipped_mode}"
    yield _line("step", words)
    width = max(len(name) for name, _, _ in time.parts)
    for name, seconds, reason in time.parts:
        yield _line("", f"{name:<{width}}  {text.duration(seconds):>6}  {reason}")


def _limit_words(plan: Plan) -> str:
    missing = {"GPU memory": plan.gpu_missing_bytes, "host memory": plan.host_missing_bytes}
    short = [f"{tier}, {text.gib(size)} missing" for tier, size in missing.items() if size]
    return f"does not fit: {' · '.join(short)}" if short else f"fits · time by {plan.time.slowest}"


def _change_lines(config: RunConfig, machine: Machine, plan: Plan) -> Iterator[str]:
    if plan.fits:
        return
    changes = fitting_changes(config, machine)[:SHOWN_CHANGES]
    if not changes:
        yield _line("change", "use a machine with more memory, or a smaller model")
        return
    width = max(len(change.words) for change, _ in changes)
    for index, (change, (_, fitting)) in enumerate(changes):
        host = f", host {text.gib(fitting.host_bytes)}" if fitting.host else ""
        needs = (
            f"gpu {text.gib(fitting.gpu_bytes)}{host}, step {text.duration(fitting.time.step_s)}"
        )
        yield _line("" if index else "change", f"{change.words:<{width}}  fits: {needs}")
