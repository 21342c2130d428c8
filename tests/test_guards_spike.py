"""A spike of the loss is found alike on all ranks: warned of, the end of the run, or undone."""

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import zero_strategy
from tests import guarded, lit
from tests.guarded import Net
from tests.ranks import ranks
from zero_strategy import GuardConfig, ShardedEMA
from zero_strategy.config import Spike as SpikeAction
from zero_strategy.guards import arrivals
from zero_strategy.guards.spikes import FEWEST, SpikeWatch, sigmas_above
from zero_strategy.presets import PRESETS
from zero_strategy.strategy import ZeroStrategy

SPIKE = 25
"""Number of the micro-batch that is loud where a step has one."""
SAVED = 22


def strategy(name: str, spike: SpikeAction, **guards: Any) -> ZeroStrategy:
    config = GuardConfig(spike_sigmas=8.0, spike=spike, **guards)
    return ZeroStrategy(**PRESETS[name], guards=config)


class SaveAt(Callback):
    """Saves after chosen optimizer steps."""

    def __init__(self, folder: str, steps: Collection[int] = (SAVED,)) -> None:
        self.folder, self.steps = folder, set(steps)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}")


# What is a spike.


def judge(losses: list[float], sigmas: float = 8.0) -> list[int]:
    watch = SpikeWatch(sigmas, None, torch.device("cpu"))
    for step, loss in enumerate(losses):
        watch.watch([torch.tensor(loss, dtype=torch.float64)], step)
    return [spike.step for spike in watch.found()]


def test_the_distance_from_the_median_is_in_standard_deviations_of_normal_losses() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.2, 10_001)
    sigmas, median = sigmas_above(4.0, losses.tolist())
    assert median == pytest.approx(3.0, abs=0.01)
    assert sigmas == pytest.approx(5.0, rel=0.05)
    # A third of outliers hardly moves it; a mean and its deviation would lose the spike.
    assert sigmas_above(4.0, [*losses[:200], *[50.0] * 100])[0] > 2.0


def test_falling_losses_are_no_spike_and_a_loss_that_stays_up_is_soon_none() -> None:
    draw = np.random.default_rng(1)
    falling = [8 * 0.98**k + draw.normal(0, 0.02) for k in range(200)]
    assert not judge(falling)
    raised = judge([*draw.normal(3, 0.1, 100), *draw.normal(9, 0.1, 100)])
    assert raised == list(range(100, 100 + len(raised)))
    assert 40 < len(raised) < 60


def test_too_few_losses_judge_nothing_but_one_that_is_not_finite() -> None:
    assert not judge([1.0] * (FEWEST - 1) + [1e6])
    assert judge([1.0] * FEWEST + [1e6]) == [FEWEST]
    assert judge([float("nan"), 1.0, float("inf")]) == [0, 2]
    # Losses that are all the same make no spike of the last digit.
    assert not judge([1.0] * 50 + [1.0001])


# Warning and stopping.


def run_into(name: str, spike: SpikeAction, folder: str, **options: Any) -> dict[str, Any]:
    """Train on 30 steps, one of them loud, with a checkpoint before."""
    spoilt = options.pop("spoilt", {"loud_at": [SPIKE]})
    guards = options.pop("guards", {})
    num = options.pop("num_batches", 30)
    saves, without = options.pop("saves", (SAVED,)), options.pop("without", ())
    module = options.pop("kind", Net)(**spoilt)
    average = ShardedEMA(decay=0.5)
    callbacks = [average, SaveAt(folder, saves)]
    run = lit.trainer(strategy(name, spike, **guards), max_epochs=1, callbacks=callbacks, **options)
    error = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            run.fit(module, guarded.loader(num, without=without))
        except ValueError as failure:
            error = f"{type(failure).__name__}: {failure}"
    return {
        "error": error,
        "warnings": [str(w.message) for w in told if "optimizer step" in str(w.message)],
        "seen": module.seen,
        "steps": run.global_step,
        "state": guarded.state(run, module) if not error else {},
        "average": {n: guarded.local(t).tolist() for n, t in average.average.items()},
        "rollbacks": run.strategy.num_rollbacks,
    }


def test_a_spike_is_warned_of_with_step_loss_median_and_distance(tmp_path: Path) -> None:
    results = ranks(2).run(run_into, "zero3", "warn", str(tmp_path))
    (text,), other = (found["warnings"] for found in results)
    assert not other, "one rank speaks"
    assert "loss = " in text
    assert "e+0" in text.split()[2], "the loss is of a loud batch"
    assert "at optimizer step 26, " in text
    assert "robust standard deviations above the median" in text
    for found in results:
        assert found["error"] == ""
        assert found["steps"] == 30


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_spike_stops_all_ranks_and_nothing_is_saved_after_it(
    world_size: int, tmp_path: Path
) -> None:
    for found in ranks(world_size).run(
        run_into, "zero3", "stop", str(tmp_path), saves=(22, 26, 27)
    ):
        assert found["error"].startswith("LossSpikeError: loss = ")
        assert "at optimizer step 26" in found["error"]
        assert found["seen"][-1] == SPIKE, "the save after the step saw it first"
    assert [p.name for p in tmp_path.iterdir()] == ["22"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_spike_on_one_rank_is_seen_in_the_mean_of_all(accumulate: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": accumulate, "num_batches": 30 * accumulate}
    spoilt = {"bad_loss_at": [3 * accumulate]}
    for found in ranks(2).run(
        run_into, "zero3", "stop", str(tmp_path), spoilt=spoilt, saves=(), **options
    ):
        assert found["error"].startswith("LossSpikeError: loss = nan at optimizer step 4")
        # Seen before the next micro-batch, agreed on before the one after.
        assert len(found["seen"]) == 4 * accumulate + 1


def test_the_loss_of_a_skipped_step_is_no_spike(tmp_path: Path) -> None:
    for found in ranks(2).run(
        run_into,
        "zero3",
        "stop",
        str(tmp_path),
        spoilt={"nan_at": [SPIKE]},
        guards={"non_finite": "skip"},
    ):
        assert (found["error"], found["steps"]) == ("", 30)


# Going back.


@pytest.mark.parametrize(
    ("name", "world_size", "accumulate", "options"),
    [
        ("zero1", 1, 1, {}),
        ("zero2", 2, 2, {"gradient_clip_val": 0.5}),
        ("zero3", 2, 1, {"precision": "bf16-mixed", "guards": {"non_finite": "skip"}}),
        ("zero3_offload", 2, 2, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
    ],
)
def test_a_run_that_went_back_is_the_run_without_the_batches_since_the_checkpoint(
    name: str, world_size: int, accumulate: int, options: dict[str, Any], tmp_path: Path
) -> None:
    options = options | {"accumulate_grad_batches": accumulate, "num_batches": 32 * accumulate}
    loud = {"loud_at": [SPIKE * accumulate]}
    found = ranks(world_size).run(
        run_into, name, "rollback", str(tmp_path / "loud"), spoilt=loud, **options
    )
    # Several ranks agree one micro-batch later. A step that began by then is not taken.
    left_out = range(SAVED * accumulate, (SPIKE + world_size) * accumulate)
    wanted = ranks(world_size).run(
        run_into, name, "rollback", str(tmp_path / "b"), spoilt={}, without=left_out, **options
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one["error"], one["rollbacks"], other["rollbacks"]) == ("", 1, 0)
        assert guarded.differing(one["state"], other["state"]) == []
        assert one["average"] == other["average"]
        assert one["seen"] == list(range(32 * accumulate)), "the data goes on"
        assert one["steps"] == 32, "Lightning's count too"
    (text,) = found[0]["warnings"]
    assert f"Went back to {tmp_path}/loud/22 of optimizer step 22; the batches since" in text


def test_a_checkpoint_that_is_due_at_a_spike_holds_the_state_gone_back_to(tmp_path: Path) -> None:
    found = ranks(2).run(run_into, "zero3", "rollback", str(tmp_path), saves=(22, 26))
    assert [one["rollbacks"] for one in found] == [1, 1]
    before, after = (zero_strategy.load_state_dict(tmp_path / n) for n in ("22", "26"))
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_spike_of_the_last_step_is_gone_back_from_too(tmp_path: Path) -> None:
    options = {"num_batches": SPIKE + 1}
    found = ranks(2).run(run_into, "zero3", "rollback", str(tmp_path), **options)
    kept = zero_strategy.load_state_dict(tmp_path / "22")
    for rank, one in enumerate(found):
        assert one["rollbacks"] == 1
        own = kept["layers.0.linear.weight"].chunk(2)[rank]
        assert one["state"]["weight.layers.0.linear.weight"] == guarded.as_bytes(own)


def run_late(delays: tuple[int, ...], folder: str) -> dict[str, Any]:
    """The same as on an accelerator, where ranks see a loss at different times."""
    delay = delays[int(torch.distributed.get_rank())]
    real = arrivals.start_copy
    arrivals.start_copy = lambda values: (values.clone(), guarded.Late(delay))
    try:
        return run_into("zero3", "rollback", folder, num_batches=36)
    finally:
        arrivals.start_copy = real


@pytest.mark.parametrize("delays", [(0, 2), (1, 0), (99, 99)])
def test_ranks_that_see_a_spike_at_different_times_go_back_together(
    delays: tuple[int, int], tmp_path: Path
) -> None:
    one, other = ranks(2).run(run_late, delays, str(tmp_path))
    assert (one["error"], other["error"]) == ("", "")
    assert one["rollbacks"] == other["rollbacks"] == 1
    assert one["seen"] == other["seen"] == list(range(36))


def test_after_three_rollbacks_the_run_ends(tmp_path: Path) -> None:
    spoilt = {"loud_at": (25, 28, 31, 34)}
    for found in ranks(2).run(
        run_into, "zero3", "rollback", str(tmp_path), spoilt=spoilt, num_batches=40
    ):
        assert "at optimizer step 35" in found["error"]
        assert f"after 3 rollbacks: must not go on so. Resume from {tmp_path}/22" in found["error"]
        assert found["rollbacks"] == 3


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    for found in ranks(2).run(run_into, "zero3", "rollback", str(tmp_path), saves=()):
        assert "must come after the first checkpoint" in found["error"]


class Damage(SaveAt):
    """Changes a byte of its checkpoint."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        saves = trainer.global_step in self.steps
        super().on_train_batch_end(trainer)
        if saves and trainer.is_global_zero:
            file = Path(self.folder) / "22" / "tensors-0.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)


def go_back_to_damage(folder: str) -> tuple[str, list[str]]:
    module = Net(loud_at=[SPIKE])
    states: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            states.append(guarded.state(trainer, module))

    callbacks = [Damage(folder), Keep()]
    run = lit.trainer(strategy("zero3", "rollback"), max_epochs=1, callbacks=callbacks)
    try:
        run.fit(module, guarded.loader(30))
    except ValueError as error:
        return str(error), guarded.differing(states[-1], guarded.state(run, module))
    return "", []


def test_a_damaged_checkpoint_is_not_gone_back_to_and_nothing_is_changed(tmp_path: Path) -> None:
    results = ranks(2).run(go_back_to_damage, str(tmp_path))
    assert results[0] == results[1]
    error, changed = results[0]
    assert "and the last checkpoint cannot be gone back to: " in error
    assert "tensors-0.safetensors" in error
    assert changed == []


def go_back_to_resumed(folder: str) -> dict[str, Any]:
    run_into("zero3", "rollback", folder, spoilt={}, num_batches=22)
    module = Net(loud_at=[SPIKE])
    run = lit.trainer(strategy("zero3", "rollback"), max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, guarded.loader(30), ckpt_path=f"{folder}/22")
    return {"rollbacks": run.strategy.num_rollbacks}


def test_a_resumed_run_can_go_back_to_where_it_began(tmp_path: Path) -> None:
    assert ranks(2).run(go_back_to_resumed, str(tmp_path)) == [{"rollbacks": 1}] * 2


# Manual optimization.


class Manual(Net):
    returns_loss = True

    def __init__(self, **spoilt: Any) -> None:
        super().__init__(**spoilt)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()
        return loss if self.returns_loss else None


class Silent(Manual):
    returns_loss = False


def test_manual_optimization_is_watched_where_the_step_returns_its_loss(tmp_path: Path) -> None:
    for found in ranks(2).run(run_into, "zero3", "stop", str(tmp_path), kind=Manual):
        assert "at optimizer step 26" in found["error"]
    for found in ranks(2).run(run_into, "zero3", "stop", str(tmp_path), kind=Silent):
        assert "zero.guards.spike_sigmas = 8.0: must be None where" in found["error"]
