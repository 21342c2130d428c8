"""Lightning's callbacks and ours do what they do in one plain process."""

import os
import signal
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor
from torch.distributed.tensor import DTensor

import zero_strategy
from tests import lit
from tests.ranks import ranks
from zero_strategy import ShardedEMA
from zero_strategy.checkpoint.export import export
from zero_strategy.gradient import local

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


# Averaged weights.

DECAY = 0.8


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """What a run with averaging did."""

    losses: list[float]
    val_losses: list[float]
    average: dict[str, Tensor]
    num_kept: int
    num_held: int


class Validated(lit.Lit):
    """Remembers the loss of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.val_losses: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(float(self.trainer.callback_metrics["val_loss"]))


class SaveAfter(Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def average(
    strategy: str,
    *,
    epochs: int = 2,
    save: str | None = None,
    resume: str | None = None,
    averaging: bool = True,
) -> Averaged:
    """Two optimizer steps of three micro-batches an epoch, a validation after each epoch."""
    ema = ShardedEMA(decay=DECAY)
    module = Validated()
    run = lit.trainer(
        strategy,
        max_epochs=epochs,
        accumulate_grad_batches=3,
        num_sanity_val_steps=0,
        callbacks=[*([ema] if averaging else []), *([SaveAfter(save)] if save else [])],
    )
    run.fit(module, lit.loader(2 * EPOCH), lit.loader(24), ckpt_path=resume)
    kept = ema.average
    return Averaged(
        losses=module.losses,
        val_losses=module.val_losses,
        average={n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in kept.items()},
        num_kept=sum(local(t).numel() for t in kept.values()),
        num_held=sum(local(p.detach()).numel() for p in module.parameters()),
    )


class ByHand(Callback):
    """The average as its definition says, in float64."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.mean = {n: p.detach().double() for n, p in pl_module.named_parameters()}
        self.step = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            for name, parameter in pl_module.named_parameters():
                self.mean[name] = DECAY * self.mean[name] + (1 - DECAY) * parameter.detach()


def assert_averaged_alike(found: Averaged, expected: Averaged, *, epoch: int = 0) -> None:
    assert found.losses == pytest.approx(expected.losses[6 * epoch :], rel=FP32_TOLERANCE)
    assert found.val_losses == pytest.approx(expected.val_losses[epoch:], rel=1e-6)
    assert found.average.keys() == expected.average.keys()
    for name, value in expected.average.items():
        torch.testing.assert_close(found.average[name], value, rtol=0, atol=1e-6, msg=name)


def test_average_of_one_process_is_the_one_by_definition() -> None:
    by_hand = ByHand()
    module = lit.Lit()
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 3}
    lit.trainer("auto", callbacks=[by_hand], **options).fit(module, lit.loader(2 * EPOCH))
    found = average("auto")
    for name, value in by_hand.mean.items():
        # Norm weights are near 1, where fp32 has 1.2e-7 per unit in the last place.
        torch.testing.assert_close(found.average[name].double(), value, rtol=0, atol=4e-7)
    # The validation sees the average and the training does not.
    assert found.losses == module.losses
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(by_hand.mean[name])
        loss = float(module.loss(lit.Tokens(24).rows))
    assert found.val_losses[-1] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(("world_size", "name"), [(2, "zero1"), (2, "zero2"), (4, "zero3")])
def test_sharded_average_equals_one_process_in_the_memory_of_a_shard(
    name: str, world_size: int
) -> None:
    expected = average("auto")
    results = ranks(world_size).run(average, name)
    for found in results:
        assert_averaged_alike(found, expected)
        assert found.num_kept == found.num_held
    assert sum(found.num_kept for found in results) == expected.num_kept


def test_average_resumes_on_other_ranks_and_in_a_plain_process(tmp_path: Path) -> None:
    expected = average("auto")
    path, out, file = (str(tmp_path / n) for n in ("a.ckpt", "out.ckpt", "file.ckpt"))
    ranks(2).run(average, "zero3", epochs=1, save=path)
    average("auto", epochs=1, save=file)
    export(path, out)
    assert_averaged_alike(average("auto", resume=out), expected, epoch=1)
    for resume in (path, file):
        for found in ranks(4).run(average, "zero3", resume=resume):
            assert_averaged_alike(found, expected, epoch=1)


def test_average_of_a_run_that_had_none_starts_from_its_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    average("auto", epochs=1, save=path, averaging=False)
    expected = average("auto", resume=path)
    for found in ranks(2).run(average, "zero3", resume=path):
        assert_averaged_alike(found, expected)


class Refreezing(Callback):
    """Blocks are trained for one epoch only."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.gpt.layers.requires_grad_(trainer.current_epoch == 0)


def average_part(strategy: str) -> list[float]:
    module = Validated()
    callbacks = [ShardedEMA(decay=DECAY), Refreezing()]
    run = lit.trainer(strategy, max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks)
    run.fit(module, lit.loader(EPOCH), lit.loader(24))
    return module.val_losses


def test_average_goes_on_when_part_of_the_module_is_frozen() -> None:
    expected = average_part("auto")
    for losses in ranks(2).run(average_part, "zero3"):
        assert losses == pytest.approx(expected, rel=1e-6)


def evaluate_average(strategy: str, path: str) -> list[float]:
    run = lit.trainer(strategy, callbacks=[ShardedEMA(decay=DECAY)])
    module, data = lit.Lit(seed=99), lit.loader(24)
    val = run.validate(module, data, ckpt_path=path, verbose=False)
    test = run.test(module, data, ckpt_path=path, verbose=False)
    return [val[0]["val_loss"], test[0]["test_loss"]]


class BreakInValidation(lit.Lit):
    """Breaks in the validation after the first epoch."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        raise RuntimeError("broken on purpose")


def average_and_break(strategy: str, folder: str) -> dict[str, Tensor]:
    """Weights of the checkpoint that the exception left."""
    keeping = ModelCheckpoint(folder, filename="broken", save_on_exception=True)
    run = lit.trainer(
        strategy,
        max_epochs=1,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
        callbacks=[ShardedEMA(decay=DECAY), keeping],
    )
    with pytest.raises(RuntimeError, match="broken on purpose"):
        run.fit(BreakInValidation(), lit.loader(EPOCH), lit.loader(24))
    return zero_strategy.load_state_dict(Path(folder) / "broken.ckpt")


def test_evaluation_of_a_checkpoint_uses_its_average(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = ranks(2).run(average, "zero3", epochs=1, save=path)[0].val_losses[0]
    for losses in ranks(2).run(evaluate_average, "zero3", path):
        assert losses == pytest.approx([expected, expected], rel=1e-6)


def test_an_exception_in_validation_leaves_the_trained_weights(tmp_path: Path) -> None:
    expected = lit.fit("auto", steps=3, data=lit.loader(EPOCH)).parameters
    for weights in ranks(2).run(average_and_break, "zero3", str(tmp_path)):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=FP32_TOLERANCE, msg=name)


def refuse_averaging(index: int) -> str:
    callback = [
        WeightAveraging(),
        EMAWeightAveraging(),
        StochasticWeightAveraging(swa_lrs=1e-3),
    ][index]
    try:
        lit.trainer("zero3", max_epochs=2, callbacks=[callback]).fit(lit.Lit(), lit.loader(EPOCH))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("index", range(3))
def test_averaging_of_whole_tensors_is_refused_and_the_sharded_one_named(index: int) -> None:
    kind = (WeightAveraging, EMAWeightAveraging, StochasticWeightAveraging)[index].__name__
    for message in ranks(2).run(refuse_averaging, index):
        assert message.startswith(f"trainer.callbacks: {kind} ")
        assert "zero_strategy.ShardedEMA" in message


def test_a_decay_out_of_range_is_refused() -> None:
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"^ema\.decay = .*: must be in \[0, 1\)\. Use 0\.999"):
            ShardedEMA(decay=decay)


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


class Unfreezing(BaseFinetuning):
    """The blocks stay frozen for one epoch, then join as a parameter group of their own."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.gpt.layers)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.gpt.layers, optimizer, lr=2e-3)


class HeadFirst(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


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


# Stops.


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
    names, losses = break_and_go_on("auto", str(tmp_path / "plain"))
    assert names == ["epoch=0-step=4.ckpt"]
    for found, found_losses in ranks(2).run(break_and_go_on, name, str(tmp_path / name)):
        assert found == names
        assert found_losses == pytest.approx(losses, rel=FP32_TOLERANCE)
