"""A rank of a run under torchrun is killed, again and again: does the run go on where it was?

A case is recovered if torchrun starts the ranks again, they resume from the last checkpoint, and in
the end every step's figures and all weights are those of a run that nobody disturbed: no sample is
seen twice or left out.
"""

from __future__ import annotations

import csv
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import zero_strategy
from zero_strategy.experiments import run_folder

NUM_RANKS = 2
STEPS_BETWEEN = 12
SAVE_EVERY = 3
LIMIT_S = 60.0
"""For a start and the steps until the next kill."""
FIGURES = ("step", "epoch", "tokens", "loss", "grad_norm", "lr")
"""Columns that do not depend on time."""
STEP_LINE = re.compile(r"^step\s+(\d+)/")
SETTINGS = [
    *("model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.intermediate_size=24", "model.max_seq_len=32", "data.seq_len=32"),
    *("trainer.strategy=zero3", "trainer.accelerator=cpu", f"trainer.devices={NUM_RANKS}"),
    *("trainer.log_every=1", "trainer.val_every=100000", "trainer.save_best=false"),
    *(f"trainer.save_every={SAVE_EVERY}", "sample.num_tokens=0", "optim.warmup_steps=1"),
]


def run(num_restarts: int) -> dict[str, float]:
    """Kill a rank so many times, each after some steps more, and let torchrun start it again.

    Returns:
        "cases": kills; "recovered": those after which the run went on, none where it did not end
        as the undisturbed run; "slowest_s": longest time from a kill to the next step.
    """
    steps = STEPS_BETWEEN * (num_restarts + 1)
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name, "whole"), Path(name, "killed")
        for _ in _lines(whole, steps, max_restarts=0):
            pass
        seconds = _run_and_kill(killed, steps, num_restarts)
        is_same = _figures(whole) == _figures(killed) and _same_weights(whole, killed)
    recovered = len(seconds) if is_same else 0
    return {
        "cases": num_restarts,
        "recovered": recovered,
        "slowest_s": max(seconds, default=float("inf")),
    }


def _run_and_kill(folder: Path, steps: int, num_restarts: int) -> list[float]:
    """Return the seconds from each kill to the first step after it."""
    draw = random.Random(0)
    targets = [STEPS_BETWEEN * (i + 1) + draw.randrange(SAVE_EVERY) for i in range(num_restarts)]
    seconds: list[float] = []
    killed_at: float | None = None
    resumed = False
    for pid, line in _lines(folder, steps, max_restarts=num_restarts):
        resumed = resumed or line.startswith("resume ")
        step = STEP_LINE.match(line)
        if step is None:
            continue
        if killed_at is not None and resumed:
            seconds.append(time.monotonic() - killed_at)
            killed_at = None
        if killed_at is None and len(seconds) < num_restarts:
            if int(step[1]) < targets[len(seconds)]:
                continue
            os.kill(_worker(pid, rank=len(seconds) % NUM_RANKS), signal.SIGKILL)
            killed_at, resumed = time.monotonic(), False
    return seconds


def _lines(folder: Path, steps: int, *, max_restarts: int) -> Iterator[tuple[int, str]]:
    """Start a run under torchrun; yields torchrun's process id with each line it prints."""
    root = str(Path(zero_strategy.__file__).parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={max_restarts}"),
        *("-m", "zero_strategy.experiments.cli", "train", "tiny.yaml"),
        *(*SETTINGS, f"trainer.max_steps={steps}", f"out_dir={folder}"),
    ]
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Its workers stay in the session of their own that it gives them.
        start_new_session=True,
    ) as process:
        limit = threading.Timer(LIMIT_S * (max_restarts + 1), process.terminate)
        limit.start()
        try:
            assert process.stdout is not None, "piped"
            for line in process.stdout:
                yield process.pid, line
        finally:
            limit.cancel()
            process.terminate()


def _worker(torchrun: int, *, rank: int) -> int:
    """Return the process id of a rank that torchrun started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) != torchrun:
                continue
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if f"LOCAL_RANK={rank}".encode() in variables:
            return int(folder.name)
    raise RuntimeError(f"rank {rank} of process {torchrun}: must run, but is not there")


def _figures(folder: Path) -> list[tuple[str, ...]]:
    with (folder / "metrics.csv").open() as file:
        return [tuple(row[name] for name in FIGURES) for row in csv.DictReader(file)]


def _same_weights(one: Path, other: Path) -> bool:
    first, second = (
        zero_strategy.load_state_dict(folder / run_folder.LAST_CHECKPOINT)
        for folder in (one, other)
    )
    return all(torch.equal(value, second[name]) for name, value in first.items())
