"""Benchmarks of offload: two regimes in one process, and what a trace says the GPU waited for."""

import dataclasses
import json

import pytest

from zero_strategy.experiments.benchmarks import run
from zero_strategy.experiments.benchmarks.cases import find_case
from zero_strategy.experiments.benchmarks.offload_cases import HOST, NO_OFFLOAD, offload_cases
from zero_strategy.experiments.benchmarks.result import Findings, Row, result_problems
from zero_strategy.experiments.benchmarks.systems.names import SYSTEMS
from zero_strategy.experiments.benchmarks.trace import summarize
from zero_strategy.experiments.benchmarks.train_step import TINY
from zero_strategy.experiments.benchmarks.workload import Workload


def kernel(name: str, start: float, stop: float, kind: str = "kernel") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": stop - start}


def copy(direction: str, start: float, stop: float) -> dict:
    return kernel(f"Memcpy {direction} (Pinned)", start, stop, "gpu_memcpy")


def test_each_moment_of_a_trace_belongs_to_one_category():
    events = [
        kernel("gemm", 0, 4000),
        kernel("attention", 3000, 5000),  # beside the first
        copy("HtoD", 4500, 7000),  # 2000 of it exposed
        copy("DtoH", 6000, 8000),  # 1000 of it beside nothing else
        kernel("_adam_pass", 7500, 9000),
        kernel("gemm", 10000, 12000),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99000},
        {"ph": "i", "name": "mark", "ts": 0},
    ]
    assert summarize(events, num_steps=2) == {
        "compute": 3.5,
        "copies to the GPU": 1.0,
        "copies to the host": 0.5,
        "optimizer kernels": 0.5,
        "nothing": 0.5,
    }


def test_a_trace_without_a_kernel_says_nothing():
    assert summarize([copy("HtoD", 0, 10)], num_steps=1) == {}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_regimes_follow_each_other_without_overlap(accumulate):
    workload = Workload(
        model=TINY,
        batch_size=1,
        seq_len=8,
        accumulate=accumulate,
        warmup_steps=2,
        steps=4,
        max_norm=1e9,
        traced_steps=2,
        settle_steps=3,
        clipped_steps=5,
    )
    begin = [i for i in range(workload.num_batches) if i % accumulate == 0]
    bounds = [workload.max_norm_at(i) for i in begin]
    assert bounds == [1e9] * 8 + [0.01] * 11
    assert workload.first_clipped == (2 + 4 + 2 + 3) * accumulate
    assert workload.end_clipped == workload.first_clipped + 5 * accumulate
    # Two to trace, and one whose start ends the last of them.
    assert workload.num_batches == workload.end_clipped + 3 * accumulate


def test_a_run_without_clipped_steps_keeps_its_bound():
    workload = Workload(model=TINY, batch_size=1, seq_len=8, warmup_steps=1, steps=2)
    assert {workload.max_norm_at(i) for i in range(workload.num_batches)} == {1.0}
    assert workload.num_batches == 4


def out_of_memory(workload, watch):
    raise MemoryError("tried to allocate 80 GiB")


def test_both_regimes_are_measured_and_a_failing_rival_costs_one_row(tmp_path):
    shape = dataclasses.replace(
        find_case("offload_3b_16k").shape, systems=(HOST, NO_OFFLOAD, "deepspeed broken")
    )
    case = dataclasses.replace(find_case("offload_3b_16k"), shape=shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SYSTEMS, "deepspeed broken", f"{__name__}:out_of_memory")
        patch.setattr(run, "find_case", lambda name: case)
        words = ["offload_3b_16k", "--quick", "--out", str(tmp_path), "--commit", "abc"]
        run.main([*words, "devices=1"])
    tree = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert not result_problems(tree)
    rows = {(row["system"], row["metric"]): row for row in tree["rows"]}
    for system in (HOST, NO_OFFLOAD):
        for metric in ("step time", "clipped step time", "start-up", "host memory"):
            assert rows[system, metric]["median"] > 0
    assert "MemoryError" in rows["deepspeed broken", "loss difference"]["note"]
    assert set(tree["ratios"]) == {"vs no offload", "vs no offload clipped"}


def test_ours_is_compared_to_the_fastest_of_a_kind():
    case = offload_cases()["offload_3b_16k"]
    findings = Findings()
    for system, seconds in (
        (HOST, 1.0),
        ("deepspeed zero2 offload", 3.0),
        ("deepspeed zero3 params offload", 2.5),
    ):
        findings.rows.append(Row.of(system, "step time", "s", [seconds], "x"))
    case.compare(findings)
    assert findings.ratios == {"vs deepspeed": 2.5}


def test_every_system_of_a_case_is_known():
    for case in offload_cases().values():
        assert set(case.shape.systems) | set(case.limits) <= set(SYSTEMS)
