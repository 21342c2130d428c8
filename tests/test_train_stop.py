"""A signal ends `zs train` with a checkpoint, a line of what to do and the exit code of a stop."""

import csv
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zero_strategy
from tests.ranks import ranks
from tests.small_run import SHORT
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.tasks import TokenTask
from zero_strategy.experiments.train import train

ROOT = Path(__file__).resolve().parent.parent
STEPS, ACCUMULATE = 7, 3
WORDS = [
    *SHORT,
    *(f"trainer.max_steps={STEPS}", f"trainer.accumulate={ACCUMULATE}", "sample.num_tokens=0"),
    *("trainer.save_best=false", "trainer.val_every=4"),
]


def run(
    folder: Path,
    *words: str,
    signal_at: int | None = None,
    rank: int = 0,
    signum: int = signal.SIGTERM,
) -> tuple[Any, str]:
    """Train; one rank gets a signal in its micro-batch `signal_at`, counted from this start.

    Returns: the code that the process would end with, and what it printed.
    """
    plain, seen = TokenTask.training_step, []

    def training_step(task: TokenTask, batch: Any, batch_idx: int) -> Any:
        seen.append(batch_idx)
        if len(seen) == signal_at and task.global_rank == rank:
            os.kill(os.getpid(), signum)
        return plain(task, batch, batch_idx)

    code = 0
    patch = mock.patch.object(TokenTask, "training_step", training_step)
    with redirect_stdout(StringIO()) as output, patch:
        try:
            train(load_config("tiny.yaml", [*WORDS, f"out_dir={folder}", *words]))
        except SystemExit as stopped:
            code = stopped.code
    return code, output.getvalue()


def figures(folder: Path) -> list[tuple[str, ...]]:
    """What each step logged that does not depend on time."""
    names = ("step", "epoch", "tokens", "loss", "grad_norm", "lr")
    with (folder / "metrics.csv").open() as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    last = folder / "checkpoints/last.ckpt"
    if last.is_dir():
        return zero_strategy.load_state_dict(last)
    return torch.load(last, weights_only=True)["state_dict"]


# In steps 2, 3 (which is saved anyway), 4 and the last, at either end and in the middle of a step.
@pytest.mark.parametrize(
    ("strategy", "world_size", "signal_at"),
    [
        *(("auto", 1, at) for at in (4, 8, 9, 10, STEPS * ACCUMULATE)),
        *(("zero3", 2, at) for at in (4, 8, 9, 10, STEPS * ACCUMULATE)),
        ("ddp", 2, 8),
    ],
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(
    tmp_path, strategy, world_size, signal_at
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words, pool = [f"trainer.strategy={strategy}"], ranks(world_size)
    assert {code for code, _ in pool.run(run, whole, *words)} == {0}

    (code, output), *others = pool.run(run, parts, *words, signal_at=signal_at, rank=world_size - 1)
    assert code == 85
    assert [told for _, told in others] == [""] * (world_size - 1)
    said = re.search(
        r"^stopped by a signal after step (\d+), saved in (.*)\. The same", output, re.M
    )
    assert said is not None
    assert int(said[1]) in (signal_at // ACCUMULATE, (signal_at + 2) // ACCUMULATE)
    assert said[2] == str(parts / "checkpoints/last.ckpt")
    assert not (parts / "finished.json").exists()

    assert {code for code, _ in pool.run(run, parts, *words)} == {0}
    assert figures(parts) == figures(whole)
    assert (parts / "finished.json").exists()
    expected = weights(whole)
    for name, value in weights(parts).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("strategy", "world_size", "rank"), [("auto", 1, 0), ("zero3", 2, 0), ("zero3", 2, 1)]
)
@pytest.mark.parametrize("requeue", [True, False])
def test_sigusr1_stops_a_run_and_puts_its_job_back_into_the_queue_if_asked(
    tmp_path, strategy, world_size, rank, requeue
):
    words = [f"trainer.strategy={strategy}", f"trainer.requeue={str(requeue).lower()}"]
    told = ranks(world_size).run(
        run_under_slurm, tmp_path, *words, signal_at=8, rank=rank, signum=signal.SIGUSR1
    )
    assert told[0][0] == 85
    assert (tmp_path / "checkpoints/last.ckpt").exists()
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == ("requeue 1234\n" if requeue and rank == 0 else "")
    assert ("job 1234 is back in the queue" in told[0][1]) == (requeue and rank == 0)


def run_under_slurm(folder: Path, *words: str, **told: Any) -> tuple[Any, str]:
    """As `run`, with a `scontrol` that notes what it is asked."""
    program = folder / "scontrol"
    if int(os.environ["RANK"]) == 0:
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
        program.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "1234", "PATH": f"{folder}:{os.environ['PATH']}"}
    with mock.patch.dict(os.environ, slurm):
        return run(folder, *words, **told)


def test_a_run_stopped_before_its_first_step_says_so_and_starts_again(tmp_path):
    words = ["trainer.strategy=zero3"]
    (code, output), _ = ranks(2).run(run, tmp_path, *words, signal_at=1)
    assert code == 85
    assert "stopped by a signal before the first step. The same command starts again." in output
    (code, output), _ = ranks(2).run(run, tmp_path, *words)
    assert code == 0
    assert "starts at step 0 again" in output


def test_sigterm_to_the_command_ends_it_with_the_exit_code_of_a_stop(tmp_path):
    command = [sys.executable, "-m", "zero_strategy.experiments.cli", "train", "tiny.yaml"]
    words = [*SHORT, "trainer.strategy=zero3", "trainer.max_steps=100000", f"out_dir={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.decode())
            if line.startswith(b"step") and not any("step   " in told for told in lines[:-1]):
                process.terminate()
    assert process.returncode == 85, "".join(lines)
    assert lines[-1].startswith("stopped by a signal after step "), "".join(lines)
    assert (tmp_path / "checkpoints/last.ckpt/manifest.json").exists()
