"""CSV files that survive, and a page that needs nothing but itself."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from zero_strategy.planning.estimate import MemoryPlan
from zero_strategy.telemetry.csv_log import STEP_COLUMNS, CsvLog, read_columns
from zero_strategy.telemetry.events import Done, RunFacts, Step, Validation
from zero_strategy.telemetry.ranks import gather_rows
from zero_strategy.telemetry.report import Report, write_report
from zero_strategy.telemetry.svg import Series, line_chart, stacked_chart, ticks

STEP = Step(
    step=1,
    epoch=0,
    tokens=1000,
    elapsed_s=1.0,
    loss=2.5,
    grad_norm=0.8,
    lr=3e-4,
    tokens_per_s=41_234.0,
    mfu=0.38,
    step_ms=100.0,
    data_ms=1.0,
    forward_ms=30.0,
    backward_ms=60.0,
    exposed_comm_ms=4.0,
    optimizer_ms=5.0,
    memory_bytes=4 * 2**30,
    planned_bytes=3 * 2**30,
    rank_skew_ms=0.5,
    skipped_steps=0,
    eta_s=60.0,
)
FACTS = RunFacts(
    model="A <model> & more",
    num_params=10,
    num_trainable=10,
    world_size=2,
    device_name="NVIDIA H200",
    strategy="zero3",
    precision="bf16-mixed",
    start_step=0,
    total_steps=100,
    plan=MemoryPlan(
        params_bytes=2**30,
        grads_bytes=2**30,
        optimizer_bytes=2**30,
        unsharded_bytes=2**20,
        num_params=10,
        num_trainable=10,
        num_units=3,
        unit_class="Block",
        world_size=2,
        strategy="zero3",
        precision="bf16-mixed",
    ),
    checks={"dtype": "ok"},
)
DONE = Done(step=100, wall_s=10.0, productive_share=0.9, reason=None)


def write_steps(folder: Path, numbers: list[int], *, after_step: int = 0, **changes: Any) -> CsvLog:
    log = CsvLog(folder, after_step=after_step)
    for number in numbers:
        log.write(dataclasses.replace(STEP, step=number, **changes))
    return log


def page_of(folder: Path, **changes: Any) -> str:
    log = write_steps(folder, list(range(1, 101)), **changes)
    for step in (50, 100):
        log.write(
            Validation(
                step=step, tokens=step, elapsed_s=1.0, loss=2.0, bits_per_byte=0.7, others={}
            )
        )
    Report(folder, FACTS).write(DONE)
    return (folder / "report.html").read_text()


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    log = CsvLog(tmp_path, after_step=0)
    for count in range(1, 4):
        log.write(dataclasses.replace(STEP, step=count))
        assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + count


def test_a_row_cut_short_by_a_crash_is_dropped(tmp_path):
    write_steps(tmp_path, [1, 2])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,0,17")
    assert read_columns(tmp_path / "metrics.csv")["step"] == [1, 2]
    log = write_steps(tmp_path, [3], after_step=3)
    assert log.dropped_rows == 1
    assert read_columns(tmp_path / "metrics.csv")["step"] == [1, 2, 3]


def test_rows_after_the_resumed_step_are_dropped(tmp_path):
    write_steps(tmp_path, [1, 10, 20, 30])
    log = write_steps(tmp_path, [30, 40], after_step=20)
    assert log.dropped_rows == 1
    assert read_columns(tmp_path / "metrics.csv")["step"] == [1, 10, 20, 30, 40]


def test_columns_of_another_version_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"metrics\.csv: its columns .* \(step, loss\)\. Move the"):
        CsvLog(tmp_path, after_step=0)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,2\n"


def test_figures_not_measured_are_empty_cells_and_bad_losses_stay_visible(tmp_path):
    write_steps(tmp_path, [1], mfu=None, loss=math.nan)
    columns = read_columns(tmp_path / "metrics.csv")
    assert tuple(columns) == STEP_COLUMNS
    assert columns["mfu"] == [None]
    (loss,) = columns["loss"]
    assert loss is not None
    assert math.isnan(loss)


def test_report_fetches_nothing_and_runs_nothing(tmp_path):
    page = page_of(tmp_path)
    assert "<script" not in page
    assert not re.search(r"https?://|//[a-z]|@import|url\(|<link|<img|\bsrc=|\bhref=", page)


def test_report_is_well_formed_and_escapes_names(tmp_path):
    page = page_of(tmp_path)
    assert "A &lt;model&gt; &amp; more" in page
    body = page[page.index("<body>") : page.index("</html>")]
    root = ElementTree.fromstring(body)
    titles = [heading.text for heading in root.iter("h3")]
    for title in ("Loss", "Validation bits per byte", "MFU", "Peak per rank", "Rank skew"):
        assert title in titles
    assert all(drawing.get("aria-label") for drawing in root.iter("svg"))


def test_report_serves_light_and_dark(tmp_path):
    page = page_of(tmp_path)
    light, dark = (set(re.findall(r"--(\w+): #", part)) for part in page.split("@media")[:2])
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= light
    assert used <= dark


def test_report_leaves_out_what_was_not_measured(tmp_path):
    page = page_of(tmp_path, mfu=None, exposed_comm_ms=None, grad_norm=None)
    for title in ("MFU", "Exposed communication", "Gradient norm"):
        assert f"<h3>{title}</h3>" not in page
    assert "exposed communication" not in page


def test_report_can_be_made_of_the_files_of_a_killed_run(tmp_path):
    write_steps(tmp_path, [1, 10])
    page = write_report(tmp_path).read_text()
    assert tmp_path.name in page
    assert page.count("<svg") == 8


@pytest.mark.parametrize("rows", [0, 1, 2, 3000])
def test_report_stands_with_any_number_of_rows(tmp_path, rows):
    write_steps(tmp_path, list(range(1, rows + 1)))
    page = write_report(tmp_path, facts=FACTS, done=DONE).read_text()
    assert "nan" not in page
    assert len(page) < 300_000


def test_a_spike_between_drawn_points_stays_visible():
    # 1000 points, and 1 of them high: the mean of its neighbours hides it, the band does not.
    points = [(float(x), 5.0 if x == 500 else 1.0 + 0.5 * (x % 2)) for x in range(1000)]
    series = [Series(name="loss", colour="blue", points=points)]
    drawing = line_chart(series, label="loss", y_format=str, zero=False)
    band = re.findall(r'fill-opacity="0.18" d="M([^Z]+)Z"', drawing)[0]
    heights = [float(pair.split()[1]) for pair in band.split("L")]
    assert min(heights) < sorted(heights)[1]


def test_layers_of_a_stack_do_not_overlap():
    layers = [
        Series(name=name, colour="blue", points=[(0.0, 1.0), (1.0, 2.0)]) for name in ("a", "b")
    ]
    drawing = stacked_chart(layers, label="times", y_format=str)
    outlines = re.findall(r'd="M([^Z]+)Z"', drawing)
    lower, upper = ([pair.split()[1] for pair in outline.split("L")] for outline in outlines)
    # Two points along the top, then two back along the base.
    assert lower[:2] == upper[3:1:-1]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.1, 4.6, [2.5, 3.0, 3.5, 4.0, 4.5]),
        (0.0, 0.0003, [0.0, 0.0001, 0.0002, 0.0003]),
        (-3.0, 40_000.0, [0.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0]),
    ],
)
def test_ticks_are_round_numbers_within_the_range(low, high, expected):
    assert ticks(low, high, at_most=5) == pytest.approx(expected)


def test_rows_come_together_by_rank_and_absent_ranks_are_left_out():
    def all_reduce(table: torch.Tensor) -> torch.Tensor:
        others = torch.zeros_like(table)
        others[2] = torch.tensor([1.0, 7.0, 2.0**40 + 1], dtype=table.dtype)
        return table + others

    rows = gather_rows(
        [5.0, 6.0],
        global_rank=0,
        world_size=3,
        device=torch.device("cpu"),
        sum_over_ranks=all_reduce,
    )
    assert rows == [[5.0, 6.0], [7.0, 2.0**40 + 1]]
