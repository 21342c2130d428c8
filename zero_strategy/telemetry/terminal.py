"""One line per event, the same in a terminal and in a log file; only colour is added for eyes."""

import os
import sys
from pathlib import Path
from typing import TextIO, final

from zero_strategy.planning.estimate import MemoryPlan
from zero_strategy.telemetry import text
from zero_strategy.telemetry.events import Done, Event, RunFacts, Save, Step, Validation

_LABEL_WIDTH = 7
_LABEL_STYLE, _PLAIN = "\033[1;36m", "\033[0m"


@final
class Terminal:
    """Prints what happens.

    Args:
        facts: what is known at the start.
        report: where the report will lie, named in the last line.
        stream: where lines go; standard output if None.
    """

    def __init__(self, facts: RunFacts, *, report: Path, stream: TextIO | None = None) -> None:
        self._facts = facts
        self._report = report
        self._stream = sys.stdout if stream is None else stream
        self._colour = _wants_colour(self._stream)
        self._best: Validation | None = None
        self._host_state_bytes = facts.offload.engine.state_bytes if facts.offload else 0

    def open(self) -> None:
        """Print the lines that stand above the first step."""
        self._line("run", run_line(self._facts))
        if self._facts.plan is not None:
            self._line("plan", plan_line(self._facts.plan))
        if self._facts.checks:
            self._line("checks", checks_line(self._facts.checks))

    def note(self, words: str) -> None:
        """Print something the user should know."""
        self._line("note", words)

    def write(self, event: Event) -> None:
        """Print an event."""
        match event:
            case Step():
                self._note_move(event)
                self._line("step", step_line(event, self._facts))
            case Validation():
                self._best = _better(self._best, event)
                self._line("val", validation_line(event, self._facts))
            case Save():
                name = f"  {event.name}" if event.name else ""
                blocked = text.duration(event.blocking_s)
                self._line(
                    "save", f"{_padded(event.step, self._facts)}{name}  ({blocked} blocking)"
                )
            case Done():
                self._line("stop" if event.reason else "done", self._done_line(event))

    def _note_move(self, step: Step) -> None:
        """Say that state went from host memory to the device, where it did."""
        if step.host_state_bytes is None:
            return
        moved = self._host_state_bytes - step.host_state_bytes
        self._host_state_bytes = step.host_state_bytes
        if moved > 0:
            self.note(
                f"{text.gib(moved)} of optimizer state per rank moved from host memory to the "
                f"device, which had room; {text.percent(step.host_share)} is on the host"
            )

    def _done_line(self, done: Done) -> str:
        parts = [text.duration(done.wall_s), f"{text.percent(done.productive_share)} productive"]
        if done.reason:
            parts.insert(0, f"{done.reason} after step {done.step}")
        if self._best is not None:
            parts.append(f"best val {', '.join(_validation_figures(self._best)[:2])}")
        return " · ".join([*parts, f"report {self._report}"])

    def _line(self, label: str, words: str) -> None:
        padded = label.ljust(_LABEL_WIDTH)
        if self._colour:
            padded = f"{_LABEL_STYLE}{padded}{_PLAIN}"
        print(f"{padded}{words}", file=self._stream, flush=True)


def run_line(facts: RunFacts) -> str:
    """Model, devices, strategy, precision and length of the run."""
    parts = [
        facts.model,
        f"{text.count(facts.num_params)} params ({text.count(facts.num_trainable)} trainable)",
        f"{facts.world_size} x {facts.device_name}",
        facts.strategy,
        facts.precision,
    ]
    if facts.total_steps is not None:
        parts.append(f"{facts.total_steps} steps")
    if facts.start_step:
        parts.append(f"resumed after step {facts.start_step}")
    return " · ".join(parts)


def plan_line(plan: MemoryPlan) -> str:
    """Bytes planned per rank, and what they are for."""
    parts = {
        "params": plan.params_bytes,
        "grads": plan.grads_bytes,
        "optimizer": plan.optimizer_bytes,
        "unsharded": plan.unsharded_bytes,
    }
    held = " + ".join(f"{name} {text.gib(size)}" for name, size in parts.items())
    units = f"{plan.num_units} units of {plan.unit_class}"
    host = f" · {text.gib(plan.host_bytes)} in host memory" if plan.host_bytes else ""
    return f"{text.gib(plan.total_bytes)} per rank = {held} · activations on top{host} · {units}"


def checks_line(checks: dict[str, str]) -> str:
    """What was checked at set-up, and how it ended."""
    return " · ".join(f"{name} {outcome}" for name, outcome in checks.items())


def step_line(step: Step, facts: RunFacts) -> str:
    """All figures of a log step on one line of fixed columns."""
    total = facts.total_steps
    # Whole percents done, so that 100% is the last step and no other.
    done = f"{100 * step.step // total}%" if total else text.ABSENT
    learning = (
        f"{_padded(step.step, facts)}{f'/{total}' if total else ''} {done:>4}"
        f"  loss {text.number(step.loss, '.4f'):>7}"
        f"  gn {text.number(step.grad_norm, '.2f'):>5}"
        f"  lr {text.number(step.lr, '.2e')}"
    )
    speed = f"{text.count(step.tokens_per_s):>6} tok/s/{facts.rank_word}"
    planned = "" if step.planned_bytes is None else f" (plan {text.gib(step.planned_bytes)})"
    parts = [
        learning,
        f"{speed}  MFU {text.percent(step.mfu):>3}",
        f"{text.gib(step.memory_bytes)}{planned}",
        f"exposed {text.percent(step.exposed_share):>2}",
    ]
    if step.host_share is not None:
        parts.append(f"offload exposed {text.percent(step.offload_exposed_share):>2}")
        parts.append(f"on host {text.percent(step.host_share)}")
    parts.append(f"eta {text.duration(step.eta_s)}")
    if step.skipped_steps:
        parts.append(f"skipped {step.skipped_steps}")
    return " | ".join(parts)


def validation_line(validation: Validation, facts: RunFacts) -> str:
    """The figures of a validation pass."""
    return "  ".join([_padded(validation.step, facts), *_validation_figures(validation)])


def _validation_figures(validation: Validation) -> list[str]:
    figures = []
    if validation.loss is not None:
        figures.append(f"loss {validation.loss:.4f}")
    if validation.bits_per_byte is not None:
        figures.append(f"{validation.bits_per_byte:.4f} bits/byte")
    return figures + [f"{name} {value:.4g}" for name, value in validation.others.items()]


def _better(best: Validation | None, new: Validation) -> Validation | None:
    if new.loss is None:
        return best
    return new if best is None or best.loss is None or new.loss < best.loss else best


def _padded(step: int, facts: RunFacts) -> str:
    """The step number, wide enough for the last one, so that columns stay."""
    return f"{step:>{len(str(facts.total_steps or 10_000))}}"


def _wants_colour(stream: TextIO) -> bool:
    # NO_COLOR: any value turns colour off, see no-color.org.
    dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return stream.isatty() and not dumb
