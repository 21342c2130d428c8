"""Runs in which something gets stuck: `python -m tests.stuck NAME ...`, see `tests/forked.py`."""

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import zero_strategy
from tests import lit
from tests.forked import serve, trouble_begins
from tests.small_run import SHORT
from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.stopping import SAME_SIGNAL_S
from zero_strategy.experiments.tasks import TokenTask
from zero_strategy.experiments.train import train

TIMEOUT_S = 2.0
FOREVER_S = 60.0


def fit(
    *,
    module: pl.LightningModule | None = None,
    data: Any = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> None:
    warnings.simplefilter("ignore")
    guards = zero_strategy.GuardConfig(hang_timeout=timedelta(seconds=timeout_s))
    world_size = int(os.environ["WORLD_SIZE"])
    strategy = zero_strategy.ZeroStrategy(stage=3, guards=guards)
    options = {"max_steps": 6, "devices": world_size} | options
    lit.trainer(strategy, **options).fit(module or lit.Lit(), data or lit.loader())


def is_rank(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


def sleep_here() -> None:
    trouble_begins()
    time.sleep(FOREVER_S)


class StuckStep(lit.Lit):
    """Rank 1 never gets to the forward of its third micro-batch."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2 and is_rank(1):
            sleep_here()
        return super().training_step(batch, index)


class StuckLoader:
    """One rank never gets its third batch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(8):
            if index == 2 and is_rank(self.rank):
                sleep_here()
            yield lit.Tokens(6).rows

    def __len__(self) -> int:
        return 8


class BeforeBarrier(Callback):
    """Rank 1 does not come to a barrier in time."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if i == 2:
            if is_rank(1):
                sleep_here()
            dist.barrier()


class StuckBackward(Callback):
    """Rank 1 does not come back from a hook of the backward."""

    def on_before_backward(self, trainer: Any, module: pl.LightningModule, loss: Tensor) -> None:
        if is_rank(1) and trainer.global_step == 2:
            loss.register_hook(lambda _: sleep_here())


class Stopped(Callback):
    """Rank 1 is stopped from outside."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if i == 2 and is_rank(1):
            trouble_begins()
            os.kill(os.getpid(), signal.SIGSTOP)


class Working(Callback):
    """Rank 1 takes longer than the limit, but says that it works, and forks a child meanwhile."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, i: int
    ) -> None:
        if i == 2 and is_rank(1):
            child = os.fork()
            for _ in range(10):
                time.sleep(TIMEOUT_S / 7)
                if child:
                    trainer.strategy.alive()
            if not child:
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            print("the child ended by itself", flush=True)


def working() -> None:
    fit(callbacks=[Working()])
    # The watch has ended with the run.
    time.sleep(1.1 * TIMEOUT_S)
    print(f"still here, {torch.get_num_threads()} threads", flush=True)


class Dying(Callback):
    """Rank 1 is killed; rank 0 is in code that needs no other rank, and would not notice."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if i == 2:
            trouble_begins()
            if is_rank(1):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(FOREVER_S)


class Failing(Callback):
    """Rank 1 fails; rank 0 would not notice."""

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if i == 2:
            trouble_begins()
            if is_rank(1):
                raise ValueError("broken on one rank")
            time.sleep(FOREVER_S)


def signalled_twice() -> None:
    """A run of `zs train` that is too long in a micro-batch to act on the first signal."""

    def training_step(task: TokenTask, batch: Any, batch_idx: int) -> Any:
        if task.global_step == 1:
            trouble_begins()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # as a launcher passes it on
            time.sleep(1.5 * SAME_SIGNAL_S)
            print("the first one is waited for", flush=True)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(FOREVER_S)
        return plain(task, batch, batch_idx)

    plain, TokenTask.training_step = TokenTask.training_step, training_step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        words = ["trainer.strategy=zero3", "trainer.devices=1", "trainer.max_steps=9"]
        train(load_config("tiny.yaml", [*SHORT, *words, f"out_dir={folder}"]))


CASES: dict[str, tuple[int, Callable[[], Any]]] = {
    "step": (2, lambda: fit(module=StuckStep())),
    "loader": (2, lambda: fit(data=StuckLoader(1))),
    "barrier": (2, lambda: fit(callbacks=[BeforeBarrier()])),
    "backward": (2, lambda: fit(callbacks=[StuckBackward()])),
    "stopped": (2, lambda: fit(callbacks=[Stopped()])),
    "alone": (1, lambda: fit(data=StuckLoader(0))),
    "working": (2, working),
    "dying": (2, lambda: fit(callbacks=[Dying()], timeout_s=600)),
    "signalled": (1, signalled_twice),
    "failing": (2, lambda: fit(callbacks=[Failing()], timeout_s=600)),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(CASES, sys.argv[1:] or list(CASES))
