"""`Monitor`: what a run shows, as a Lightning callback. The work is done in `telemetry/`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override

from zero_strategy.offload.figures import OffloadFigures
from zero_strategy.planning.hardware import peak_bf16_flops
from zero_strategy.protocols import CountsTokens, TellsOffload, TellsPlan, TellsSaves
from zero_strategy.telemetry.board import Board
from zero_strategy.telemetry.clock import clock_for
from zero_strategy.telemetry.csv_log import CsvLog
from zero_strategy.telemetry.events import RunFacts, Sink
from zero_strategy.telemetry.memory import peak_memory_bytes
from zero_strategy.telemetry.probes import Probes, Progress
from zero_strategy.telemetry.ranks import gather_rows
from zero_strategy.telemetry.recorder import Recorder
from zero_strategy.telemetry.report import Report
from zero_strategy.telemetry.terminal import Terminal
from zero_strategy.telemetry.tiers import link_ceiling
from zero_strategy.telemetry.validation import validation_figures


@runtime_checkable
class _CountsSkips(Protocol):
    """A precision plugin that counts the steps it dropped for an overflow."""

    skipped_steps: int


@final
class Monitor(Callback):
    """Shows where a run stands: terminal, TensorBoard, `metrics.csv` and `report.html`.

    Works with any Lightning strategy. What a strategy or a LightningModule does not tell
    (`zero_strategy.protocols`) is shown as "-". Only global rank 0 prints and writes. TensorBoard
    figures go to the Trainer's `TensorBoardLogger` where it has one, else beside the CSV files.

    Args:
        out_dir: folder for the files, made if absent. Rows of steps after the one a run resumes
            at are dropped from its CSV files, all of them if it starts anew.
        every: optimizer steps between log steps.

    Raises: ValueError: `out_dir` is no path, `every` is below 1, or a CSV file in `out_dir` has
        other columns.

    Cost: between log steps neither host sync nor collective; on a log step one all-reduce of 80
        bytes (160 under offload) times the number of ranks, and a few host syncs.

    Example:
        >>> trainer = Trainer(strategy="zero3", callbacks=[Monitor("out", every=10)])
    """

    def __init__(self, out_dir: str | Path, *, every: int = 10) -> None:
        if not isinstance(out_dir, str | Path):
            raise ValueError(
                f'monitor.out_dir = {out_dir!r}: must be the path of a folder. Use "runs/first"; '
                "the steps between lines are Monitor(out_dir, every=10)."
            )
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"monitor.every = {every!r}: must be a whole number of at least 1. Use 10."
            )
        self.out_dir = Path(out_dir)
        self.every = every
        self._progress = Progress()
        self._recorder: Recorder | None = None
        self._saved_names: set[str] = set()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        facts = _facts(trainer, pl_module)
        self._saved_names = _saved_names(trainer)
        self._recorder = Recorder(
            facts=facts,
            clock=clock_for(trainer.strategy.root_device),
            probes=_probes(trainer, pl_module, facts),
            sinks=self._sinks(trainer, facts) if trainer.is_global_zero else [],
            progress=self._progress,
            every=self.every,
            counts_tokens=isinstance(pl_module, CountsTokens),
        )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None:
            counted = isinstance(pl_module, CountsTokens)
            self._recorder.batch_started(pl_module.num_tokens(batch) if counted else 0)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self._recorder is not None:
            self._recorder.enter("backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Under manual optimization the step may go on with another forward.
        if self._recorder is not None:
            self._recorder.enter("forward")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._recorder is not None:
            self._recorder.optimizer_started(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._recorder is not None:
            self._recorder.batch_ended(
                _loss(outputs, trainer.accumulate_grad_batches),
                step=trainer.global_step,
                epoch=trainer.current_epoch,
            )

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.validation_started()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.validation_ended(validation_figures(trainer.callback_metrics))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._recorder is not None:
            self._recorder.save_started(lambda: self._saved(trainer))

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not on_train_end: a last checkpoint may be saved after it.
        self._close(None)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close(type(exception).__name__)

    @override
    def state_dict(self) -> dict[str, Any]:
        now = self._progress if self._recorder is None else self._recorder.progress()
        return {"tokens": now.tokens, "elapsed_s": now.elapsed_s}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._progress = Progress(
            tokens=int(state_dict["tokens"]), elapsed_s=float(state_dict["elapsed_s"])
        )

    def _sinks(self, trainer: pl.Trainer, facts: RunFacts) -> list[Sink]:
        """Where events go on rank 0. The report reads what the CSV files hold, so it follows."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        csv_log = CsvLog(self.out_dir, after_step=facts.start_step)
        terminal = Terminal(facts, report=self.out_dir / "report.html")
        terminal.open()
        if csv_log.dropped_rows:
            terminal.note(
                f"dropped {csv_log.dropped_rows} rows after step {facts.start_step} "
                f"from the CSV files in {self.out_dir}"
            )
        board = Board(self._summary_writer(trainer, facts), facts)
        return [csv_log, board, Report(self.out_dir, facts), terminal]

    def _summary_writer(self, trainer: pl.Trainer, facts: RunFacts) -> SummaryWriter:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                return logger.experiment
        # Steps that a killed run did after its checkpoint are drawn once.
        return SummaryWriter(str(self.out_dir / "tensorboard"), purge_step=facts.start_step + 1)

    def _saved(self, trainer: pl.Trainer) -> tuple[str | None, float | None]:
        """Name and seconds of the last save.

        A strategy that does not tell leaves the checkpoints that were not there before.
        """
        if isinstance(trainer.strategy, TellsSaves) and trainer.strategy.last_save:
            return trainer.strategy.last_save
        before, self._saved_names = self._saved_names, _saved_names(trainer)
        return ", ".join(sorted(self._saved_names - before)) or None, None

    def _close(self, reason: str | None) -> None:
        if self._recorder is not None:
            self._progress = self._recorder.progress()
            recorder, self._recorder = self._recorder, None
            recorder.close(reason)


def _facts(trainer: pl.Trainer, pl_module: pl.LightningModule) -> RunFacts:
    strategy = trainer.strategy
    told = strategy if isinstance(strategy, TellsPlan) else None
    plan = told.plan if told else None
    sizes = [(p.numel(), p.requires_grad) for p in pl_module.parameters()]
    return RunFacts(
        model=type(pl_module).__name__,
        num_params=plan.num_params if plan else sum(size for size, _ in sizes),
        num_trainable=plan.num_trainable if plan else sum(size for size, on in sizes if on),
        world_size=trainer.world_size,
        device_name=_device_name(strategy.root_device),
        strategy=plan.strategy if plan else type(strategy).__name__,
        precision=plan.precision if plan else str(trainer.precision),
        start_step=trainer.global_step,
        total_steps=_total_steps(trainer, pl_module),
        plan=plan,
        checks=dict(told.checks) if told else {},
        offload=_offload(strategy),
        link_bytes_per_s=link_ceiling(_device_name(strategy.root_device)),
    )


def _offload(strategy: Strategy) -> OffloadFigures | None:
    return strategy.take_offload_figures() if isinstance(strategy, TellsOffload) else None


def _probes(trainer: pl.Trainer, pl_module: pl.LightningModule, facts: RunFacts) -> Probes:
    strategy = trainer.strategy
    precision = trainer.precision_plugin
    told = strategy if isinstance(strategy, TellsPlan) else None

    def gather(row: Any) -> list[list[float]]:
        return gather_rows(
            row,
            global_rank=trainer.global_rank,
            world_size=trainer.world_size,
            device=strategy.root_device,
            sum_over_ranks=lambda table: _tensor(strategy.reduce(table, reduce_op="sum")),
        )

    def grad_norm() -> float | None:
        norm = told.grad_norm if told else None
        return None if norm is None else float(norm)

    return Probes(
        gather=gather,
        exposed_comm_ms=told.take_exposed_comm_ms if told else lambda: None,
        offload=lambda: _offload(strategy),
        grad_norm=grad_norm,
        skipped_steps=lambda: (
            precision.skipped_steps if isinstance(precision, _CountsSkips) else None
        ),
        memory_bytes=lambda: peak_memory_bytes(strategy.root_device),
        flops_per_token=(
            pl_module.flops_per_token() if isinstance(pl_module, CountsTokens) else None
        ),
        peak_flops=peak_bf16_flops(facts.device_name),
    )


def _tensor(reduced: Any) -> Tensor:
    assert isinstance(reduced, Tensor), "a strategy reduces a tensor to a tensor"
    return reduced


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _total_steps(trainer: pl.Trainer, pl_module: pl.LightningModule) -> int | None:
    """Value of `trainer.global_step` at the end, where it is known."""
    if trainer.max_steps < 0 and not pl_module.automatic_optimization:
        # How often such a module steps its optimizers is its own affair.
        return None
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:
        # Accumulation changes between epochs.
        return None
    return int(total) if 0 < total < float("inf") else None


def _loss(outputs: Tensor | Mapping[str, Any] | None, accumulated: int) -> Tensor | None:
    """The micro-batch's loss as the module returned it; Lightning has divided it."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        return None
    return loss.detach() if accumulated == 1 else loss.detach() * accumulated


def _saved_names(trainer: pl.Trainer) -> set[str]:
    """Names of the checkpoints that the ModelCheckpoint callbacks keep."""
    paths: set[str] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            paths |= {callback.best_model_path, callback.last_model_path, *callback.best_k_models}
    return {Path(path).name for path in paths if path}
