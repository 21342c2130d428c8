"""`Monitor` on a run whose optimizer state is offloaded, and on one whose is not."""

import contextlib
import csv
import io
import re
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import zero_strategy.offloading
from tests import lit
from tests.ranks import ranks
from zero_strategy import Monitor, OffloadConfig, ZeroStrategy
from zero_strategy.telemetry.csv_log import STEP_COLUMNS

OFFLOAD_COLUMNS = tuple(c for c in STEP_COLUMNS if c.startswith(("host_", "offload_")))


def _train(
    out: str, offloads: bool, *, room: int = 0, resume: str | None = None, steps: int = 6
) -> tuple[str, int]:
    """Return what was printed, and this rank's parameters."""
    config = OffloadConfig(chunk_elements=512, threads=1) if offloads else None
    strategy = ZeroStrategy(stage=3, offload=config)
    saved = ModelCheckpoint(Path(out) / "checkpoints", every_n_train_steps=4, save_top_k=-1)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(zero_strategy.offloading, "device_room", lambda _: room)
        run = lit.trainer(
            strategy,
            max_steps=steps,
            precision="bf16-mixed",
            callbacks=[Monitor(out, every=2), saved],
            enable_checkpointing=True,
            gradient_clip_val=1.0,
        )
        module = lit.Lit()
        run.fit(module, lit.loader(), ckpt_path=resume)
    return printed.getvalue(), sum(p.numel() for p in module.parameters())


def _rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def _board(out: Path) -> tuple[set[str], bytes]:
    """Names of the scalars, and the layout."""
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    (layout,) = board.Tensors("custom_scalars__config__")
    return set(board.Tags()["scalars"]), layout.tensor_proto.string_val[0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_figures_of_all_ranks_are_brought_together(tmp_path: Path, world_size: int) -> None:
    outcomes = ranks(world_size).run(_train, str(tmp_path), True)
    (_, num_params), *others = outcomes
    assert not any("step" in printed for printed, _ in others)
    rows = _rows(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "4", "6"]
    # Shards add up to the model; gradients of several ranks are sums, which are kept in fp32.
    per_rank = num_params / world_size
    for row in rows:
        assert float(row["host_share"]) == 1
        assert float(row["host_state_bytes"]) >= 12 * per_rank
        grad_bytes = 2 if world_size == 1 else 4
        assert float(row["offload_down_bytes"]) == pytest.approx(grad_bytes * per_rank)
        assert float(row["offload_exposed_ms"]) <= float(row["step_ms"])
        assert float(row["offload_stream_passes"]) == 0
        assert row["offload_waiting"]
        assert row["offload_redone"]
        assert row["offload_slot_wait_ms"]
    # The passes of the first step may come after it.
    assert all(float(row["offload_cpu_passes"]) > 0 for row in rows[1:])


def test_terminal_board_and_report_show_the_tiers(tmp_path: Path) -> None:
    ((printed, _),) = ranks(1).run(_train, str(tmp_path), True)
    steps = [line for line in printed.splitlines() if line.startswith("step")]
    assert len(steps) == 4
    for line in steps:
        assert re.search(
            r"\| exposed 0% \| offload exposed +[\d.]+% \| on host 100% \| eta ", line
        ), line
    assert "note" not in printed
    scalars, layout = _board(tmp_path)
    assert {"Tiers/exposed_ms", "Tiers/to_host_gb_per_s", "Tiers/waiting_chunks"} <= scalars
    # No such link was measured.
    assert "Tiers/ceiling_gb_per_s" not in scalars
    assert b"Tiers" in layout
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Tiers</h2>" in page
    assert "ceiling" not in page


def test_without_offload_nothing_speaks_of_tiers(tmp_path: Path) -> None:
    ((printed, _),) = ranks(1).run(_train, str(tmp_path), False)
    assert "offload exposed" not in printed
    assert "on host" not in printed
    scalars, layout = _board(tmp_path)
    assert not any("Tiers" in tag for tag in scalars)
    assert b"Tiers" not in layout
    assert "Tiers" not in (tmp_path / "report.html").read_text()
    assert not any(row[column] for row in _rows(tmp_path) for column in OFFLOAD_COLUMNS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_that_moves_to_the_device_is_told_once(tmp_path: Path, world_size: int) -> None:
    ((printed, num_params), *_) = ranks(world_size).run(_train, str(tmp_path), True, room=10**9)
    lines = printed.splitlines()
    (note,) = (line for line in lines if line.startswith("note"))
    moved = re.match(
        r"note   ([\d.]+) KiB of optimizer state per rank moved from host memory to the device, "
        r"which had room; 0% is on the host",
        note,
    )
    assert moved, note
    assert float(moved[1]) == pytest.approx(12 * num_params / world_size / 2**10, rel=0.05)
    assert lines[lines.index(note) + 1].startswith("step   1/6")
    assert all("on host 0%" in line for line in lines if line.startswith("step"))
    assert [float(row["host_share"]) for row in _rows(tmp_path)] == [0.0] * 4


def test_a_resumed_run_goes_on_in_the_same_file_with_and_without_offload(tmp_path: Path) -> None:
    ranks(1).run(_train, str(tmp_path), True)
    before = _rows(tmp_path)
    (at_four,) = (tmp_path / "checkpoints").iterdir()
    ranks(1).run(_train, str(tmp_path), False, resume=str(at_four), steps=8)
    rows = _rows(tmp_path)
    assert [row["step"] for row in rows] == ["1", "2", "4", "5", "6", "8"]
    assert rows[:3] == before[:3]
    assert [bool(row["host_share"]) for row in rows] == [True] * 3 + [False] * 3
    # What was measured before is still on the page.
    assert "<h2>Tiers</h2>" in (tmp_path / "report.html").read_text()
