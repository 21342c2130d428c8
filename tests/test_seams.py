"""The places of Lightning that `zero_strategy/seams.py` relies on are where it says."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loops import fetchers
from torch.utils.data import DataLoader

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


def test_training_updates_the_schedules_of_a_step_by_this_name() -> None:
    epoch_loop: Any = pl.Trainer(accelerator="cpu", logger=False).fit_loop.epoch_loop
    step = 'self.update_lr_schedulers("step", update_plateau_schedulers='
    assert f"{step}False)" in inspect.getsource(type(epoch_loop).advance)
    assert f"{step}True)" in inspect.getsource(type(epoch_loop).on_advance_end)
    updating = inspect.signature(type(epoch_loop).update_lr_schedulers)
    assert [*updating.parameters] == ["self", "interval", "update_plateau_schedulers"]


def test_every_loop_surrounds_its_fetches_by_these_methods() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    loops: list[Any] = [trainer.fit_loop.epoch_loop, *seams.evaluation_loops(trainer)]
    for loop in loops:
        module = inspect.getsource(inspect.getmodule(type(loop)))  # pyright: ignore[reportArgumentType]
        assert "data_fetcher._start_profiler = self._on_before_fetch" in module
        assert "data_fetcher._stop_profiler = self._on_after_fetch" in module
    calls: list[str] = []
    for _ in range(3):  # as a Trainer that fits several times
        seams.around_fetches(
            trainer, before=lambda: calls.append("before"), after=lambda: calls.append("after")
        )
    for loop in loops:
        loop._on_before_fetch()
        loop._on_after_fetch()
    assert calls == ["before", "after"] * len(loops)


def test_slurms_signal_is_handled_by_this_name() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    signals: Any = trainer._signal_connector
    registering = inspect.getsource(type(signals).register_signal_handlers)
    assert "sigusr_handlers.append(self._slurm_sigusr_handler_fn)" in registering
    assert list(inspect.signature(signals._slurm_sigusr_handler_fn).parameters) == ["signum", "_"]


# Resuming.


def fitting_trainer() -> Any:
    return pl.Trainer(accelerator="cpu", logger=False)


def test_training_asks_for_batches_between_these_calls() -> None:
    trainer, calls = fitting_trainer(), []
    for _ in range(2):  # as a Trainer that fits several times
        seams.before_batch(trainer, lambda: calls.append("batch"))
    trainer.fit_loop.epoch_loop._on_before_fetch()
    assert calls == ["batch"]
    fetching = inspect.getsource(fetchers._DataFetcher.__next__)
    asked = fetching.index("self._start_profiler()")
    assert asked < fetching.index("next(self.iterator)")


def test_validation_and_iterators_of_an_epoch_run_inside_the_context_given() -> None:
    trainer, entered = fitting_trainer(), []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    seams.around_validation(trainer, context)
    seams.around_epoch_iterators(trainer, context)
    epoch_loop = trainer.fit_loop.epoch_loop
    with pytest.raises(AttributeError):
        epoch_loop.on_run_start(None)
    assert entered == ["in"]
    running = inspect.getsource(type(epoch_loop))
    for call in ("self.val_loop.run()", "self.val_loop.increment_progress_to_evaluation_end()"):
        assert call in running
    assert "iter(data_fetcher)" in inspect.getsource(type(epoch_loop).on_run_start)
    assert "self.on_run_start(data_fetcher)" in inspect.getsource(type(epoch_loop).run)
    for name in ("run", "increment_progress_to_evaluation_end"):
        assert name in vars(epoch_loop.val_loop)
        assert callable(vars(type(epoch_loop.val_loop))[name])


def _fit_in_part() -> dict[str, Any]:
    """What a run of 4 micro-batches of the second epoch, of 6 each, leaves in these places."""
    run = lit.trainer("auto", max_steps=10)
    run.fit(lit.Lit(), lit.loader(6 * lit.GLOBAL_BATCH))
    return {"trainer": run, "loops": {"fit_loop": run.fit_loop.state_dict()}}


def test_the_state_of_the_loops_holds_what_is_rewound_under_these_names() -> None:
    there = _fit_in_part()
    trainer, loops = there["trainer"], there["loops"]
    assert seams.batches_trained(trainer) == (4, 10, False)
    assert [type(loader) for loader in seams.training_loaders(trainer)] == [DataLoader]
    epochs = loops["fit_loop"]["epoch_progress"]
    assert epochs["total"] == {"ready": 2, "completed": 2, "started": 2, "processed": 2}
    seams.leave_epoch_open(loops)
    assert epochs["total"] == {"ready": 2, "completed": 1, "started": 2, "processed": 1}
    seams.rewind(loops, seams.BatchesTrained(2, 8, at_end=False))
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    assert set(progress["current"].values()) == {2}
    assert set(progress["total"].values()) == {8}
    seams.recount(trainer, 3)
    assert seams.batches_trained(trainer) == (3, 10, False)


def test_an_epoch_that_is_over_is_followed_by_the_next() -> None:
    trainer = fitting_trainer()
    epochs, epoch_loop = trainer.fit_loop.epoch_progress, trainer.fit_loop.epoch_loop
    for counts in (epochs.total, epochs.current):
        counts.ready = counts.started = 1
    trainer.fit_loop.restarting = True
    seams.start_next_epoch(trainer)
    assert (epochs.total.processed, epochs.current.completed) == (1, 1)
    assert epoch_loop._batches_that_stepped == 1
    assert not trainer.fit_loop.restarted_mid_epoch
    assert not any(loop.restarting for loop in (trainer.fit_loop, epoch_loop, epoch_loop.val_loop))


def test_lightnings_word_of_loaders_that_start_again_is_left_out() -> None:
    trainer = fitting_trainer()
    loop = trainer.fit_loop.epoch_loop
    assert "You're resuming from a checkpoint that ended" in inspect.getsource(type(loop).reset)
    seams.without_replay_warning(trainer)
    assert "reset" in vars(loop)
    assert "self.reset()" in inspect.getsource(type(loop).run)


def test_batches_are_asked_for_ahead_where_nobody_knows_which_is_the_last() -> None:
    trainer = fitting_trainer()
    for fetcher, expected in (
        (fetchers._PrefetchDataFetcher(), True),
        (fetchers._DataLoaderIterDataFetcher(), False),
    ):
        trainer.fit_loop._data_fetcher = fetcher
        assert seams.reads_ahead(trainer) is expected
        fetcher.length = 3
        assert seams.reads_ahead(trainer) is False
