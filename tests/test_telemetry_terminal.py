"""Lines a reader takes in, in a terminal and in a log file."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

from zero_strategy.telemetry import text
from zero_strategy.telemetry.events import Done, Event, RunFacts, Step, Validation
from zero_strategy.telemetry.terminal import Terminal, step_line

FACTS = RunFacts(
    model="GPT",
    num_params=134_500_000,
    num_trainable=134_500_000,
    world_size=2,
    device_name="NVIDIA H200",
    strategy="zero3",
    precision="bf16-mixed",
    start_step=0,
    total_steps=2000,
    plan=None,
    checks={},
)
STEP = Step(
    step=120,
    epoch=0,
    tokens=1000,
    elapsed_s=1.0,
    loss=2.381,
    grad_norm=0.84,
    lr=3e-5,
    tokens_per_s=41_234.0,
    mfu=0.38,
    step_ms=100.0,
    data_ms=1.0,
    forward_ms=30.0,
    backward_ms=60.0,
    exposed_comm_ms=4.0,
    optimizer_ms=5.0,
    memory_bytes=int(3.9 * 2**30),
    planned_bytes=4 * 2**30,
    rank_skew_ms=0.5,
    skipped_steps=0,
    eta_s=724.0,
)


class TtyStream(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, *events: Event) -> str:
    terminal = Terminal(FACTS, report=Path("out/report.html"), stream=stream)
    for event in events:
        terminal.write(event)
    return stream.getvalue()


def validation(step: int, loss: float, **others: float) -> Validation:
    return Validation(
        step=step, tokens=None, elapsed_s=1.0, loss=loss, bits_per_byte=loss / 2, others=others
    )


def test_step_line_reads_at_a_glance():
    assert step_line(STEP, FACTS) == (
        " 120/2000   6%  loss  2.3810  gn  0.84  lr 3.00e-05 |  41.2k tok/s/gpu  MFU 38% "
        "| 3.9 GiB (plan 4.0 GiB) | exposed 4% | eta 12m04s"
    )


def test_columns_stay_where_they_are_from_step_to_step():
    later = dataclasses.replace(STEP, step=1990, loss=11.5, grad_norm=12.25, tokens_per_s=999.0)
    first, second = step_line(STEP, FACTS), step_line(later, FACTS)
    assert [at for at, c in enumerate(first) if c == "|"] == [
        at for at, c in enumerate(second) if c == "|"
    ]


def test_hundred_percent_is_the_last_step_and_no_other():
    assert "99%" in step_line(dataclasses.replace(STEP, step=1999), FACTS)
    assert "100%" in step_line(dataclasses.replace(STEP, step=2000), FACTS)


def test_skipped_steps_are_told_once_there_are_any():
    assert "skipped" not in step_line(STEP, FACTS)
    assert step_line(dataclasses.replace(STEP, skipped_steps=3), FACTS).endswith("| skipped 3")


def test_a_loss_that_is_not_finite_is_shown_as_such():
    assert "loss     nan" in step_line(dataclasses.replace(STEP, loss=float("nan")), FACTS)


def test_a_run_without_an_end_has_neither_percent_nor_eta():
    endless = dataclasses.replace(FACTS, total_steps=None)
    line = step_line(dataclasses.replace(STEP, eta_s=None), endless)
    assert line.startswith("  120    -  loss")
    assert line.endswith("eta -")


def test_the_last_line_names_the_best_validation_and_the_report():
    done = Done(step=2000, wall_s=724.0, productive_share=0.98, reason=None)
    events = (validation(10, 3.0), validation(20, 2.31), validation(30, 2.4, ppl=11.0), done)
    lines = printed(io.StringIO(), *events).splitlines()
    assert lines[2] == "val      30  loss 2.4000  1.2000 bits/byte  ppl 11"
    assert lines[3] == (
        "done   12m04s · 98% productive · best val loss 2.3100, 1.1550 bits/byte "
        "· report out/report.html"
    )


def test_colour_is_for_terminals_that_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\033[" in printed(TtyStream(), STEP)
    assert "\033[" not in printed(io.StringIO(), STEP)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in printed(TtyStream(), STEP)


@pytest.mark.parametrize(
    ("write", "value", "expected"),
    [
        (text.count, 999.0, "999"),
        (text.count, 999.96, "1.0k"),
        (text.count, 41_234.0, "41.2k"),
        (text.count, 999_960.0, "1.0M"),
        (text.count, 134_500_000, "134.5M"),
        (text.count, 3_370_000_000, "3.37B"),
        (text.count, None, "-"),
        (text.gib, 512, "512 B"),
        (text.gib, 3.9 * 2**30, "3.9 GiB"),
        (text.gib, 410 * 2**20, "410 MiB"),
        (text.duration, 0.0, "0s"),
        (text.duration, 0.04, "40ms"),
        (text.duration, 0.9, "0.9s"),
        (text.duration, 59.6, "1m00s"),
        (text.duration, 724, "12m04s"),
        (text.duration, 3 * 3600 + 420, "3h07m"),
        (text.duration, 53 * 3600, "2d05h"),
        (text.duration, float("inf"), "-"),
        (text.percent, 0.0, "0%"),
        (text.percent, 0.004, "0.4%"),
        (text.percent, 0.38, "38%"),
    ],
)
def test_figures_have_three_digits_and_a_unit(write: Any, value: float | None, expected: str):
    assert write(value) == expected
