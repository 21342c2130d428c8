"""One training run, from a checked configuration to checkpoints, logs and a sample of text."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from zero_strategy.config import refusal
from zero_strategy.data import ByteTokenizer, TokenDataModule
from zero_strategy.experiments.config import load_config, save_config
from zero_strategy.experiments.rules import ConfigError
from zero_strategy.experiments.schema import RunConfig, TrainerConfig
from zero_strategy.experiments.tasks import TokenTask, generate
from zero_strategy.monitor import Monitor
from zero_strategy.strategy import ZeroStrategy

CONFIG_FILE = "config.yaml"
FINISHED_FILE = "finished.json"
LAST_CHECKPOINT = "checkpoints/last.ckpt"

# Sections that a resumed run must share with the first one, or its state would not fit.
FIXED = ("seed", "model", "data.corpus", "data.seq_len", "data.val_fraction")

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
    """
    run_dir = Path(config.out_dir)
    accelerator, devices = choose_devices(config.trainer)
    check_same_run(config, run_dir)
    if (step := finished_step(run_dir)) is not None and step >= config.trainer.max_steps:
        rank_zero_print(
            f"{run_dir} is finished at step {step}. Raise trainer.max_steps to go on, or choose "
            "another out_dir."
        )
        return
    if accelerator == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, (cores or 1) // devices))
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)

    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = make_data(config)
    task = TokenTask(config, tokens_per_byte=len(data.tokens.ids) / data.tokens.num_bytes)
    trainer = make_trainer(config, run_dir, accelerator, devices)
    last = run_dir / LAST_CHECKPOINT
    if last.exists():
        rank_zero_print(f"resume {last}")
    if trainer.is_global_zero:
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, run_dir / CONFIG_FILE)
    trainer.fit(task, data, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero and trainer.global_step >= config.trainer.max_steps:
        (run_dir / FINISHED_FILE).write_text(json.dumps({"step": trainer.global_step}))


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


def make_strategy(config: TrainerConfig) -> Any:
    """Return what `Trainer(strategy=...)` takes."""
    if not config.strategy.startswith("zero"):
        return config.strategy
    return ZeroStrategy(
        stage=int(config.strategy.removeprefix("zero")),
        compile="blocks" if config.compile == "blocks" else None,
        init=config.init,
    )


def make_trainer(config: RunConfig, run_dir: Path, accelerator: str, devices: int) -> pl.Trainer:
    """Return the Trainer of a run. Steps in the configuration are optimizer steps."""
    trainer = config.trainer
    folder = run_dir / "checkpoints"
    last = ModelCheckpoint(
        folder, save_top_k=0, save_last=True, every_n_train_steps=trainer.save_every
    )
    best = ModelCheckpoint(folder, "best", monitor="val_loss", enable_version_counter=False)
    return pl.Trainer(
        strategy=make_strategy(trainer),
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
            Monitor(run_dir, every=trainer.log_every),
            SampleText(config),
            *([best] if trainer.save_best else []),
            last,
            SaveLastStep(run_dir / LAST_CHECKPOINT, trainer.save_every),
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
    return ("cuda" if on_gpu else "cpu"), devices


def check_same_run(config: RunConfig, run_dir: Path) -> None:
    """Refuse to mix two runs in one folder.

    Raises:
        ConfigError: lists every setting that the folder's run has otherwise.
    """
    stored_file = run_dir / CONFIG_FILE
    if not stored_file.exists():
        return
    own = dataclasses.asdict(config)
    stored = dataclasses.asdict(load_config(stored_file))
    problems = [
        refusal(
            path,
            own_value,
            [f"{stored_value!r} as in {stored_file}"],
            "Use that value to go on with the run, or another out_dir to start one.",
        )
        for path in FIXED
        if (own_value := _at(own, path)) != (stored_value := _at(stored, path))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


def finished_step(run_dir: Path) -> int | None:
    """Return the step at which the folder's run came to its end, if it did."""
    file = run_dir / FINISHED_FILE
    return int(json.loads(file.read_text())["step"]) if file.exists() else None


@rank_zero_only
def rank_zero_print(text: str) -> None:
    """Print at once, on global rank 0 alone."""
    print(text, flush=True)


@final
class SaveLastStep(Callback):
    """Saves the end of a run whose length is no multiple of the saving interval."""

    def __init__(self, path: Path, save_every: int) -> None:
        self.path = path
        self.save_every = save_every

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step % self.save_every:
            trainer.save_checkpoint(self.path)


@final
class SampleText(Callback):
    """Prints text that the trained model continues from the prompt."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        sample, model = self.config.sample, self.config.model
        if not sample.num_tokens or self.config.data.vocab_size() != ByteTokenizer.vocab_size:
            return
        strategy, tokenizer = trainer.strategy, ByteTokenizer()
        context = strategy.inference() if isinstance(strategy, ZeroStrategy) else torch.no_grad()
        with context:
            # Rank 0 alone: the strategy lets the other ranks serve its gathers meanwhile.
            if not trainer.is_global_zero:
                return
            ids = torch.from_numpy(tokenizer.encode(sample.prompt).astype("int64"))
            added = generate(
                pl_module,
                ids.to(strategy.root_device),
                num_tokens=sample.num_tokens,
                max_seq_len=model.max_seq_len,
                temperature=sample.temperature,
                seed=self.config.seed,
            )
        print(f"sample {sample.prompt}{tokenizer.decode(added.tolist())}", flush=True)
