"""The case `checkpoint_faults`: a small part of its faults, and that it tells what goes wrong."""

import dataclasses
import json
from pathlib import Path

import pytest

from zero_strategy.experiments.benchmarks import faults_rows, readme, run
from zero_strategy.experiments.benchmarks.faults_hostile import CONFIGURATIONS
from zero_strategy.experiments.benchmarks.faults_versions import save, tensors, version_of
from zero_strategy.experiments.benchmarks.result import Findings, result_problems

EXACTLY = {
    "kills: previous checkpoint loads": 100,
    "kills: torn loads": 0,
    "damaged: detected or value-equal": 100,
    "damaged: silent": 0,
    "disk faults: raised on all ranks": 100,
    "disk faults: earlier checkpoint intact": 100,
    "reshape: bit-equal": 100,
    "resume: bit-equal": 100,
    "crafted: executed": 0,
}
AT_LEAST = {
    "kills": 40,
    "damaged": 100,
    "disk faults": 10,
    "reshape: pairs": 4,
    "resume: cases": 2,
    "crafted: checkpoints": 7,
    "crafted: configurations": 4,
}


def test_a_small_part_of_the_faults_loses_nothing(tmp_path: Path) -> None:
    run.main(
        ["checkpoint_faults", "--quick", "devices=1", "--out", str(tmp_path), "--commit", "abc"]
    )
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert result_problems(result) == []
    found = {row["metric"]: row["median"] for row in result["rows"]}
    assert {metric: found[metric] for metric in EXACTLY} == EXACTLY
    assert all(found[metric] >= least for metric, least in AT_LEAST.items())
    assert found["disk faults: slowest error"] <= faults_rows.LONGEST_SAVE_S


def test_there_are_forty_hostile_configurations_and_more() -> None:
    assert len(set(CONFIGURATIONS)) >= 40


def test_a_mixture_of_two_versions_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 5)
    assert version_of(path) == 5
    monkeypatch.setattr(
        "zero_strategy.experiments.benchmarks.faults_versions.tensors",
        lambda version, num_rows: tensors(version, num_rows) | {"model.b": tensors(6)["model.b"]},
    )
    assert version_of(path) is None


def test_a_loss_and_a_mixture_are_broken_and_told() -> None:
    findings = Findings()
    found = {"kills": {"later x 1": 4}, "points": 3, "lost": ["it is gone"], "torn": ["mixed"]}
    faults_rows.kills(faults_rows.Rows(findings), found)
    rows = {row.metric: row.median for row in findings.rows}
    assert rows["kills: previous checkpoint loads"] == 75.0
    assert rows["kills: torn loads"] == 1
    assert {"it is gone", "mixed"} <= set(findings.broken)


def test_a_slow_error_is_broken() -> None:
    findings = Findings()
    rows = faults_rows.Rows(findings)
    rows.add_limited("fast", 4.9, 5.0, "")
    assert findings.broken == []
    rows.add_limited("slow", 5.1, 5.0, "")
    assert findings.broken == ["slow = 5.1 s: must be at most 5 s"]


def test_the_readme_shows_a_line_for_each_kind_of_fault() -> None:
    findings = Findings()
    rows = faults_rows.Rows(findings)
    faults_rows.kills(rows, {"kills": {"later x 1": 4}, "points": 3, "lost": [], "torn": []})
    rows.add_limited("restarts: slowest", float("inf"), 20.0, "")
    result = {
        "case": "checkpoint_faults",
        "hardware": "2 CPU cores",
        "rows": [dataclasses.asdict(row) for row in findings.rows],
    }
    table = readme.measured_table([result]).splitlines()
    figures = "4 cases, previous checkpoint loads 100 %, torn loads 0 cases"
    assert table[2] == f"| checkpoints under faults; 2 CPU cores | kills | {figures} |"
    assert "slowest failed: it never came" in table[3]
