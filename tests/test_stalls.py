"""Exposed communication is measured, and lies within the step it belongs to."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from tests import lit
from tests.ranks import ranks


class _Reading(lit.Lit):
    """Reads the stalls of every step; rank 1 may be late to its collectives."""

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.late_s = late_s
        self.stalls: list[float | None] = []
        self.steps: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        dist.barrier()
        self.begin = time.perf_counter()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        if self.trainer.global_rank == 1:
            time.sleep(self.late_s)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append((time.perf_counter() - self.begin) * 1e3)
        self.stalls.append(self.trainer.strategy.take_exposed_comm_ms())


def _read(name: str, late_s: float) -> tuple[list[float | None], list[float]]:
    module = _Reading(late_s)
    lit.fit(name, module=module, steps=4)
    return module.stalls, module.steps


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_waiting_for_a_late_rank_is_exposed_communication(name: str) -> None:
    (early, steps), (late, _) = ranks(2).run(_read, name, 0.1)
    assert early[0] is None
    for stall, late_stall, step in zip(early[1:], late[1:], steps[1:], strict=True):
        assert stall is not None
        assert late_stall is not None
        assert 90 <= stall <= step
        assert late_stall < stall - 50


def test_a_single_rank_has_none() -> None:
    assert ranks(1).run(_alone)[0] == [0.0] * 3


def _alone() -> list[float | None]:
    run = lit.trainer("zero3", max_steps=1)
    run.fit(lit.Lit(), lit.loader())
    return [run.strategy.take_exposed_comm_ms() for _ in range(3)]
