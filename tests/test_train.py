"""`zs train` from the command line, and the other commands of `zs`."""

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.small_run import SHORT, zs_train
from zero_strategy.config import GuardConfig
from zero_strategy.experiments import train as training
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.rules import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def zs(folder, *words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "zero_strategy.experiments.cli", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(output):
    return [int(number) for number in re.findall(r"^step +(\d+)/", output, re.MULTILINE)]


def test_two_processes_train_finish_resume_and_say_when_there_is_nothing_to_do(tmp_path):
    words = ["train", "tiny.yaml", *SHORT, "out_dir=run"]
    first = zs(tmp_path, *words, "trainer.max_steps=4")
    run = tmp_path / "run"
    assert "2 x cpu · zero3" in first
    assert steps(first) == [1, 2, 3, 4]
    assert len(re.findall(r"^val +\d+ .* bits/byte", first, re.MULTILINE)) == 2
    assert re.search(r"^sample Hello.", first, re.MULTILINE)
    assert (run / "checkpoints/last.ckpt").is_dir()
    assert (run / "checkpoints/best.ckpt").is_dir()
    assert load_config(run / "config.yaml").trainer.max_steps == 4
    assert list(run.glob("tensorboard/events.*"))
    assert (run / "report.html").exists()
    assert json.loads((run / "finished.json").read_text()) == {"step": 4}

    again = zs(tmp_path, *words, "trainer.max_steps=4")
    assert again.startswith("run is finished at step 4. Raise trainer.max_steps")
    assert again.count("\n") == 1

    longer = zs(tmp_path, *words, "trainer.max_steps=6")
    assert "resume run/checkpoints/last.ckpt · trainer.max_steps = 6, was 4\n" in longer
    assert steps(longer) == [5, 6]

    zs(tmp_path, "checkpoint", "export", "run/checkpoints/last.ckpt", "run/w.ckpt")
    weights = torch.load(run / "w.ckpt", weights_only=False)["state_dict"]
    assert weights["gpt.embed.weight"].shape == (257, 16)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
class TestOneProcess:
    def test_validation_bits_per_byte_fall(self, tmp_path, capsys):
        words = ["trainer.max_steps=30", "trainer.val_every=10", "trainer.val_batches=8"]
        code, output, _ = zs_train(capsys, tmp_path, *words)
        bits = [float(b) for b in re.findall(r"([\d.]+) bits/byte$", output, re.MULTILINE)]
        assert code == 0
        assert len(bits) == 3
        assert bits[-1] < bits[0] - 0.3

    def test_another_model_in_the_same_folder_is_refused(self, tmp_path, capsys):
        assert zs_train(capsys, tmp_path, "trainer.max_steps=2")[0] == 0
        words = ["trainer.max_steps=3", "model.num_layers=3", "seed=5"]
        code, _, problems = zs_train(capsys, tmp_path, *words)
        assert code == 2
        assert f"model.num_layers = 3: must be 2 as in {tmp_path / 'config.yaml'}" in problems
        assert f"seed = 5: must be 1 as in {tmp_path / 'config.yaml'}" in problems

    def test_an_accumulated_run_counts_optimizer_steps(self, tmp_path, capsys):
        words = ["trainer.max_steps=4", "trainer.accumulate=3", "sample.num_tokens=0"]
        _, output, _ = zs_train(capsys, tmp_path, *words)
        assert steps(output) == [1, 2, 3, 4]
        assert re.findall(r"^val +(\d+)", output, re.MULTILINE) == ["2", "4"]
        assert "sample" not in output


def trainer_config(*words):
    return load_config("tiny.yaml", words).trainer


@pytest.mark.parametrize(
    ("num_gpus", "words", "expected"),
    [
        (0, [], ("cpu", 2)),
        (0, ["trainer.strategy=auto"], ("cpu", 1)),
        (0, ["trainer.devices=3"], ("cpu", 3)),
        (0, ["trainer.devices=8"], ("cpu", 8)),
        (4, [], ("cuda", 4)),
        (4, ["trainer.strategy=auto"], ("cuda", 1)),
        (4, ["trainer.accelerator=cpu"], ("cpu", 2)),
        (4, ["trainer.devices=2"], ("cuda", 2)),
    ],
)
def test_devices_follow_the_machine_where_the_config_leaves_them_open(
    monkeypatch, num_gpus, words, expected
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert training.choose_devices(trainer_config(*words)) == expected


def test_torchrun_says_how_many_processes_there_are(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert training.choose_devices(trainer_config()) == ("cpu", 3)


@pytest.mark.parametrize(
    ("num_gpus", "words", "message"),
    [
        (0, ["trainer.accelerator=cuda"], "trainer.accelerator = 'cuda': must be \"cpu\". No GPU"),
        (0, ["trainer.precision=16-mixed"], "trainer.precision = '16-mixed': must be 32-true"),
        (2, ["trainer.devices=3"], "trainer.devices = 3: must be at most 2, the visible GPUs."),
        (0, ["trainer.devices=99"], "trainer.devices = 99: must be at most 16, 8 processes for"),
    ],
)
def test_a_machine_that_does_not_fit_is_told_before_processes_start(
    monkeypatch, num_gpus, words, message
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(training, "num_cores", lambda: 2)
    with pytest.raises(ConfigError, match=re.escape(message)):
        training.choose_devices(trainer_config(*words))


def test_the_guards_of_a_config_are_those_of_its_strategy():
    words = ["guards.non_finite=skip", "guards.max_skipped=3", "guards.spike_sigmas=8"]
    words += ["guards.spike=rollback", "guards.hang_timeout_s=90", "guards.uneven=drop"]
    strategy = training.make_strategy(load_config("tiny.yaml", [*words, "guards.check_flow=true"]))
    assert strategy.config.guards == GuardConfig(
        non_finite="skip",
        max_skipped=3,
        spike_sigmas=8.0,
        spike="rollback",
        hang_timeout=timedelta(seconds=90),
        uneven="drop",
        check_flow=True,
    )
    assert training.make_strategy(load_config("tiny.yaml")).config.guards == GuardConfig()
