"""Figures of offload in a line, a panel and a page."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.test_telemetry_report import DONE, FACTS, STEP
from zero_strategy.offload.figures import EngineFigures, OffloadFigures
from zero_strategy.telemetry.board import Board
from zero_strategy.telemetry.csv_log import CsvLog
from zero_strategy.telemetry.report import write_report
from zero_strategy.telemetry.terminal import step_line
from zero_strategy.telemetry.tiers import link_ceiling, offload_fields, offload_row

FIGURES = OffloadFigures(
    host_share=0.48,
    exposed_ms=24.0,
    engine=EngineFigures(
        state_bytes=1000,
        down_bytes=4000,
        up_bytes=8000,
        passes={
            ("cpu", "commit and preview"): 6,
            ("cpu", "redone preview"): 2,
            ("stream", "commit"): 4,
        },
        max_waiting=7,
        slot_wait_ms=8.0,
    ),
)
OFFLOADED = dataclasses.replace(STEP, **offload_fields([offload_row(FIGURES, 4)]))
H200_FACTS = dataclasses.replace(FACTS, offload=FIGURES, link_bytes_per_s=54.5e9)


def test_what_is_counted_is_told_per_step() -> None:
    assert offload_fields([offload_row(FIGURES, 4)]) == {
        "host_share": 0.48,
        "host_state_bytes": 1000,
        "offload_exposed_ms": 6.0,
        "offload_slot_wait_ms": 2.0,
        "offload_down_bytes": 1000.0,
        "offload_up_bytes": 2000.0,
        "offload_waiting": 7,
        "offload_redone": 0.5,
        "offload_cpu_passes": 2.0,
        "offload_stream_passes": 1.0,
    }


def test_ranks_are_averaged_but_the_fullest_queue_and_memory_stay_visible() -> None:
    other = dataclasses.replace(
        FIGURES,
        exposed_ms=0.0,
        engine=dataclasses.replace(FIGURES.engine, state_bytes=900, max_waiting=9, up_bytes=0),
    )
    fields = offload_fields([offload_row(FIGURES, 4), offload_row(other, 4)])
    assert fields.get("offload_exposed_ms") == 3.0
    assert fields.get("offload_up_bytes") == 1000.0
    assert (fields.get("offload_waiting"), fields.get("host_state_bytes")) == (9, 1000)


def test_waits_that_were_not_measured_are_none_and_not_zero() -> None:
    row = offload_row(dataclasses.replace(FIGURES, exposed_ms=None), 4)
    assert offload_fields([row]).get("offload_exposed_ms", 0.0) is None


def test_without_offload_ranks_bring_no_figures_together() -> None:
    assert offload_row(None, 4) == []
    assert offload_fields([[], []]) == {}


@pytest.mark.parametrize(
    ("device", "ceiling"),
    [
        ("NVIDIA H200", 54.5e9),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_a_ceiling_is_known_for_measured_devices_alone(device: str, ceiling: float | None) -> None:
    assert link_ceiling(device) == ceiling


def test_a_step_line_says_what_offload_exposes_and_where_the_state_lies() -> None:
    assert "| exposed 4% | offload exposed 6% | on host 48% | eta" in step_line(OFFLOADED, FACTS)


def _layout_and_scalars(folder: Path, facts: Any, step: Any) -> tuple[bytes, dict[str, float]]:
    board = Board(SummaryWriter(str(folder)), facts)
    board.write(step)
    board.write(DONE)
    events = EventAccumulator(str(folder)).Reload()
    (layout,) = events.Tensors("custom_scalars__config__")
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    return layout.tensor_proto.string_val[0], scalars


def test_the_panel_has_rates_beside_their_ceiling(tmp_path: Path) -> None:
    step = dataclasses.replace(OFFLOADED, offload_down_bytes=3e9, offload_up_bytes=2.5e9)
    layout, scalars = _layout_and_scalars(tmp_path, H200_FACTS, step)
    # 100 ms per step.
    assert scalars["Tiers/to_host_gb_per_s"] == pytest.approx(30)
    assert scalars["Tiers/to_device_gb_per_s"] == pytest.approx(25)
    assert scalars["Tiers/ceiling_gb_per_s"] == pytest.approx(54.5)
    assert scalars["Tiers/exposed_share"] == pytest.approx(0.06)
    # Every scalar of the panel is drawn in it.
    patterns = [p.decode() for p in re.findall(rb"Tiers/[^\s\x00-\x1f]+\$", layout)]
    drawn = {t for t in scalars if any(re.match(p, t) for p in patterns)}
    assert drawn == {tag for tag in scalars if tag.startswith("Tiers/")}


def test_the_panel_is_absent_without_offload(tmp_path: Path) -> None:
    layout, scalars = _layout_and_scalars(tmp_path, FACTS, STEP)
    assert b"Tiers" not in layout
    assert not any(tag.startswith("Tiers") for tag in scalars)


def _page(folder: Path, step: Any, facts: Any) -> str:
    log = CsvLog(folder, after_step=0)
    for number in range(1, 41):
        log.write(dataclasses.replace(step, step=number))
    return write_report(folder, facts=facts, done=DONE).read_text()


def test_the_report_has_a_section_on_tiers_under_offload_alone(tmp_path: Path) -> None:
    page = _page(tmp_path, OFFLOADED, H200_FACTS)
    titles = re.findall(r"<h[23]>([^<]+)", page)
    section = titles[titles.index("Tiers") + 1 : titles.index("Memory")]
    assert section == [
        "Copies per link, mean over the step",
        "Exposed per step",
        "Chunks",
        "Passes per step",
        "State in host memory",
    ]
    assert "ceiling of one way <b>54.5 GB/s</b>" in page
    assert "share of the trained parameters <b>48%</b>" in page
    # Of a run that was killed the device is not known, nor its ceiling.
    assert "ceiling" not in write_report(tmp_path).read_text()
    assert "<h2>Tiers</h2>" in write_report(tmp_path).read_text()


def test_the_report_of_a_run_without_offload_has_no_such_section(tmp_path: Path) -> None:
    assert "Tiers" not in _page(tmp_path, STEP, FACTS)


def test_a_share_of_the_step_is_of_its_own_step(tmp_path: Path) -> None:
    # The first step warms up, and what it waits for is not measured.
    log = CsvLog(tmp_path, after_step=0)
    log.write(dataclasses.replace(STEP, step=1, step_ms=10_000.0, exposed_comm_ms=None))
    log.write(dataclasses.replace(STEP, step=2, step_ms=100.0, exposed_comm_ms=25.0))
    assert "share of the step <b>25%</b>" in write_report(tmp_path, facts=FACTS).read_text()
