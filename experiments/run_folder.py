"""The folder of a run: who may write into it, and what a start finds there of an earlier one."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_strategy.checkpoint import storage
from zero_strategy.config import refusal
from zero_strategy.experiments.config import load_config, save_config
from zero_strategy.experiments.rules import ConfigError, value_at
from zero_strategy.experiments.schema import RunConfig

CONFIG_FILE = "config.yaml"
FINISHED_FILE = "finished.json"
LOCK_FILE = ".lock"
LAST_CHECKPOINT = "checkpoints/last.ckpt"
BEST_CHECKPOINT = "checkpoints/best.ckpt"

# What a resumed run takes from its checkpoint, where a new value would be recorded and not used,
# and what that state depends on.
FIXED = (
    "seed",
    *("model.vocab_size", "model.num_layers", "model.hidden_size", "model.num_heads"),
    *("model.num_kv_heads", "model.intermediate_size", "model.max_seq_len"),
    *("model.rope_theta", "model.norm_eps", "model.tied"),
    *("data.corpus", "data.seq_len", "data.val_fraction"),
    # The optimizer's groups come back with the values that they were saved with.
    *("optim.lr", "optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay"),
    # Dtypes of what is stored, and whether the optimizer is a fused one.
    "trainer.precision",
    # The Trainer counts micro-batches: the first step at another number would take too few.
    "trainer.accumulate",
)

# What counts from the first step after a resume. The schedule is computed anew from its settings.
LIVE = (
    *("out_dir", "model.recompute", "data.batch_size", "data.num_workers"),
    *("optim.warmup_steps", "optim.min_lr_ratio", "optim.clip_norm", "trainer.max_steps"),
    *("trainer.strategy", "trainer.compile", "trainer.init", "trainer.accelerator"),
    *("trainer.devices", "trainer.num_nodes", "trainer.val_every", "trainer.val_batches"),
    *("trainer.save_every", "trainer.save_best", "trainer.log_every"),
    "trainer.requeue",
    *("guards.non_finite", "guards.max_skipped", "guards.spike_sigmas", "guards.spike"),
    *("guards.hang_timeout_s", "guards.uneven", "guards.check_flow"),
    *("sample.prompt", "sample.num_tokens", "sample.temperature"),
)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Make the folder and keep every other start out of it.

    The kernel lets go when this process ends, however it ends.

    Raises:
        ConfigError: another run holds the folder, or there can be none at that path.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / LOCK_FILE).open("a+")
    except OSError as error:
        must = f"a folder that can be written to ({error.strerror}: {error.filename})"
        advice = "Choose another folder."
        raise ConfigError(refusal("out_dir", str(run_dir), [must], advice)) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            must = f"a folder that no other run writes into, but {file.read().strip()} does"
            advice = "Wait for that run or stop it, or choose another out_dir."
            raise ConfigError(refusal("out_dir", str(run_dir), [must], advice)) from error
        except OSError as error:
            print(
                f"{run_dir}: its file system has no locks ({error.strerror}), so a second run in "
                "this folder would not be noticed. Start one at a time.",
                file=sys.stderr,
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return what to resume from, or None for a run that has saved nothing yet.

    Raises:
        ConfigError: the folder holds a part of a run that can neither go on nor be replaced.
    """
    last = run_dir / LAST_CHECKPOINT
    # A save that was cut off between its two renames; the strategy brings the checkpoint back.
    if storage.is_checkpoint(storage.set_aside(last)) or last.exists():
        if not (run_dir / CONFIG_FILE).exists():
            raise _incomplete(run_dir, LAST_CHECKPOINT, CONFIG_FILE, "Put that file back")
        return last
    if (run_dir / FINISHED_FILE).exists():
        raise _incomplete(run_dir, FINISHED_FILE, LAST_CHECKPOINT, "Put it back")
    if (run_dir / BEST_CHECKPOINT).exists():
        fix = f"Copy {BEST_CHECKPOINT} to that name to go on from it"
        raise _incomplete(run_dir, BEST_CHECKPOINT, LAST_CHECKPOINT, fix)
    return None


def _incomplete(run_dir: Path, there: str, missing: str, fix: str) -> ConfigError:
    must = f"a whole run or none, but holds {there} without {missing}"
    advice = f"{fix}, delete the folder to start anew, or choose another out_dir."
    return ConfigError(refusal("out_dir", str(run_dir), [must], advice))


def resumed_changes(config: RunConfig, run_dir: Path, last: Path) -> list[str]:
    """Compare the configuration with that of the folder's run.

    Returns:
        Each live setting that has another value now, as "path = new, was old".

    Raises:
        ConfigError: lists every fixed setting that differs, or the run's strategy cannot read
            the checkpoint.
    """
    stored_file = run_dir / CONFIG_FILE
    try:
        stored = load_config(stored_file)
    except ValueError as error:
        raise ConfigError(
            f"{stored_file}: must be the configuration of the folder's run, but does not load. "
            f"Correct it, or choose another out_dir.\n{error}"
        ) from error
    problems = [
        refusal(
            path,
            own,
            [f"{before!r} as in {stored_file}"],
            "Use that value to go on with the run, or another out_dir to start one.",
        )
        for path, own, before in _differences(config, stored, FIXED)
    ]
    if not config.trainer.strategy.startswith("zero") and last.is_dir():
        must = f"zero1, zero2 or zero3, which read the sharded {last}"
        advice = 'Use "zero3", or another out_dir.'
        problems.append(refusal("trainer.strategy", config.trainer.strategy, [must], advice))
    if problems:
        raise ConfigError("\n".join(problems))
    return [
        f"{path} = {own}, was {before}"
        for path, own, before in _differences(config, stored, LIVE)
        if path != "out_dir"
    ]


def _differences(
    config: RunConfig, stored: RunConfig, paths: tuple[str, ...]
) -> Iterator[tuple[str, object, object]]:
    for path in paths:
        own, before = value_at(config, path), value_at(stored, path)
        if own != before:
            yield path, own, before


def write_config(config: RunConfig, run_dir: Path) -> None:
    """Record the configuration; the file is whole at any moment."""
    beside = run_dir / f".{CONFIG_FILE}"
    save_config(config, beside)
    beside.replace(run_dir / CONFIG_FILE)


def finished_step(run_dir: Path) -> int | None:
    """Return the step at which the folder's run came to its end, if it did.

    Raises:
        ConfigError: the file that says so is damaged.
    """
    file = run_dir / FINISHED_FILE
    if not file.exists():
        return None
    text = file.read_text(errors="replace")
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError) as error:
        must = 'like {"step": 400}, as a finished run writes it'
        advice = "Delete the file; the run then goes on from its last checkpoint."
        raise ConfigError(refusal(str(file), text[:80], [must], advice)) from error


def write_finished(step: int, run_dir: Path) -> None:
    """Record that the run came to its end."""
    (run_dir / FINISHED_FILE).write_text(json.dumps({"step": step}))
