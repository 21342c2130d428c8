"""A run that a signal or an exception ends stops on all ranks and leaves a checkpoint."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

import zero_strategy
from tests import lit
from tests.ranks import RankError, ranks

NAMES = ("zero1", "zero2", "zero3")
EPOCH = 3 * lit.GLOBAL_BATCH
FP32_TOLERANCE = 2e-6  # see tests/test_parity.py

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing.
    "ignore:Be aware that when using"
)


class SignalOnce(Callback):
    """Sends SIGTERM to its own process after one micro-batch, on one rank only."""

    def __init__(self, rank: int, batch: int) -> None:
        self.rank, self.batch = rank, batch

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if trainer.global_rank == self.rank and i == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """How a run ended."""

    exception: str
    num_batches: int
    step: int
    restored: bool
    weights: dict[str, Tensor]


def stop(strategy: str, folder: str, rank: int, batch: int) -> Stopped:
    """Train for 9 micro-batches, 3 to an optimizer step, unless a signal comes."""
    handler = signal.getsignal(signal.SIGTERM)
    keeping = ModelCheckpoint(folder, filename="stopped", save_on_exception=True, save_top_k=0)
    module = lit.Lit()
    run = lit.trainer(
        strategy,
        max_epochs=1,
        accumulate_grad_batches=3,
        enable_checkpointing=True,
        callbacks=[SignalOnce(rank, batch), keeping],
    )
    exception = ""
    try:
        run.fit(module, lit.loader(3 * EPOCH))
    except SystemExit as stopped:
        exception = type(stopped).__name__
    return Stopped(
        exception=exception,
        num_batches=len(module.losses),
        step=run.global_step,
        restored=signal.getsignal(signal.SIGTERM) == handler,
        weights=lit.whole(module),
    )


@pytest.mark.parametrize(("rank", "batch"), [(0, 2), (1, 3), (1, 8), (0, 8)])
def test_a_signal_to_one_rank_stops_all_at_the_same_micro_batch_with_a_checkpoint(
    rank: int, batch: int, tmp_path: Path
) -> None:
    alone = ranks(1).run(stop, "auto", str(tmp_path / "alone"), 0, batch)[0]
    assert alone.exception == SIGTERMException.__name__
    assert alone.num_batches == batch + 1
    folder = tmp_path / "sharded"
    results = ranks(2).run(stop, "zero3", str(folder), rank, batch)
    for found in results:
        assert found.exception == alone.exception
        assert found.num_batches == results[0].num_batches
        assert found.step == results[0].step
        assert found.restored == alone.restored
    # The ranks agree one micro-batch after the signal, and look before the next.
    assert batch + 1 <= results[0].num_batches <= batch + 3
    stored = zero_strategy.load_state_dict(folder / "stopped.ckpt")
    for name, value in results[0].weights.items():
        assert torch.equal(stored[name], value)


class Breaking(lit.Lit):
    """Breaks after its forward in one micro-batch, on all ranks."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 4:
            raise RuntimeError("broken on purpose")
        return loss


def break_and_go_on(strategy: str, folder: str) -> tuple[list[str], list[float]]:
    """Names of what an exception left, and the losses of a run that goes on from it."""
    keeping = ModelCheckpoint(folder, save_on_exception=True, save_top_k=0)
    run = lit.trainer(strategy, max_steps=6, enable_checkpointing=True, callbacks=[keeping])
    with pytest.raises(RuntimeError, match="broken on purpose"):
        run.fit(Breaking(), lit.loader())
    names = sorted(entry.name for entry in Path(folder).iterdir())
    module = lit.Lit()
    again = lit.trainer(strategy, max_steps=6, callbacks=[keeping], enable_checkpointing=True)
    again.fit(module, lit.loader(), ckpt_path=str(Path(folder) / names[0]))
    return names, module.losses


@pytest.mark.parametrize("name", NAMES)
def test_an_exception_leaves_a_checkpoint_from_which_training_goes_on(
    name: str, tmp_path: Path
) -> None:
    uninterrupted = lit.fit("auto", steps=6).losses
    for found, found_losses in ranks(2).run(break_and_go_on, name, str(tmp_path)):
        assert found == ["epoch=0-step=4.ckpt"]
        assert found_losses == pytest.approx(uninterrupted[4:], rel=FP32_TOLERANCE)


class _AloneBroken(lit.Lit):
    """Fails on one rank only."""

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 1 and self.trainer.global_rank == 1:
            raise RuntimeError("broken on one rank")
        return super().training_step(batch, index)


def _break_alone(path: str) -> None:
    from zero_strategy import control

    control.JOIN_S = 2.0
    saver = ModelCheckpoint(path, save_on_exception=True)
    run = lit.trainer("zero3", max_steps=4, enable_checkpointing=True, callbacks=[saver])
    run.fit(_AloneBroken(), lit.loader())


def test_a_rank_that_fails_alone_does_not_wait_for_a_save_that_nobody_joins(tmp_path: Any) -> None:
    with pytest.raises(RankError, match="the other ranks did not join within 2 s"):
        ranks(2).run(_break_alone, str(tmp_path), timeout_s=15)


class _TimeIsUp(lit.Lit):
    """In its third micro-batch, rank 1 gets the signal that SLURM sends before it ends a job."""

    def training_step(self, batch: Any, index: int) -> Any:
        connector: Any = self.trainer._signal_connector
        if index == 2 and self.trainer.global_rank == 1:
            connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
        vars(self)["inside"] = True
        loss = super().training_step(batch, index)
        vars(self)["inside"] = False
        return loss


def _requeue(path: str) -> tuple[list[int], int]:
    """The steps at which Lightning saved and requeued the job, and the run's last one."""
    module, saved = _TimeIsUp(), []
    run = lit.trainer("zero3", max_steps=6)

    def handle(connector: Any, signum: int, _: Any) -> None:
        assert not vars(module)["inside"]
        saved.append(connector.trainer.global_step)
        connector.trainer.save_checkpoint(path)

    kind = type(run._signal_connector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "_slurm_sigusr_handler_fn", handle)
        run.fit(module, lit.loader())
    return saved, run.global_step


def test_slurms_signal_to_one_rank_saves_once_on_all_between_two_micro_batches(
    tmp_path: Path,
) -> None:
    found = ranks(2).run(_requeue, str(tmp_path / "hpc.ckpt"))
    assert found[0] == found[1]
    (steps, last), _ = found
    assert last == 6, "the run goes on, as under Lightning"
    assert len(steps) == 1
    assert steps[0] in (3, 4, 5)
    zero_strategy.load_state_dict(tmp_path / "hpc.ckpt")
