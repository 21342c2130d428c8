"""The places of Lightning that `zero_strategy/seams.py` relies on are where it says."""

import inspect
from typing import Any

import lightning.pytorch as pl

from tests import lit
from tests.counting import collectives
from tests.ranks import ranks
from zero_strategy import seams


def test_every_evaluation_loop_reads_the_attributes_that_are_set() -> None:
    for loop in seams.evaluation_loops(pl.Trainer(accelerator="cpu", logger=False)):
        assert isinstance(loop.inference_mode, bool)
        assert callable(loop.on_iteration_done)
        assert callable(loop.on_run_end)
        run = inspect.getsource(type(loop).run.__closure__[0].cell_contents)
        assert "on_run_end()" in run
        told = "self.on_iteration_done()" in run
        assert told or isinstance(loop, pl.loops._PredictionLoop)


def test_training_asks_for_the_stop_broadcast_and_the_signal_handler_by_these_names() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(type(epoch_loop).advance)
    signals: Any = trainer._signal_connector
    registering = inspect.getsource(type(signals).register_signal_handlers)
    assert "self._sigterm_notifier_fn" in registering
    assert signals.received_sigterm is False


def _count_broadcasts(name: str) -> int:
    with collectives() as counts:
        lit.trainer(name, max_steps=3).fit(lit.Lit(), lit.loader())
    return counts["broadcast"]


def test_no_broadcast_is_left_in_a_training_step() -> None:
    # One at set-up for the float parameters and buffers of each of 3 blocks and of the root.
    assert ranks(2).run(_count_broadcasts, "zero3")[0] == 4
