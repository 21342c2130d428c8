"""What a run can be told: every setting with its unit, its default and its rules."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Literal

from zero_strategy.config import GuardConfig, NonFinite, Spike, Uneven
from zero_strategy.data.corpus import CORPORA
from zero_strategy.data.tokens import ByteTokenizer, TokenFile
from zero_strategy.experiments.models.gpt import GPTConfig
from zero_strategy.experiments.rules import Rule, above_zero, at_least, broken

StrategyName = Literal[
    "auto", "ddp", "zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload"
]
PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
_GUARDS = GuardConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is read, and how much at once."""

    corpus: str = "builtin"
    """"builtin", "stdlib", or the path of a token file."""
    seq_len: int
    """Predicted tokens per row."""
    batch_size: int
    """Rows per micro-batch on each rank."""
    val_fraction: float = 0.1
    """Part of the tokens kept for validation, from the end."""
    num_workers: int = 0
    """Loader processes per rank."""

    def problems(self, path: str = "data") -> list[str]:
        """Return every broken rule, one line each."""
        fraction_fits = 0 < self.val_fraction < 1
        return broken(
            path,
            self,
            [
                *at_least(self, 1, "seq_len", "batch_size"),
                *at_least(self, 0, "num_workers"),
                Rule("val_fraction", fraction_fits, "between 0 and 1", "Use 0.1."),
                Rule(
                    "corpus",
                    self.corpus in CORPORA or Path(self.corpus).is_file(),
                    f"{', '.join(CORPORA)} or an existing token file",
                    "Make one with `zs data build`.",
                ),
            ],
        )

    def vocab_size(self) -> int:
        """Return the ids that the corpus may hold; reads a token file's header."""
        if self.corpus in CORPORA:
            return ByteTokenizer.vocab_size
        return TokenFile.open(self.corpus).vocab_size


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW, with a linear warm-up and a cosine to `lr * min_lr_ratio` at the last step.

    A resumed run follows the schedule of its own settings from its first step on, so raising
    `trainer.max_steps` stretches the cosine and the rate goes up again.
    """

    lr: float
    """Highest learning rate."""
    warmup_steps: int = 0
    """Optimizer steps until `lr` is reached."""
    min_lr_ratio: float = 0.1
    """Last learning rate as a part of `lr`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices only."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; null clips nothing."""

    def problems(self, path: str = "optim") -> list[str]:
        """Return every broken rule, one line each."""
        betas = [
            Rule(name, 0 <= beta < 1, "in [0, 1)", f"Use {usual}.")
            for name, beta, usual in (("beta1", self.beta1, 0.9), ("beta2", self.beta2, 0.95))
        ]
        return broken(
            path,
            self,
            [
                *above_zero(self, "lr", "eps"),
                *at_least(self, 0, "warmup_steps", "weight_decay"),
                Rule("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]", "Use 0.1."),
                Rule(
                    "clip_norm",
                    self.clip_norm is None or self.clip_norm > 0,
                    "above 0 or null",
                    "Use 1.0, or null to clip nothing.",
                ),
                *betas,
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """Where a run computes, for how long, and how often it validates and saves."""

    strategy: StrategyName = "zero3"
    compile: Literal["none", "blocks"] = "none"
    """"blocks" compiles each block; zero strategies only."""
    init: Literal["cpu", "meta"] = "cpu"
    """"meta" builds a model larger than host memory shard by shard; zero strategies only."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" takes the GPUs where there are any."""
    devices: int | None = None
    """Processes per machine; null takes every GPU, or two processes on the CPU."""
    num_nodes: int = 1
    precision: PrecisionName = "32-true"
    max_steps: int
    """Optimizer steps; the learning-rate schedule spans them."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    val_every: int = 100
    """Optimizer steps between validations."""
    val_batches: int | None = None
    """Micro-batches per rank and validation; null takes the whole validation part."""
    save_every: int = 1000
    """Optimizer steps between checkpoints; the last step is always saved."""
    save_best: bool = True
    """Keep a second checkpoint: that of the lowest validation loss."""
    log_every: int = 10
    """Optimizer steps between log lines."""
    requeue: bool = False
    """After SIGUSR1 has stopped a SLURM job, put it back into the queue."""

    def problems(self, path: str = "trainer") -> list[str]:
        """Return every broken rule, one line each."""
        counts = ("max_steps", "accumulate", "val_every", "save_every", "log_every", "num_nodes")
        optional = [name for name in ("devices", "val_batches") if getattr(self, name) is not None]
        sharded = self.strategy.startswith("zero")
        choose_zero = 'Use strategy "zero3".'
        return broken(
            path,
            self,
            [
                *at_least(self, 1, *counts, *optional),
                Rule(
                    "compile",
                    self.compile == "none" or sharded,
                    f'"none" with strategy "{self.strategy}"',
                    choose_zero,
                ),
                Rule(
                    "init",
                    self.init == "cpu" or sharded,
                    f'"cpu" with strategy "{self.strategy}"',
                    choose_zero,
                ),
                Rule(
                    "precision",
                    self.precision != "16-mixed" or self.accelerator != "cpu",
                    "32-true, bf16-mixed or bf16-true on the CPU",
                    'Use "bf16-mixed".',
                ),
                Rule(
                    "precision",
                    self.precision == "bf16-mixed" or not self.strategy.endswith("_offload"),
                    f'"bf16-mixed" with strategy "{self.strategy}"',
                    'Use "bf16-mixed".',
                ),
                Rule(
                    "devices",
                    self.strategy != "auto" or self.devices in (None, 1),
                    '1 or null with strategy "auto"',
                    'Use strategy "zero3" for several processes.',
                ),
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardsConfig:
    """What is watched while a run trains, as in `zero_strategy.GuardConfig`."""

    non_finite: NonFinite = _GUARDS.non_finite
    """What a gradient norm that is not finite does."""
    max_skipped: int = _GUARDS.max_skipped
    """Steps skipped in a row after which the run ends."""
    spike_sigmas: float | None = _GUARDS.spike_sigmas
    """Robust standard deviations above the last losses; null looks for no spikes."""
    spike: Spike = _GUARDS.spike
    """What a spike of the loss does."""
    hang_timeout_s: float | None = 1200.0
    """Seconds after which a rank that does nothing ends the run; null waits."""
    uneven: Uneven = _GUARDS.uneven
    """What happens where some rank runs out of batches first."""
    check_flow: bool = _GUARDS.check_flow
    """Compare which unit each rank calls, at each call; the hosts wait for one another there."""

    def problems(self, path: str = "guards") -> list[str]:
        """Return every broken rule, one line each."""
        optional = [n for n in ("spike_sigmas", "hang_timeout_s") if getattr(self, n) is not None]
        rules = [*at_least(self, 1, "max_skipped"), *above_zero(self, *optional)]
        return broken(path, self, rules)

    def to_guards(self) -> GuardConfig:
        """Return the same as the strategy takes it."""
        limit = self.hang_timeout_s
        return GuardConfig(
            non_finite=self.non_finite,
            max_skipped=self.max_skipped,
            spike_sigmas=self.spike_sigmas,
            spike=self.spike,
            hang_timeout=None if limit is None else timedelta(seconds=limit),
            uneven=self.uneven,
            check_flow=self.check_flow,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """The text written at the end of a run, where the tokens are bytes."""

    prompt: str = "\n"
    num_tokens: int = 200
    """0 writes no text."""
    temperature: float = 0.8

    def problems(self, path: str = "sample") -> list[str]:
        """Return every broken rule, one line each."""
        return broken(
            path,
            self,
            [
                *at_least(self, 0, "num_tokens"),
                *above_zero(self, "temperature"),
                Rule("prompt", bool(self.prompt), "at least one character", 'Use "The ".'),
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    out_dir: str
    """Folder of the run: checkpoints, logs, report and this configuration."""
    seed: int = 0
    """Chooses initial weights and data order."""
    model: GPTConfig
    data: DataConfig
    optim: OptimConfig
    trainer: TrainerConfig
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """Zero strategies only."""
    sample: SampleConfig = field(default_factory=SampleConfig)

    def problems(self) -> list[str]:
        """Return the broken rules between sections, one line each; sections were checked."""
        vocab_size, warmup, steps = (
            self.data.vocab_size(),
            self.optim.warmup_steps,
            self.trainer.max_steps,
        )
        strategy, unwatched = self.trainer.strategy, GuardsConfig()
        changed = [
            f.name
            for f in fields(GuardsConfig)
            if getattr(self.guards, f.name) != getattr(unwatched, f.name)
        ]
        return broken(
            "",
            self,
            [
                *at_least(self, 0, "seed"),
                Rule("out_dir", bool(self.out_dir.strip()), "a folder name", 'Use "runs/first".'),
                Rule(
                    "data.seq_len",
                    self.data.seq_len <= self.model.max_seq_len,
                    f"at most model.max_seq_len = {self.model.max_seq_len}",
                    "Use shorter rows, or raise model.max_seq_len.",
                ),
                Rule(
                    "model.vocab_size",
                    self.model.vocab_size >= vocab_size,
                    f"at least {vocab_size}, the ids of data.corpus = {self.data.corpus!r}",
                    f"Use {vocab_size}.",
                ),
                Rule(
                    "optim.warmup_steps",
                    warmup < steps,
                    f"below trainer.max_steps = {steps}",
                    f"Use {steps // 10}, or train longer.",
                ),
                Rule(
                    "data.num_workers",
                    self.data.num_workers <= 64,
                    "at most 64",
                    "Use 2; rows are cheap to read.",
                ),
                *(
                    Rule(
                        f"guards.{name}",
                        strategy.startswith("zero"),
                        f'left out with strategy "{strategy}", which has no guards',
                        'Remove it, or use strategy "zero3".',
                    )
                    for name in changed
                ),
            ],
        )
