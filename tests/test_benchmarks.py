"""Benchmarks: a failure costs one row, results keep their shape, README figures are measured."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from zero_strategy.experiments.benchmarks import (
    gpu_session,
    host_syncs,
    readme,
    run,
    validate_then_fit,
)
from zero_strategy.experiments.benchmarks.cases import NAMES, find_case
from zero_strategy.experiments.benchmarks.launch import Launcher, plain_reason
from zero_strategy.experiments.benchmarks.machine import slug
from zero_strategy.experiments.benchmarks.result import Findings, Row, result_problems
from zero_strategy.experiments.benchmarks.systems.names import SYSTEMS
from zero_strategy.experiments.benchmarks.train_step import TINY
from zero_strategy.experiments.benchmarks.watch import StepTimes
from zero_strategy.experiments.benchmarks.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
OURS = "zero_strategy zero3"


# Systems and functions that fail in a worker, each in its own way.


def out_of_memory(workload, watch):
    raise MemoryError("tried to allocate 80 GiB\nand more lines")


def learns_something_else(workload, watch):
    for index in range(workload.num_batches):
        watch.begin(index)
        watch.saw(torch.tensor(1.0))


def sleep(seconds):
    time.sleep(seconds)


def die(code):
    import os

    os._exit(code)


def fail_on_rank_1():
    import os

    if os.environ["RANK"] == "1":
        raise ValueError("only here")
    time.sleep(60)


# A dry run.


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory) -> dict:
    """The small training case on two CPU ranks, with a rival that fails and one that is wrong."""
    out = tmp_path_factory.mktemp("results")
    systems = (OURS, "fsdp2", "broken", "wrong")
    case = dataclasses.replace(find_case("train_step_small"), systems=systems)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SYSTEMS, "broken", f"{__name__}:out_of_memory")
        patch.setitem(SYSTEMS, "wrong", f"{__name__}:learns_something_else")
        patch.setattr(run, "find_case", lambda name: case)
        words = ["train_step_small", "--quick", "--out", str(out), "--commit", "abc", "devices=2"]
        with pytest.raises(SystemExit):
            run.main(words)
    (file,) = out.iterdir()
    assert file.name == "train_step_small_cpu.json"
    return json.loads(file.read_text())


def rows_of(result: dict, system: str) -> dict[str, dict]:
    return {row["metric"]: row for row in result["rows"] if row["system"] == system}


def test_a_dry_run_writes_a_valid_result(dry_run):
    assert result_problems(dry_run) == []
    assert dry_run["case"] == "train_step_small"
    assert dry_run["commit"] == "abc"
    assert "torch" in dry_run["versions"]


def test_ours_and_the_rival_are_timed_after_learning_the_same(dry_run):
    for system in (OURS, "fsdp2"):
        rows = rows_of(dry_run, system)
        # The same operations on the same two shards; bf16 leaves no more.
        assert rows["loss difference"]["max"] <= 0.02
        assert rows["step time"]["runs"] == 3
        assert "side by side" in rows["step time"]["note"]
        assert rows["step time"]["min"] > 0
    ours, rival = (rows_of(dry_run, s)["step time"]["median"] for s in (OURS, "fsdp2"))
    assert dry_run["ratios"]["vs fsdp2"] == pytest.approx(rival / ours, rel=1e-3)


def test_a_failing_rival_is_a_row_with_its_reason(dry_run):
    (row,) = rows_of(dry_run, "broken").values()
    assert row["median"] is None
    assert row["note"] == "failed: MemoryError: tried to allocate 80 GiB"
    assert "vs broken" not in dry_run["ratios"]


def test_a_system_that_learns_something_else_is_not_timed(dry_run):
    (row,) = rows_of(dry_run, "wrong").values()
    assert row["metric"] == "loss difference"
    assert row["max"] > 1
    assert "vs wrong" not in dry_run["ratios"]


def test_processes_one_after_the_other_are_timed_too():
    case = dataclasses.replace(find_case("train_step_3b").quick(), systems=(OURS, "fsdp2"))
    findings = case.measure(Launcher(num_ranks=1, time_limit_s=120))
    assert findings.ratios["vs fsdp2"] > 0
    assert not findings.broken


def dies_in_its_second_turn(workload, watch):
    for index in range(workload.num_batches):
        if index == workload.num_batches // 2:
            die(3)
        watch.begin(index)


def only_waits(workload, watch):
    for index in range(workload.num_batches):
        watch.begin(index)


def test_a_system_that_dies_in_its_turn_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setitem(SYSTEMS, "dies", f"{__name__}:dies_in_its_second_turn")
    monkeypatch.setitem(SYSTEMS, "waits", f"{__name__}:only_waits")
    case = dataclasses.replace(find_case("train_step_small").quick(), rounds=4, processes=2)
    findings = Findings()
    reports = case._time_in_turns(Launcher(num_ranks=1), ["dies", "waits"], findings)
    assert [row.note for row in findings.rows] == ["failed: exit code 3 without a report"]
    assert reports.keys() == {"waits"}
    assert [len(report["step_s"]) for report in reports["waits"]] == 2 * [4 * case.steps]


# Launching.


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (sleep, {"seconds": 60}, "time-out: not finished within 4 s"),
        (die, {"code": 3}, "exit code 3 without a report"),
        (fail_on_rank_1, {}, "ValueError: only here"),
    ],
)
def test_a_failure_of_any_rank_comes_back_as_a_reason(function, arguments, reason):
    launcher = Launcher(num_ranks=2)
    timeout_s = 4.0 if function is sleep else 50.0
    assert launcher.run(function, timeout_s=timeout_s, **arguments).reason == reason


def test_nothing_is_started_after_the_time_limit():
    report = Launcher(time_limit_s=0.0).run(sleep, timeout_s=60.0, seconds=60)
    assert report.reason.startswith("time-out")


def test_a_reason_names_no_folder_and_stays_short():
    assert plain_reason("OSError: /home/me/x/model.bin: gone") == "OSError: model.bin: gone"
    assert len(plain_reason("x" * 1000)) == 200


# The command.


def test_words_set_whole_numbers_of_a_case():
    case, devices = run.configured(
        find_case("train_step_3b"), ["rounds=1", "steps=7", "devices=2"], quick=False
    )
    assert (case.rounds, case.steps, devices) == (1, 7, 2)


@pytest.mark.parametrize("word", ["round=1", "rounds=0", "rounds=x", "systems=fsdp2", "tiny=1"])
def test_a_wrong_word_is_refused_by_name(word):
    with pytest.raises(ValueError, match=word.partition("=")[0]):
        run.configured(find_case("train_step_3b"), [word], quick=False)


@pytest.mark.parametrize("name", NAMES)
def test_every_case_has_a_quick_form_of_itself(name):
    case = find_case(name)
    assert type(case.quick()) is type(case)


def test_an_unknown_case_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="train_step_small"):
        run.main(["train_step_smal"])


def test_the_table_of_cases_is_shown_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "zero_strategy.experiments.benchmarks.run", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert all(name in done.stdout for name in NAMES)


# Waits of the host.


def event(name, start, *, gpu=False, parent=None):
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        time_range=SimpleNamespace(start=start, end=start + 1),
        cpu_parent=parent and SimpleNamespace(name=parent),
    )


def test_waits_are_counted_between_the_marks_and_named_by_their_caller():
    events = [
        event("cudaDeviceSynchronize", 1),  # the profiler's own, at its start
        event(host_syncs.MARK, 10),
        event("cudaStreamSynchronize", 20, parent="aten::item"),
        event("cudaStreamSynchronize", 30, parent="aten::item"),
        event("cudaLaunchKernel", 31),
        event(host_syncs.PAGEABLE_COPY, 60, gpu=True),
        event(host_syncs.MARK, 50),
        event(host_syncs.MARK, 5, gpu=True),
        event("cudaDeviceSynchronize", 70),
    ]
    counts, callers = host_syncs.count_waits(events)
    assert counts == {"host syncs": 2, "kernel launches": 1, host_syncs.BLOCKING_COPIES: 1}
    assert callers["host syncs"] == {"cudaStreamSynchronize in aten::item": 2}


def test_host_syncs_are_profiled_in_a_fit_and_in_a_plain_loop(tmp_path):
    run.main(["host_syncs", "--quick", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "host_syncs_cpu.json").read_text())
    for system in (OURS, "fsdp2", "lightning model_parallel"):
        assert rows_of(result, system)["host syncs"]["median"] == 0


def short_job() -> Workload:
    return Workload(model=TINY, batch_size=1, seq_len=8, warmup_steps=1, steps=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_wait_for_a_gpu_is_seen_and_a_background_copy_is_none():
    job = short_job()
    value, pinned = torch.ones(1000, device="cuda"), torch.empty(1000, pin_memory=True)
    seen = []
    for wait in (False, True):
        watch = host_syncs.HostSyncs(job)
        for index in range(job.num_batches):
            watch.begin(index)
            pinned.copy_(value + 1, non_blocking=True)
            if wait:
                value.cpu()
        seen.append(watch.report()["per_batch"])
    quiet, waiting = seen
    assert quiet["kernel launches"] == waiting["kernel launches"] == 1
    assert (quiet["host syncs"], quiet[host_syncs.BLOCKING_COPIES]) == (0, 0)
    assert (waiting["host syncs"], waiting[host_syncs.BLOCKING_COPIES]) == (1, 1)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_step_times_are_the_gpu_s_and_cost_no_wait():
    job, watch = short_job(), StepTimes(short_job())
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    square @ square
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(job.num_batches):
            watch.begin(index)
            # The last measured steps have four times the products of the first.
            for _ in range(10 if index <= 2 else 40):
                square @ square
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report = watch.report()
    short, _, long, _ = report["step_s"]
    assert short > 1e-3
    # Clocks of a GPU vary by some percent.
    assert long == pytest.approx(4 * short, rel=0.3)
    assert report["peak_bytes"] >= 2 * square.nbytes


# Validate, fit, validate.


def test_all_stages_agree_when_evaluation_surrounds_a_fit(tmp_path):
    run.main(["validate_then_fit_nccl", "--quick", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "validate_then_fit_nccl_cpu.json").read_text())
    for moment in validate_then_fit.MOMENTS:
        assert all(rows_of(result, f"zero_strategy zero{s}")[moment]["runs"] for s in (1, 2, 3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.0])
def test_a_loss_that_is_not_finite_or_apart_is_told(bad):
    before, training, after = validate_then_fit.MOMENTS
    good = {before: [4.0], training: [4.0, 3.5], after: [3.4]}
    wrong = good | {training: [4.0, bad]}
    assert validate_then_fit.losses_apart("zero2", good, good) == []
    assert training in validate_then_fit.losses_apart("zero2", wrong, good)[0]
    worse = good | {after: [4.1]}
    assert "rose" in validate_then_fit.losses_apart("zero2", worse, worse)[0]


# The session on a GPU machine.


def test_the_session_runs_the_tests_that_wait_for_a_gpu():
    names = [test.rpartition("::")[2] for test in gpu_session.gpu_tests()]
    assert "test_step_times_are_the_gpu_s_and_cost_no_wait" in names
    assert "test_events_see_the_work_of_a_gpu_and_not_its_queueing" in names


def test_the_session_ends_what_takes_too_long_and_goes_on(monkeypatch):
    monkeypatch.setattr(gpu_session, "MARGIN_S", 0.0)
    python = [sys.executable, "-c"]
    slow = gpu_session.run_part("slow", [*python, "import time; time.sleep(60)"], 1.0)
    assert slow.state == "time-out"
    assert slow.seconds < 20
    assert gpu_session.run_part("fine", [*python, ""], 30.0).state == "ok"
    assert gpu_session.run_part("late", [*python, ""], -1.0).state == "no time left"


def test_the_summary_shows_medians_failures_and_ratios(tmp_path):
    (tmp_path / "case_gpu.json").write_text(json.dumps(good_result()))
    outcome = gpu_session.Outcome(name="case", seconds=7.0, state="ok")
    lines = gpu_session.summary([outcome], tmp_path).splitlines()
    assert any("2 s" in line and "1 .. 3" in line for line in lines)
    assert any("failed: time-out" in line for line in lines)
    assert "  vs fsdp2 memory: 1.100" in lines


# Result files.


def good_result() -> dict:
    row = {
        "system": OURS,
        "metric": "step time",
        "unit": "s",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "runs": 3,
        "note": "",
    }
    failed = row | dict.fromkeys(("median", "min", "max")) | {"system": "fsdp2", "runs": 0}
    return {
        "case": "train_step_3b",
        "date": "2026-01-31",
        "commit": "abc",
        "hardware": "1 x GPU",
        "versions": {"torch": "2.13.0"},
        "rows": [row, failed | {"note": "failed: time-out"}],
        "ratios": {"vs fsdp2 memory": 1.1},
    }


def set_at(tree, path, value):
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["case"], ""),
        (["date"], "31.1.2026"),
        (["versions"], {"torch": 2}),
        (["rows"], []),
        (["rows", 0, "median"], None),
        (["rows", 0, "median"], float("nan")),
        (["rows", 0, "max"], 1.5),
        (["rows", 0, "runs"], 0),
        (["rows", 0, "runs"], True),
        (["rows", 0, "extra"], 1),
        (["rows", 1, "note"], " "),
        (["rows", 1, "system"], OURS),
        (["ratios", "vs megatron"], 2.0),
        (["ratios", "vs fsdp2"], 0.0),
        (["more"], 1),
    ],
)
def test_a_result_that_breaks_the_shape_is_found(path, value):
    result = good_result()
    assert result_problems(result) == []
    set_at(result, path, value)
    assert result_problems(result)


def test_medians_and_extremes_come_from_the_values():
    row = Row.of("a", "b", "s", [3.0, 1.0, 1.234567, 9.0], "")
    assert (row.median, row.min, row.max, row.runs) == (2.1173, 1.0, 9.0, 4)
    findings = Findings(rows=[row, Row.failed("c", "b", "s", "gone")])
    assert findings.median("a", "b") == 2.1173
    assert findings.median("c", "b") is None


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA H200", 2, "h200_x2"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx_4090"),
        ("AMD Instinct MI300X", 8, "mi300x_x8"),
    ],
)
def test_a_device_has_a_short_name_for_files(name, count, expected):
    assert slug(name, count) == expected


def test_committed_results_have_the_shape_and_name_their_commit():
    for name, result in readme.committed_results().items():
        assert result_problems(result) == [], name
        assert name.startswith(f"{result['case']}_"), name
        assert re.fullmatch(r"[0-9a-f]{7,40}", result["commit"]), name


# The README.


def test_the_table_shows_speed_losses_and_failures():
    result = good_result()
    result["rows"].append(result["rows"][0] | {"metric": "speed", "median": 8192.0})
    table = readme.measured_table([result])
    assert "| zero_strategy zero3 | 2 (1-3) | 8,192 | - | - |" in table
    assert "| fsdp2 | failed: time-out |" in table
    assert readme.measured_table([]) == ""


def test_a_document_takes_the_table_between_its_marks():
    text = f"a\n{readme.BEGIN}\nold\n{readme.END}\nb\n"
    once = readme.with_table(text, "| new |")
    assert once == f"a\n{readme.BEGIN}\n\n| new |\n\n{readme.END}\nb\n"
    assert readme.with_table(once, "| new |") == once
    with pytest.raises(ValueError, match="must hold the lines"):
        readme.with_table("no marks", "")


def test_the_readme_shows_the_committed_results_and_no_other_figure():
    document = ROOT / "README.md"
    if not document.exists():
        pytest.skip("no README yet")
    text = document.read_text()
    table = readme.measured_table(readme.committed_results().values())
    assert text == readme.with_table(text, table), "run ...benchmarks.readme README.md"
    outside = text.replace(table, "") if table else text
    measured = re.compile(r"\d\s?(ms|s|GiB|tokens/s|TFLOP/s|x (faster|smaller|slower|larger))\b")
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert not [line for line in rows if measured.search(line)]
