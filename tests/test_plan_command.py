"""`zs plan`: what it prints, and that what it advises holds."""

import re
import subprocess
import sys

import pytest

from zero_strategy.experiments.cli import main
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.plan import plan
from zero_strategy.telemetry import text

LABELS = ("run", "on", "units", "gpu", "host", "step", "limit", "change")


def printed(*words: str) -> dict[str, str]:
    """Lines of a plan by label; lines without one belong to the label above."""
    sections: dict[str, str] = {}
    label = ""
    for line in plan_text(*words).splitlines():
        label = line[:7].strip() or label
        sections[label] = f"{sections.get(label, '')}{line[7:]}\n"
    return sections


def plan_text(*words: str) -> str:
    file, *overrides = words
    return plan(load_config(file, overrides), machine="h200")


def gib(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"MiB": 1 / 1024, "GiB": 1, "KiB": 1 / 1024**2}[unit]


def test_a_plan_without_offload_shows_none_on_the_host():
    sections = printed("gpt_3.4b.yaml")
    assert list(sections) == [label for label in LABELS if label != "change"]
    assert sections["host"] == "none\n"
    assert "no offload" in sections["units"]
    assert sections["limit"].startswith("fits")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "zero3_offload"])
def test_purposes_sum_to_the_peak(strategy):
    sections = printed("gpt_15b.yaml", f"trainer.strategy={strategy}")
    for tier in ("gpu", "host"):
        first, *parts = sections[tier].splitlines()
        if first != "none":
            sizes = [re.search(r"  ([\d.]+ [KMG]iB)  ", part) for part in parts]
            in_all = sum(gib(size[1].strip()) for size in sizes if size)
            assert len(parts) == len([s for s in sizes if s])
            # Each is rounded to three digits.
            assert in_all == pytest.approx(gib(" ".join(first.split()[:2])), rel=0.01)


def test_offloaded_state_is_planned_on_the_host_where_the_gpu_is_too_small():
    sections = printed("gpt_15b.yaml", "trainer.strategy=zero3_offload")
    assert "weights and moments" in sections["host"]
    assert "where every step is clipped" in sections["step"]
    assert re.search(r"optimizer state of \d+ in host memory", sections["units"])


def test_only_what_the_gpu_has_no_room_for_is_planned_on_the_host():
    sections = printed("gpt_3.4b.yaml", "trainer.strategy=zero3_offload")
    assert "optimizer state of 0 in host memory (0%)" in sections["units"]
    larger = printed("gpt_15b.yaml", "trainer.strategy=zero3_offload")["units"]
    assert 30 < int(re.search(r"in host memory \((\d+)%\)", larger)[1]) < 70


@pytest.mark.parametrize(
    "words",
    [
        ("gpt_20b.yaml",),
        ("gpt_20b.yaml", "trainer.strategy=zero3_offload"),
        ("gpt_8b.yaml", "trainer.strategy=zero1", "trainer.accumulate=2", "model.recompute=false"),
    ],
)
def test_every_change_that_is_advised_fits(words):
    sections = printed(*words)
    assert sections["limit"].startswith("does not fit")
    for line in sections["change"].splitlines():
        changes = line.partition("  fits:")[0].split()
        assert changes, "a change names settings"
        assert printed(*words, *changes)["limit"].startswith("fits")


def test_a_run_that_nothing_makes_fit_is_told_so():
    sections = printed(
        "gpt_20b.yaml", "model.intermediate_size=524288", "trainer.strategy=zero3_offload"
    )
    assert sections["change"] == "use a machine with more memory, or a smaller model\n"


def test_the_host_share_can_be_set(capsys):
    words = ["plan", "gpt_3.4b.yaml", "trainer.strategy=zero3_offload", "--host-share", "0"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "optimizer state of 0 in host memory (0%)" in printed
    assert "host   none" in printed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["trainer.strategy=ddp", "trainer.init=cpu"], "trainer.strategy = 'ddp': must be zero1"),
        (["--host-share", "0.5"], "host share = 0.5: must be left out without offload"),
        (
            ["trainer.strategy=zero3_offload", "--host-share", "1.5"],
            "host share = 1.5: must be between 0 and 1",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(words, reason, capsys):
    assert main(["plan", "gpt_3.4b.yaml", *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_machine_that_cannot_be_measured_is_refused_with_the_reason(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert main(["plan", "tiny.yaml", "--machine", "this"]) == 2
    assert "cache directory" in capsys.readouterr().err


def test_more_ranks_hold_less_each():
    one, four = printed("gpt_8b.yaml"), printed("gpt_8b.yaml", "trainer.num_nodes=4")
    peaks = [gib(" ".join(sections["gpu"].split()[:2])) for sections in (one, four)]
    assert peaks[1] < peaks[0] / 3
    assert "4 x h200" in four["run"]


def test_ranks_without_a_gpu_are_planned_on_this_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ZERO_STRATEGY_CACHE", str(tmp_path))
    monkeypatch.setattr("zero_strategy.planning.measure.measured.__kwdefaults__", SMALL)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["plan", "tiny.yaml", "--machine", "this"]) == 0
    out = capsys.readouterr().out
    assert "2 x cpu" in out
    assert "limit  fits" in out


SMALL = {"folder": None, "num_params": 1 << 12, "copy_bytes": 1 << 16}


def test_the_largest_plan_needs_neither_lightning_nor_torchs_compiler():
    # What is loaded, not the clock, which others use too: both would take longer than the plan.
    program = (
        "import sys\n"
        "from zero_strategy.experiments.cli import main\n"
        "main(['plan', 'gpt_20b.yaml'])\n"
        "print('loaded', [m for m in ('lightning', 'torch._dynamo') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded []"
    assert text.count(20.33e9) in done.stdout
