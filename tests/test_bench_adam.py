"""The case `adam_cpu`: parity comes first, a rival that is absent or wrong costs its own rows."""

import dataclasses
import json
import os

import pytest

from zero_strategy.experiments.benchmarks import run
from zero_strategy.experiments.benchmarks.adam_cpu import (
    PARITY_TOLERANCE,
    has_vectors,
    parity_problem,
    thread_counts,
)
from zero_strategy.experiments.benchmarks.adam_systems import (
    DEEPSPEED,
    OURS,
    TORCH,
    check_threads,
    metric_of,
)
from zero_strategy.experiments.benchmarks.cases import find_case
from zero_strategy.experiments.benchmarks.launch import Launcher
from zero_strategy.experiments.benchmarks.result import result_problems

THREADS = thread_counts(len(os.sched_getaffinity(0)))
SPEEDS = {metric_of("speed", count) for count in THREADS}

ABSENT = "raise ModuleNotFoundError(\"No module named 'deepspeed'\")"
# Torch's AdamW behind DeepSpeed's name and arguments.
STAND_IN = """
import torch

class DeepSpeedCPUAdam(torch.optim.AdamW):
    def __init__(self, params, *, adamw_mode, lr, **options):
        assert adamw_mode
        super().__init__(params, lr={factor} * lr, **options)
"""


@pytest.fixture
def give_deepspeed(tmp_path, monkeypatch):
    """Let workers find a DeepSpeed of this source, whether one is installed or not."""

    def give(source):
        package = tmp_path / "packages" / "deepspeed"
        (package / "ops").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "ops" / "__init__.py").touch()
        (package / "ops" / "adam.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    return give


def rows_of(result, system):
    return {row["metric"]: row for row in result["rows"] if row["system"] == system}


def quick(*systems):
    case = dataclasses.replace(find_case("adam_cpu").quick(), systems=systems)
    findings = case.measure(Launcher(num_ranks=1, time_limit_s=200))
    return findings, {(row.system, row.metric): row for row in findings.rows}


def test_a_quick_run_without_deepspeed_measures_ours_and_torch(give_deepspeed, tmp_path):
    give_deepspeed(ABSENT)
    run.main(["adam_cpu", "--quick", "devices=1", "--out", str(tmp_path), "--commit", "abc"])
    (file,) = tmp_path.glob("adam_cpu_*.json")
    result = json.loads(file.read_text())
    assert result_problems(result) == []
    most = THREADS[-1]
    extras = {metric_of(name, most) for name in ("commit and preview", "preview")}
    ours, torch_rows = rows_of(result, OURS), rows_of(result, TORCH)
    assert ours.keys() == {"weight difference"} | SPEEDS | extras
    assert torch_rows.keys() == SPEEDS | {metric_of("step alone", most)}
    assert all(ours[speed]["runs"] >= 5 for speed in SPEEDS)
    assert "2 bytes of gradient in and 2 of weights out" in ours[metric_of("speed", 1)]["note"]
    if has_vectors():
        assert ours["weight difference"]["max"] == 0
        assert "same bits of weights and moments" in ours["weight difference"]["note"]
    (absent,) = rows_of(result, DEEPSPEED).values()
    assert absent["note"] == "failed: ModuleNotFoundError: No module named 'deepspeed'"
    assert result["ratios"].keys() == {f"vs {TORCH}", f"vs {TORCH} 1 thread"}
    for key, count in ((f"vs {TORCH}", most), (f"vs {TORCH} 1 thread", 1)):
        mine, theirs = (rows[metric_of("speed", count)]["median"] for rows in (ours, torch_rows))
        assert result["ratios"][key] == pytest.approx(mine / theirs, rel=1e-3)


def test_deepspeed_is_built_and_checked_before_it_is_timed(give_deepspeed):
    give_deepspeed(STAND_IN.format(factor=1))
    findings, rows = quick(DEEPSPEED)
    metrics = [row.metric for row in findings.rows]
    assert metrics[:2] == ["build", "weight difference"]
    assert set(metrics[2:]) == SPEEDS | {metric_of("step alone", THREADS[-1])}
    assert rows[DEEPSPEED, "weight difference"].max <= PARITY_TOLERANCE
    assert "cast to fp32" in rows[DEEPSPEED, metric_of("speed", 1)].note
    assert not findings.broken


def test_a_rival_of_other_arithmetic_is_not_timed(give_deepspeed):
    give_deepspeed(STAND_IN.format(factor=1.001))
    findings, rows = quick(DEEPSPEED)
    assert [metric for _, metric in rows] == ["build", "weight difference"]
    assert rows[DEEPSPEED, "weight difference"].max > PARITY_TOLERANCE
    assert any("not timed" in line for line in findings.broken)


def test_ours_without_its_c_kernel_is_broken_and_not_timed(monkeypatch):
    monkeypatch.setenv("ZERO_STRATEGY_ADAM", "reference")
    findings, rows = quick(OURS)
    assert "must run in C" in rows[OURS, "weight difference"].note
    assert findings.broken == [f"{OURS}: no {metric_of('speed', THREADS[-1])}"]
    assert findings.ratios == {}


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4]), (96, [1, 2, 4, 8, 16])]
)
def test_no_more_threads_than_cores_are_measured(cores, counts):
    assert thread_counts(cores) == counts


@pytest.mark.parametrize("gap", [1e-3, float("nan"), float("inf")])
def test_weights_apart_or_not_finite_are_no_parity(gap):
    good = {"gaps": [0.0, 1e-7], "same_bits": False}
    assert parity_problem(good, bitwise=False) == ""
    assert "bits" in parity_problem(good, bitwise=True)
    assert "differ" in parity_problem(good | {"gaps": [0.0, gap]}, bitwise=False)


def test_threads_that_were_not_asked_for_are_an_error():
    check_threads("speed", 2, cpu_s=6.1, wall_s=3.0)
    with pytest.raises(RuntimeError, match=r"speed: 16\.0 cores were at work, must be 1"):
        check_threads("speed", 1, cpu_s=48.0, wall_s=3.0)


def test_several_ranks_are_refused():
    with pytest.raises(ValueError, match="devices=1"):
        find_case("adam_cpu").measure(Launcher(num_ranks=2))
