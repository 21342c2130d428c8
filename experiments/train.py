"""One training run, from a checked configuration to checkpoints, logs and a sample of text."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from zero_strategy.config import refusal
from zero_strategy.data import TokenDataModule
from zero_strategy.experiments import run_folder
from zero_strategy.experiments.callbacks import KeepLast, SampleText
from zero_strategy.experiments.rules import ConfigError
from zero_strategy.experiments.schema import RunConfig, TrainerConfig
from zero_strategy.experiments.stopping import STOPPED_EXIT_CODE, StopOnSignal, requeue
from zero_strategy.experiments.tasks import TokenTask
from zero_strategy.monitor import Monitor
from zero_strategy.presets import PRESETS
from zero_strategy.strategy import ZeroStrategy

# Beyond so many processes per core a step takes longer than anyone waits: a slip of the finger.
MAX_PROCESSES_PER_CORE = 8

# True of every small or resumed run, or meant for the authors of a library below.
EXPECTED_WARNINGS = (
    ".*does not have many workers",
    "Checkpoint directory .* exists and is not empty",
    ".*isinstance.treespec, LeafSpec.. is deprecated",
    ".*all_gather_into_tensor. is deprecated",
    ".*reduce_scatter_tensor. is deprecated",
)


def train(config: RunConfig) -> None:
    """Train, or go on with the run that the folder holds; every process of the run calls it.

    Raises:
        ConfigError: this machine or the folder does not fit the configuration.
        SystemExit: a signal stopped the run; its state is saved.
    """
    run_dir = Path(config.out_dir)
    accelerator, devices = choose_devices(config.trainer)
    if accelerator == "cpu":
        torch.set_num_threads(max(1, num_cores() // devices))
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = make_data(config)
    trainer = make_trainer(config, data, accelerator, devices)
    # The Trainer knows which process is the first of all machines; it starts the others in `fit`.
    with run_folder.locked(run_dir) if trainer.is_global_zero else nullcontext():
        last = run_folder.last_checkpoint(run_dir)
        changes = run_folder.resumed_changes(config, run_dir, last) if last else []
        step = run_folder.finished_step(run_dir)
        if step is not None and step >= config.trainer.max_steps:
            rank_zero_print(
                f"{run_dir} is finished at step {step}. Raise trainer.max_steps to go on, or "
                "choose another out_dir."
            )
            return
        if last:
            rank_zero_print(" · ".join([f"resume {last}", *changes]))
        elif (run_dir / run_folder.CONFIG_FILE).exists():
            rank_zero_print(
                f"{run_dir} holds a run without a checkpoint: it starts at step 0 again"
            )
        run(config, trainer, data, last)


def run(config: RunConfig, trainer: pl.Trainer, data: TokenDataModule, last: Path | None) -> None:
    """Fit from a checkpoint or from the start, and record what became of it.

    Raises:
        SystemExit: a signal stopped the run; its state is saved.
    """
    run_dir = Path(config.out_dir)
    task = TokenTask(config, tokens_per_byte=len(data.tokens.ids) / data.tokens.num_bytes)
    if trainer.is_global_zero:
        run_folder.write_config(config, run_dir)
    try:
        trainer.fit(task, data, ckpt_path=last)
    except SIGTERMException:
        # The other ranks end quietly: the first one kills all when a process that it started fails.
        if not trainer.is_global_zero:
            raise
        print(
            f"stopped by a signal after step {trainer.global_step}, saved in "
            f"{run_dir / run_folder.LAST_CHECKPOINT}. The same command goes on from there."
            if trainer.global_step
            else "stopped by a signal before the first step. The same command starts again.",
            flush=True,
        )
        stop = next(c for c in cast(Any, trainer).callbacks if isinstance(c, StopOnSignal))
        if config.trainer.requeue and stop.signum == signal.SIGUSR1:
            print(requeue(), flush=True)
        raise SystemExit(STOPPED_EXIT_CODE) from None
    step, max_steps = trainer.global_step, config.trainer.max_steps
    if step > max_steps:
        rank_zero_print(f"{last} is at step {step} already, beyond trainer.max_steps = {max_steps}")
    if trainer.is_global_zero and step >= max_steps:
        run_folder.write_finished(step, run_dir)


def make_data(config: RunConfig) -> TokenDataModule:
    """Return the data module of a run."""
    data = config.data
    return TokenDataModule(
        data.corpus,
        seq_len=data.seq_len,
        batch_size=data.batch_size,
        val_fraction=data.val_fraction,
        seed=config.seed,
        num_workers=data.num_workers,
    )


def make_strategy(config: RunConfig) -> Any:
    """Return what `Trainer(strategy=...)` takes."""
    trainer = config.trainer
    if not trainer.strategy.startswith("zero"):
        return trainer.strategy
    return ZeroStrategy(
        **cast(Any, PRESETS[trainer.strategy]),
        compile="blocks" if trainer.compile == "blocks" else None,
        init=trainer.init,
        guards=config.guards.to_guards(),
    )


def make_trainer(
    config: RunConfig, data: TokenDataModule, accelerator: str, devices: int
) -> pl.Trainer:
    """Return the Trainer of a run. Steps in the configuration are optimizer steps."""
    trainer, run_dir = config.trainer, Path(config.out_dir)
    monitor = Monitor(run_dir, every=trainer.log_every)
    last = run_dir / run_folder.LAST_CHECKPOINT
    best = run_dir / run_folder.BEST_CHECKPOINT
    keep_best = ModelCheckpoint(
        best.parent, best.stem, monitor="val_loss", enable_version_counter=False
    )
    return pl.Trainer(
        strategy=make_strategy(config),
        accelerator=accelerator,
        devices=devices,
        num_nodes=trainer.num_nodes,
        precision=trainer.precision,
        max_steps=trainer.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=trainer.accumulate,
        gradient_clip_val=config.optim.clip_norm,
        check_val_every_n_epoch=None,
        val_check_interval=trainer.val_every * trainer.accumulate,
        limit_val_batches=trainer.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=trainer.log_every,
        logger=TensorBoardLogger(run_dir, name="tensorboard", version=""),
        callbacks=[
            monitor,
            SampleText(config),
            StopOnSignal(),
            *([keep_best] if trainer.save_best else []),
            KeepLast(last, trainer.save_every, data=data, monitor=monitor),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def choose_devices(config: TrainerConfig) -> tuple[str, int]:
    """Return the accelerator and the processes on this machine.

    Raises:
        ConfigError: this machine has no such devices.
    """
    num_gpus = torch.cuda.device_count()
    on_gpu = config.accelerator != "cpu" and num_gpus > 0
    if config.accelerator == "cuda" and not on_gpu:
        found = refusal("trainer.accelerator", "cuda", ['"cpu"'], 'No GPU is visible: use "auto".')
        raise ConfigError(found)
    if not on_gpu and config.precision == "16-mixed":
        must = "32-true, bf16-mixed or bf16-true on the CPU"
        raise ConfigError(refusal("trainer.precision", "16-mixed", [must], 'Use "bf16-mixed".'))
    launched = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun has started the processes
    usual = 1 if config.strategy == "auto" else num_gpus if on_gpu else 2
    devices = config.devices or int(launched or usual)
    if on_gpu and devices > num_gpus:
        must = f"at most {num_gpus}, the visible GPUs"
        raise ConfigError(refusal("trainer.devices", devices, [must], f"Use {num_gpus}."))
    most = MAX_PROCESSES_PER_CORE * num_cores()
    if not on_gpu and devices > most:
        must = f"at most {most}, {MAX_PROCESSES_PER_CORE} processes for each of {num_cores()} cores"
        raise ConfigError(refusal("trainer.devices", devices, [must], f"Use {num_cores()}."))
    return ("cuda" if on_gpu else "cpu"), devices


def num_cores() -> int:
    """Return the cores that this process may use."""
    can_tell = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1


@rank_zero_only
def rank_zero_print(text: str) -> None:
    """Print at once, on global rank 0 alone."""
    print(text, flush=True)
