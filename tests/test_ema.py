"""ShardedEMA holds the average one plain process would hold; other averaging is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torch.distributed.tensor import DTensor

import zero_strategy
from tests import lit
from tests.ranks import ranks
from zero_strategy import ShardedEMA
from zero_strategy.checkpoint.export import export
from zero_strategy.gradient import local

DECAY = 0.8
EPOCH = 3 * lit.GLOBAL_BATCH
FP32_TOLERANCE = 2e-6  # see tests/test_parity.py

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing.
    "ignore:Be aware that when using"
)


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
    for decay in (1.0, -0.1, float("nan"), "a", None):
        with pytest.raises(ValueError, match=r"^ema\.decay = .*: must be in \[0, 1\)\. Use 0\.999"):
            ShardedEMA(decay=decay)  # type: ignore[arg-type]
