"""The case `checkpoint_speed`: its rows and its ratio, and a size that the disk has room for."""

import json
from pathlib import Path

import pytest

from zero_strategy.experiments.benchmarks import checkpoint_speed, run
from zero_strategy.experiments.benchmarks.checkpoint_speed import DCP, fitting
from zero_strategy.experiments.benchmarks.result import OURS, result_problems


def test_a_quick_run_times_saves_beside_dcp_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["checkpoint_speed", "--quick", "devices=1", "--out", "out", "--commit", "abc"]
    run.main(words)
    (file,) = (tmp_path / "out").iterdir()
    result = json.loads(file.read_text())
    assert result_problems(result) == []
    rows = {(row["system"], row["metric"]): row for row in result["rows"]}
    ours, rival = rows[OURS, "save"], rows[DCP, "save"]
    assert result["ratios"] == {"vs dcp": pytest.approx(ours["median"] / rival["median"], rel=1e-3)}
    assert rows[OURS, "stall"]["min"] >= rows[OURS, "stall: calling thread"]["min"] > 0
    for metric in ("stall over copy time", "save without checksums", "checksum cost"):
        assert rows[OURS, metric]["runs"] == 1
    assert list((tmp_path / checkpoint_speed.FOLDER).iterdir()) == []


def test_the_size_is_halved_until_the_disk_has_room() -> None:
    assert fitting(3_400_000_000, 60 << 30) == 3_400_000_000
    assert fitting(3_400_000_000, 40 << 30) == 1_700_000_000
