"""The folder of a run: one run at a time, and a resume that changes nothing in silence."""

import csv
import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_run import SHORT, zs_train
from zero_strategy.experiments import run_folder
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.rules import ConfigError, value_at
from zero_strategy.experiments.schema import RunConfig
from zero_strategy.experiments.tasks import lr_factor

# A value for each setting that the packaged tiny.yaml has otherwise.
OTHER = {
    "seed": "2",
    "model.vocab_size": "300",
    "model.num_layers": "3",
    "model.hidden_size": "64",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.intermediate_size": "100",
    "model.max_seq_len": "256",
    "model.rope_theta": "5000.0",
    "model.norm_eps": "1e-4",
    "model.tied": "false",
    "model.recompute": "true",
    "data.corpus": "stdlib",
    "data.seq_len": "64",
    "data.val_fraction": "0.2",
    "data.batch_size": "4",
    "data.num_workers": "1",
    "optim.lr": "1e-3",
    "optim.beta1": "0.8",
    "optim.beta2": "0.99",
    "optim.eps": "1e-6",
    "optim.weight_decay": "0.2",
    "optim.warmup_steps": "30",
    "optim.min_lr_ratio": "0.2",
    "optim.clip_norm": "null",
    "trainer.precision": "bf16-mixed",
    "trainer.accumulate": "2",
    "trainer.max_steps": "500",
    "trainer.strategy": "zero2",
    "trainer.compile": "blocks",
    "trainer.init": "meta",
    "trainer.accelerator": "cpu",
    "trainer.devices": "2",
    "trainer.num_nodes": "2",
    "trainer.val_every": "50",
    "trainer.val_batches": "3",
    "trainer.save_every": "50",
    "trainer.save_best": "false",
    "trainer.log_every": "5",
    "trainer.requeue": "true",
    "guards.non_finite": "skip",
    "guards.max_skipped": "3",
    "guards.spike_sigmas": "8.0",
    "guards.spike": "rollback",
    "guards.hang_timeout_s": "60.0",
    "guards.uneven": "drop",
    "guards.check_flow": "true",
    "sample.prompt": "'A '",
    "sample.num_tokens": "3",
    "sample.temperature": "0.5",
}


def paths_of(config, prefix=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = f"{prefix}{field.name}"
        yield from paths_of(value, f"{path}.") if dataclasses.is_dataclass(value) else [path]


def test_every_setting_is_either_fixed_or_live_in_a_resumed_run():
    every = list(paths_of(load_config("tiny.yaml")))
    assert sorted([*run_folder.FIXED, *run_folder.LIVE]) == sorted(every)
    assert {*OTHER, "out_dir"} == set(every)


@pytest.fixture
def stored(tmp_path) -> tuple[Path, Path]:
    """A folder as a run of tiny.yaml leaves it, and its last checkpoint."""
    last = tmp_path / run_folder.LAST_CHECKPOINT
    last.mkdir(parents=True)
    run_folder.write_config(load_config("tiny.yaml"), tmp_path)
    return tmp_path, last


def changed(paths: tuple[str, ...]) -> RunConfig:
    """The stored configuration with another value for each of the paths."""
    return load_config("tiny.yaml", [f"{path}={OTHER[path]}" for path in paths])


def test_a_resume_that_would_not_use_new_values_is_refused_with_each_of_them(stored):
    with pytest.raises(ConfigError) as caught:
        run_folder.resumed_changes(changed(run_folder.FIXED), *stored)
    lines = str(caught.value).splitlines()
    assert [line.split(" = ")[0] for line in lines] == list(run_folder.FIXED)
    advice = f"as in {stored[0] / 'config.yaml'}. Use that value to go on with the run, or another"
    assert all(advice in line for line in lines)


def test_a_resume_tells_each_value_that_counts_from_now_on(stored):
    paths = tuple(path for path in run_folder.LIVE if path != "out_dir")
    old, new = load_config("tiny.yaml"), changed(paths)
    assert run_folder.resumed_changes(new, *stored) == [
        f"{path} = {value_at(new, path)}, was {value_at(old, path)}" for path in paths
    ]


def test_a_sharded_checkpoint_is_not_handed_to_a_strategy_that_cannot_read_it(stored):
    config = load_config("tiny.yaml", ["trainer.strategy=ddp"])
    with pytest.raises(ConfigError, match=r"^trainer.strategy = 'ddp': must be zero1, zero2 or"):
        run_folder.resumed_changes(config, *stored)


def test_a_stored_config_that_does_not_load_is_named(stored):
    (stored[0] / "config.yaml").write_text("seed: [")
    with pytest.raises(ConfigError, match=r"config\.yaml: must be the configuration of the fol"):
        run_folder.resumed_changes(load_config("tiny.yaml"), *stored)


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_second_start_into_a_folder_in_use_is_refused_and_writes_nothing(tmp_path, capsys):
    with run_folder.locked(tmp_path / "run"):
        before = contents(tmp_path)
        code, _, problems = zs_train(capsys, tmp_path / "run", "trainer.max_steps=2")
        assert contents(tmp_path) == before
    assert code == 2
    assert f"out_dir = '{tmp_path / 'run'}': must be a folder that no other run" in problems
    assert "Wait for that run or stop it, or choose another out_dir." in problems


def test_a_killed_process_lets_go_of_its_folder(tmp_path):
    code = (
        "import sys, time; from pathlib import Path;"
        "from zero_strategy.experiments.run_folder import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"but process {holder.pid} on "):
            run_folder.locked(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
    with run_folder.locked(tmp_path):
        pass


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_an_out_dir_that_can_be_no_folder_is_refused(tmp_path, capsys, path):
    (tmp_path / "file").write_text("years of work")
    code, _, problems = zs_train(capsys, tmp_path / path, "trainer.max_steps=2")
    assert code == 2
    refused = f"out_dir = '{tmp_path / path}': must be a folder that can be written to ("
    assert refused in problems
    assert (tmp_path / "file").read_text() == "years of work"


@pytest.mark.parametrize("text", ["", "{", "[4]", '{"step": null}', '{"steps": 4}'])
def test_a_damaged_finished_file_is_named_with_the_way_out(tmp_path, text):
    (tmp_path / "finished.json").write_text(text)
    with pytest.raises(ConfigError, match=r"finished\.json = .*: must be like .* Delete the file"):
        run_folder.finished_step(tmp_path)


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ("finished.json", "checkpoints/last.ckpt"),
        ("checkpoints/best.ckpt", "checkpoints/last.ckpt"),
        ("checkpoints/last.ckpt", "config.yaml"),
    ],
)
def test_a_run_of_which_a_part_is_gone_is_not_begun_again_in_silence(tmp_path, there, missing):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / there).write_text("")
    with pytest.raises(ConfigError, match=f"but holds {there} without {missing}. .*out_dir"):
        run_folder.last_checkpoint(tmp_path)


def test_a_checkpoint_that_a_killed_save_moved_aside_is_resumed_from(stored):
    folder, last = stored
    (last / "manifest.json").write_text("")
    last.rename(last.with_name(f".{last.name}.replaced"))
    assert run_folder.last_checkpoint(folder) == last


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
class TestResumedRuns:
    def test_a_run_without_a_checkpoint_says_that_it_starts_again(self, tmp_path, capsys):
        run_folder.write_config(load_config("tiny.yaml", SHORT), tmp_path)
        words = ["trainer.max_steps=2", "trainer.save_best=false", "seed=5"]
        code, output, _ = zs_train(capsys, tmp_path, *words)
        assert code == 0
        assert output.startswith(f"{tmp_path} holds a run without a checkpoint: it starts at step")

    def test_one_last_checkpoint_remains_and_the_rate_follows_each_schedule(self, tmp_path, capsys):
        for max_steps in (2, 4, 5, 7):  # saved every 3 steps, and at each end
            words = ["optim.lr=1e-2", "optim.warmup_steps=1", f"trainer.max_steps={max_steps}"]
            code, output, _ = zs_train(capsys, tmp_path, *words)
            assert code == 0
            assert json.loads((tmp_path / "finished.json").read_text()) == {"step": max_steps}
        assert (
            f"resume {tmp_path / 'checkpoints/last.ckpt'} · trainer.max_steps = 7, was 5" in output
        )
        assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}

        with (tmp_path / "metrics.csv").open() as file:
            rates = [float(row["lr"]) for row in csv.DictReader(file)]
        expected = [
            1e-2 * lr_factor(1, max_steps, 0.1)(step)
            for step, max_steps in enumerate([2, 2, 4, 4, 5, 7, 7])
        ]
        assert rates == pytest.approx(expected, rel=1e-6)
