"""Lightning's callbacks do what they do in one plain process."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    Timer,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from tests import lit
from tests.ranks import ranks
from tests.runs import HeadFirst, Unfreezing, refusal

NAMES = ("zero1", "zero2", "zero3")
EPOCH = 3 * lit.GLOBAL_BATCH
FP32_TOLERANCE = 2e-6  # see tests/test_parity.py

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing.
    "ignore:Be aware that when using"
)


# Callbacks that watch a run.


class Memory(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append({"at": float(step or 0)} | {n: float(v) for n, v in metrics.items()})

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Scored(lit.Lit):
    """Validation losses that rise again, so that the best epoch is not the last."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        shift = (5.0, 3.0, 8.0, 9.0, 4.0)[self.trainer.current_epoch]
        self.log("val_loss", self.loss(batch) + shift, sync_dist=True)


def watched(strategy: str, folder: str) -> dict[str, Any]:
    stopping = EarlyStopping("val_loss", patience=2)
    keeping = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}-{step}")
    rates = LearningRateMonitor(logging_interval="step", log_momentum=True)
    timer = Timer(timedelta(hours=1), interval="step")
    logger = Memory()
    run = lit.trainer(
        strategy,
        max_epochs=5,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        callbacks=[stopping, keeping, rates, timer, GradientAccumulationScheduler({1: 3})],
    )
    module = Scored()
    run.fit(module, lit.loader(EPOCH), lit.loader(24))
    return {
        "stopped": (stopping.stopped_epoch, run.global_step, run.current_epoch),
        "kept": sorted(entry.name for entry in Path(folder).iterdir()),
        "best": (float(stopping.best_score), float(keeping.best_model_score or 0.0)),
        "losses": module.losses,
        "rates": rates.lrs,
        "logged": logger.metrics,
        "timed": timer.time_elapsed("train") > 0 and timer.time_elapsed("validate") > 0,
    }


@pytest.mark.parametrize("name", NAMES)
def test_watching_callbacks_see_and_decide_what_they_do_in_a_plain_process(
    name: str, tmp_path: Path
) -> None:
    expected = watched("auto", str(tmp_path / "plain"))
    assert expected["stopped"] == (3, 3 + 1 + 1 + 1, 4)
    for found in ranks(2).run(watched, name, str(tmp_path / name)):
        for key in ("stopped", "kept", "timed"):
            assert found[key] == expected[key], key
        for key in ("best", "losses"):
            assert found[key] == pytest.approx(expected[key], rel=FP32_TOLERANCE), key
        assert found["rates"] == expected["rates"]
        assert len(found["logged"]) == len(expected["logged"])
        for entry, wanted in zip(found["logged"], expected["logged"], strict=True):
            assert entry == pytest.approx(wanted, rel=FP32_TOLERANCE)


def stop_by_clock(strategy: str) -> int:
    """Steps taken when time is up on the first rank only."""
    run = lit.trainer(strategy, max_epochs=2)
    patience = timedelta(hours=1) if run.global_rank else timedelta(microseconds=1)
    run.callbacks.append(Timer(patience, interval="step"))
    run.fit(lit.Lit(), lit.loader(EPOCH))
    return run.global_step


def test_a_timer_stops_all_ranks_at_the_first_ranks_time() -> None:
    assert ranks(2).run(stop_by_clock, "zero3") == [1, 1]


class Counting(Callback):
    """Summaries of the module, before and after it is trained."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        summary = summarize(pl_module, max_depth=3)
        self.seen.append(
            {
                "total": summary.total_parameters,
                "trainable": summary.trainable_parameters,
                "megabytes": summary.model_size,
                "layers": dict(zip(summary.layer_names, summary.param_nums, strict=True)),
            }
        )

    on_train_end = on_fit_start


def count_parameters(strategy: str) -> list[Any]:
    module = lit.Lit(replace(lit.TINY, tied=True))
    module.gpt.layers[0].requires_grad_(False)
    counting = Counting()
    lit.trainer(strategy, max_steps=1, callbacks=[counting]).fit(module, lit.loader())
    return counting.seen


def test_model_summary_counts_the_whole_model_at_every_stage() -> None:
    expected = count_parameters("auto")
    assert expected[0]["total"] > expected[0]["trainable"] > 0
    for name in NAMES:
        for found in ranks(2).run(count_parameters, name):
            assert found == expected


# Learning rate search.


def find_rate(strategy: str, folder: str) -> dict[str, Any]:
    module = lit.Lit()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    run = lit.trainer(strategy, default_root_dir=folder, max_steps=2)
    finder = Tuner(run).lr_find(
        module,
        lit.loader(),
        min_lr=1e-4,
        max_lr=0.1,
        num_training=15,
        update_attr=False,
        early_stop_threshold=None,
    )
    assert finder is not None
    after = lit.whole(module)
    return {
        "suggestion": finder.suggestion(skip_begin=2, skip_end=2),
        "losses": module.losses,
        "rates": finder.results["lr"],
        "restored": all(torch.equal(after[n], before[n]) for n in before),
        "left": list(Path(folder).iterdir()),
    }


def test_rate_search_suggests_what_it_suggests_to_a_plain_process(tmp_path: Path) -> None:
    expected = find_rate("auto", str(tmp_path))
    for found in ranks(2).run(find_rate, "zero3", str(tmp_path)):
        assert found["suggestion"] == pytest.approx(expected["suggestion"], rel=1e-6)
        assert found["rates"] == pytest.approx(expected["rates"], rel=1e-6)
        # Large rates at the end magnify the rounding of the sums over ranks.
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["restored"]
        assert found["left"] == []


def fit_with_found_rate(strategy: str, folder: str) -> tuple[float, list[float]]:
    finding = LearningRateFinder(1e-4, 1e-2, num_training_steps=8, early_stop_threshold=None)
    module = lit.Lit()
    run = lit.trainer(strategy, default_root_dir=folder, max_steps=4, callbacks=[finding])
    run.fit(module, lit.loader())
    return module.lr, module.losses


def test_a_run_goes_on_with_the_rate_that_was_found(tmp_path: Path) -> None:
    rate, losses = fit_with_found_rate("auto", str(tmp_path))
    assert len(losses) == 8 + 4
    for found, found_losses in ranks(2).run(fit_with_found_rate, "zero3", str(tmp_path)):
        assert found == pytest.approx(rate, rel=1e-6)
        assert found_losses == pytest.approx(losses, rel=1e-5)


# Logged values.


class Logging(lit.Lit):
    """Logs numbers of its parameters and gradients, as a person debugging would."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.gpt.head.weight.grad
        self.log("norm", gradient.norm())
        self.log_dict({"sum": gradient.sum(), "largest": gradient.abs().max()})

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("weight", self.gpt.layers[0].feed_forward.down.weight.square().mean())
        self.log("epochs", self.gpt.norm.weight.sum(), on_step=False, on_epoch=True)


class LoggingToo(Callback):
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        pl_module.log("seen", pl_module.gpt.embed.weight.norm())


def log_sharded(strategy: str) -> dict[str, tuple[type, float]]:
    stopping = EarlyStopping("norm", patience=99, check_on_train_epoch_end=True)
    run = lit.trainer(strategy, max_epochs=2, callbacks=[stopping, LoggingToo()])
    run.fit(Logging(), lit.loader(EPOCH))
    assert type(stopping.best_score) is Tensor
    return {n: (type(v), float(v)) for n, v in run.callback_metrics.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logged_numbers_of_sharded_tensors_are_whole_and_plain(name: str) -> None:
    expected = log_sharded("auto")
    for metrics in ranks(2).run(log_sharded, name):
        assert metrics.keys() == expected.keys()
        for key, (kind, value) in metrics.items():
            assert kind is Tensor, key
            assert value == pytest.approx(expected[key][1], rel=1e-5, abs=1e-6), key


# Finetuning.


def finetune(strategy: str) -> tuple[lit.Outcome, bool]:
    module = HeadFirst()
    before = module.gpt.layers[1].attention.qkv.weight.detach().clone()
    outcome = lit.fit(
        strategy,
        module=module,
        data=lit.loader(EPOCH),
        steps=9,
        gradient_clip_val=0.5,
        callbacks=[Unfreezing()],
    )
    return outcome, torch.equal(outcome.parameters["gpt.layers.1.attention.qkv.weight"], before)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_unfrozen_later_learn_what_they_learn_in_a_plain_process(name: str) -> None:
    expected, still = finetune("auto")
    assert not still
    for outcome, _ in ranks(2).run(finetune, name):
        assert outcome.losses == pytest.approx(expected.losses, rel=FP32_TOLERANCE)
        for parameter, value in expected.parameters.items():
            torch.testing.assert_close(
                outcome.parameters[parameter], value, rtol=0, atol=FP32_TOLERANCE, msg=parameter
            )


# Pruning.


class MyPruning(ModelPruning):
    """A user's own kind of it."""


def prune(kind: type[ModelPruning]) -> str:
    run = lit.trainer("zero3", max_steps=1, callbacks=[kind("l1_unstructured", amount=0.2)])
    return refusal(run.fit, lit.Lit(), lit.loader())


@pytest.mark.parametrize("kind", [ModelPruning, MyPruning])
def test_pruning_of_whole_tensors_is_refused_with_the_way_to_prune(kind: type[Any]) -> None:
    for world_size in (1, 2):
        for message in ranks(world_size).run(prune, kind):
            assert message.startswith(f"trainer.callbacks: {kind.__name__} ranks the elements")
            assert "zs checkpoint export" in message
