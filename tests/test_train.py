"""`zs train` from the command line, and the other commands of `zs`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_strategy.data import TokenFile
from zero_strategy.experiments import train as training
from zero_strategy.experiments.cli import main
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.rules import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SHORT = [
    *("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.intermediate_size=24", "model.max_seq_len=32", "data.seq_len=32"),
    *("optim.warmup_steps=1", "trainer.accelerator=cpu", "trainer.log_every=1"),
    *("trainer.val_every=2", "trainer.val_batches=2", "trainer.save_every=3"),
    *("sample.num_tokens=5", "sample.prompt=Hello"),
]


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
    assert "resume run/checkpoints/last.ckpt" in longer
    assert steps(longer) == [5, 6]

    zs(tmp_path, "checkpoint", "export", "run/checkpoints/last.ckpt", "run/w.ckpt")
    weights = torch.load(run / "w.ckpt", weights_only=False)["state_dict"]
    assert weights["gpt.embed.weight"].shape == (257, 16)


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """Train in this process and return what was printed."""
    monkeypatch.chdir(tmp_path)

    def run(capsys, *words):
        code = main(["train", "tiny.yaml", *SHORT, "trainer.strategy=auto", "out_dir=run", *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
class TestOneProcess:
    def test_validation_bits_per_byte_fall(self, run_here, capsys):
        words = ["trainer.max_steps=30", "trainer.val_every=10", "trainer.val_batches=8"]
        code, output, _ = run_here(capsys, *words)
        bits = [float(b) for b in re.findall(r"([\d.]+) bits/byte$", output, re.MULTILINE)]
        assert code == 0
        assert len(bits) == 3
        assert bits[-1] < bits[0] - 0.3

    def test_another_model_in_the_same_folder_is_refused(self, run_here, capsys):
        assert run_here(capsys, "trainer.max_steps=2")[0] == 0
        words = ["trainer.max_steps=3", "model.num_layers=3", "seed=5"]
        code, _, problems = run_here(capsys, *words)
        assert code == 2
        assert re.search(r"^model = .*: must be .* as in run/config.yaml", problems, re.MULTILINE)
        assert re.search(r"^seed = 5: must be 1 as in run/config.yaml", problems, re.MULTILINE)

    def test_an_accumulated_run_counts_optimizer_steps(self, run_here, capsys):
        words = ["trainer.max_steps=4", "trainer.accumulate=3", "sample.num_tokens=0"]
        _, output, _ = run_here(capsys, *words)
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
    ],
)
def test_a_machine_that_does_not_fit_is_told_before_processes_start(
    monkeypatch, num_gpus, words, message
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=re.escape(message)):
        training.choose_devices(trainer_config(*words))


def test_data_build_makes_a_token_file_that_train_takes(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"t": "x" * 50}) for _ in range(9)))
    out = tmp_path / "a.tok"
    assert main(["data", "build", str(out), str(tmp_path / "a.jsonl"), "--field", "t"]) == 0
    assert capsys.readouterr().out == f"{out}: 459 tokens, 9 documents, 450 bytes of text\n"
    assert TokenFile.open(out).num_documents == 9
    assert load_config("tiny.yaml", [f"data.corpus={out}"]).data.vocab_size() == 257


def test_a_wrong_input_file_ends_with_code_2_and_its_reason(tmp_path, capsys):
    (tmp_path / "a.tok").write_bytes(b"no tokens")
    assert main(["train", "tiny.yaml", f"data.corpus={tmp_path / 'a.tok'}"]) == 2
    assert "must be a token file" in capsys.readouterr().err
    assert main(["data", "build", str(tmp_path / "b.tok"), str(tmp_path / "gone.txt")]) == 2
    assert "must be existing files" in capsys.readouterr().err


def test_report_says_versions_devices_names_and_kernels(capsys):
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    for expected in (f"torch {torch.__version__}", "zero3: registered", "kernels", "cpu"):
        assert expected in text


@pytest.mark.parametrize("words", [[], ["train"], ["no-such-command"], ["data"], ["checkpoint"]])
def test_an_incomplete_command_shows_its_usage(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: zs" in capsys.readouterr().err
