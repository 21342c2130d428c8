"""A gradient norm that is not finite is skipped without a trace, or ends the run on all ranks."""

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests import guarded, lit
from tests.counting import scalar_reads
from tests.guarded import Net
from tests.ranks import ranks
from zero_strategy import GuardConfig, Monitor, SaveConfig, ShardedEMA
from zero_strategy.checkpoint.verify import verify
from zero_strategy.control import NonFiniteGradientError
from zero_strategy.gradient import ShardNorms
from zero_strategy.guards import arrivals
from zero_strategy.guards.buffers import KeptBuffers
from zero_strategy.guards.non_finite import Culprits, Evidence, FiniteWatch, StopsRun
from zero_strategy.precision import ZeroPrecision
from zero_strategy.presets import PRESETS
from zero_strategy.strategy import ZeroStrategy

SKIP = GuardConfig(non_finite="skip")


def strategy(name: str, guards: GuardConfig = SKIP) -> ZeroStrategy:
    return ZeroStrategy(**PRESETS[name], guards=guards)


def failure(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Skipping.


class Around(Callback):
    """The state before and after one optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.states: list[dict[str, Any]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in [s * trainer.accumulate_grad_batches for s in (self.step, self.step + 1)]:
            self.states.append(guarded.state(trainer, pl_module))


def skip_one(name: str, accumulate: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two runs of 5 steps: one with a bad step more, one without its batches."""
    bad = 2 * accumulate
    options = {"accumulate_grad_batches": accumulate} | options
    watched = options.pop("watched", True)
    batches = range(bad, bad + accumulate)
    around = Around(step=2)
    module, data = Net(nan_at=[bad]), guarded.loader(6 * accumulate)
    average = ShardedEMA(decay=0.5)
    options["callbacks"] = [around, average] if watched else []
    run = guarded.fit(strategy(name), module, data, **options)
    plain, plain_average = Net(), ShardedEMA(decay=0.5)
    data = guarded.loader(6 * accumulate, without=batches)
    options["callbacks"] = [plain_average] if watched else []
    plain_run = guarded.fit(strategy(name, GuardConfig()), plain, data, **options)
    return {
        "changed by the step": guarded.differing(*around.states) if watched else [],
        "changed in the end": guarded.differing(
            guarded.state(run, module), guarded.state(plain_run, plain)
        ),
        "average": all(
            torch.equal(guarded.local(value), guarded.local(plain_average.average[name]))
            for name, value in average.average.items()
        ),
        "skipped": (run.strategy.skipped_steps, plain_run.strategy.skipped_steps),
        "steps": (run.global_step, plain_run.global_step),
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("name", "accumulate", "options"),
    [
        ("zero1", 1, {}),
        ("zero2", 2, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
        ("zero3", 1, {"precision": "bf16-true", "gradient_clip_val": 0.5}),
        (
            "zero3",
            2,
            {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ),
        ("zero1_offload", 1, {"precision": "bf16-mixed"}),
        ("zero3_offload", 2, {"precision": "bf16-mixed", "gradient_clip_val": 0.5}),
        # Where nobody looks at weights between steps, they are still on their way by the next.
        ("zero2_offload", 1, {"precision": "bf16-mixed", "watched": False}),
    ],
)
def test_a_skipped_step_leaves_no_trace_on_any_rank(
    world_size: int, name: str, accumulate: int, options: dict[str, Any]
) -> None:
    for found in ranks(world_size).run(skip_one, name, accumulate, options):
        assert found == {
            "changed by the step": [],
            "changed in the end": [],
            "average": True,
            "skipped": (1, 0),
            # Lightning's count is of steps that were tried.
            "steps": (6, 5),
        }


def test_buffers_come_back_whatever_a_forward_did_to_them() -> None:
    norm = torch.nn.BatchNorm1d(3)
    norm.register_buffer("table", torch.ones(2))
    kept = KeptBuffers(norm)
    kept.keep()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm(torch.full((4, 3), float("nan")))
    norm.table = norm.table + 1
    kept.restore()
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


# Ending the run.


def stop(name: str, guards: GuardConfig, options: dict[str, Any], **spoilt: Any) -> tuple[str, Any]:
    """What the run ended with, and its steps."""
    module = Net(**spoilt)
    run = lit.trainer(strategy(name, guards), max_epochs=1, **options)
    error = failure(run.fit, module, guarded.loader(10))
    tensors = [*module.parameters(), module.layers[0].norm.mean]
    finite = all(bool(guarded.local(t).isfinite().all()) for t in tensors)
    return error, (run.global_step, run.strategy.skipped_steps, finite)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["zero2", "zero3_offload"])
def test_so_many_skipped_steps_in_a_row_end_the_run_naming_parameter_and_rank(
    name: str, world_size: int
) -> None:
    options = {"precision": "bf16-mixed"}
    guards = GuardConfig(non_finite="skip", max_skipped=3)
    spoilt = {"nan_at": (1, 2, 4, 5, 6)}
    for error, rest in ranks(world_size).run(stop, name, guards, options, **spoilt):
        assert error.startswith(
            "NonFiniteGradientError: gradient norm = nan at optimizer step 7, first in "
            f"'layers.0.linear.weight', with a loss of nan on rank {world_size - 1}: must be finite"
        )
        assert "zero.guards.max_skipped = 3 in a row" in error
        # Two were skipped before, and did not count: a step between them was taken.
        assert rest == (6, 5, True)


def end_and_save(path: str) -> tuple[str, list[str]]:
    module = Net(nan_at=(2, 3))
    states: list[dict[str, Any]] = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            states.append(guarded.state(trainer, module))

    guards = GuardConfig(non_finite="skip", max_skipped=2)
    run = lit.trainer(strategy("zero3", guards), max_epochs=1, callbacks=[Keep()])
    assert "at optimizer step 4" in failure(run.fit, module, guarded.loader(6))
    changed = guarded.differing(states[1], guarded.state(run, module))
    return failure(run.save_checkpoint, path), changed


def test_what_is_left_when_too_many_steps_were_skipped_is_the_last_good_state(
    tmp_path: Path,
) -> None:
    assert ranks(2).run(end_and_save, str(tmp_path / "a")) == [("", [])] * 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zero1", {}),
        ("zero3", {"gradient_clip_val": 0.5}),
        ("zero3_offload", {"precision": "bf16-mixed"}),
    ],
)
def test_a_gradient_that_is_bad_by_itself_is_told_from_a_bad_loss(
    name: str, options: dict[str, Any]
) -> None:
    errors = ranks(2).run(stop, name, GuardConfig(), options, bad_gradient_at=[2])
    assert errors[0] == errors[1]
    error, rest = errors[0]
    assert "nan at optimizer step 3, first in 'layers.0.linear.weight', in the shard of" in error
    assert "though every loss was finite: must be finite. No weight was changed" in error
    assert rest == (2, 0, True)


def test_a_loss_that_is_nan_beside_finite_gradients_spoils_nothing(tmp_path: Path) -> None:
    for error, rest in ranks(2).run(_save_after, "zero3", str(tmp_path / "a"), bad_loss_at=[1]):
        assert not error
        assert rest == (3, 0, True)


def _save_after(name: str, path: str, **spoilt: Any) -> tuple[str, Any]:
    module = Net(**spoilt)
    run = guarded.fit(strategy(name), module, guarded.loader(3))
    error = failure(run.save_checkpoint, path)
    finite = all(bool(guarded.local(p).isfinite().all()) for p in module.parameters())
    return error, (run.global_step, run.strategy.skipped_steps, finite)


def test_finite_gradients_whose_norm_overflows_are_told_as_such() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3e38)
    norms = ShardNorms([parameter])
    guard = StopsRun(FiniteWatch(Culprits([("weight", parameter)], None)))
    with pytest.raises(NonFiniteGradientError) as caught:
        guard.admits(norms.total(), Evidence(step=7, norms=norms, losses=()))
    text = "gradient norm = inf at optimizer step 7, of gradients that are finite each, but too"
    assert str(caught.value).startswith(text)


def stop_late(delays: tuple[int, ...], path: str) -> tuple[str, int, str]:
    """A run as on an accelerator, where a norm is known some micro-batches later."""
    delay = delays[int(torch.distributed.get_rank())]
    real = arrivals.start_copy
    arrivals.start_copy = lambda values: (values.clone(), guarded.Late(delay))
    try:
        module = Net(nan_at=[2])
        run = lit.trainer(strategy("zero3", GuardConfig()), max_epochs=1)
        error = failure(run.fit, module, guarded.loader(12))
        return error, len(module.seen), failure(run.save_checkpoint, path)
    finally:
        arrivals.start_copy = real


@pytest.mark.parametrize("delays", [(0, 0), (0, 3), (4, 1), (99, 99)])
def test_a_norm_that_arrives_late_stops_all_ranks_at_one_micro_batch_naming_the_same(
    delays: tuple[int, int], tmp_path: Path
) -> None:
    results = ranks(2).run(stop_late, delays, str(tmp_path / "a"))
    assert results[0] == results[1]
    error, num_batches, save = results[0]
    assert "gradient norm = nan at optimizer step 3, first in 'layers.0.linear.weight'" in error
    assert "with a loss of nan on rank 1: must be finite. The weights of the last steps" in error
    assert save == error, "nothing is saved of spoilt weights"
    # Seen before the next micro-batch, agreed on before the one after; or at the end of the run.
    assert num_batches == min(4 + min(delays), 12)


class _OwnClipping(Net):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Clips nothing, and does not ask the strategy to."""


def stop_own_clipping(name: str, guards: GuardConfig, options: dict[str, Any]) -> tuple[str, int]:
    module = _OwnClipping(nan_at=[1])
    run = lit.trainer(strategy(name, guards), max_epochs=1, **options)
    return failure(run.fit, module, guarded.loader(3)), run.strategy.skipped_steps


@pytest.mark.parametrize("name", ["zero3", "zero3_offload"])
def test_a_module_that_clips_by_itself_is_guarded_too(name: str) -> None:
    options = {"precision": "bf16-mixed"}
    (error, _), *_ = ranks(2).run(stop_own_clipping, name, GuardConfig(), options)
    assert "gradient norm = nan at optimizer step 2" in error
    assert ranks(2).run(stop_own_clipping, name, SKIP, options) == [("", 1), ("", 1)]


class _Manual(Net):
    def __init__(self, *, clips: bool, **spoilt: Any) -> None:
        super().__init__(**spoilt)
        self.automatic_optimization = False
        self.clips = clips
        self.norms: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        if self.clips:
            self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.norms.append(float(self.trainer.strategy.grad_norm))


def manual(guards: GuardConfig, clips: bool, **spoilt: Any) -> tuple[str, Any, list[float]]:
    module = _Manual(clips=clips, **spoilt)
    run = lit.trainer(strategy("zero3", guards), max_epochs=1)
    error = failure(run.fit, module, guarded.loader(4))
    finite = all(bool(guarded.local(p).isfinite().all()) for p in module.parameters())
    return error, (run.strategy.skipped_steps, finite), module.norms


@pytest.mark.parametrize("clips", [False, True])
def test_each_step_of_a_manual_optimization_is_judged_by_itself(clips: bool) -> None:
    fine = ranks(2).run(manual, SKIP, clips)
    assert [rest for _, rest, _ in fine] == [(0, True)] * 2
    # A clipped norm would be 0.5.
    assert fine[0][2][0] == pytest.approx(ranks(2).run(manual, SKIP, False)[0][2][0])
    for error, rest, _ in ranks(2).run(manual, SKIP, clips, nan_at=[2]):
        assert not error
        assert rest == (1, True)
    for error, rest, _ in ranks(2).run(manual, GuardConfig(), clips, nan_at=[2]):
        assert "gradient norm = nan at optimizer step 3, first in" in error
        assert rest == (0, True)


def half(max_skipped: int, scale: float, **spoilt: Any) -> tuple[str, Any]:
    plugin = ZeroPrecision("16-mixed")
    assert plugin.scaler is not None
    plugin.scaler.scale = scale
    module = Net(**spoilt)
    guards = GuardConfig(max_skipped=max_skipped)
    run = lit.trainer(strategy("zero3", guards), max_epochs=1, precision=None, plugins=[plugin])
    error = failure(run.fit, module, guarded.loader(12))
    schedules = [c.scheduler.last_epoch for c in run.lr_scheduler_configs]
    return error, (run.global_step, run.strategy.skipped_steps, plugin.scaler.scale, schedules)


def test_fp16_stops_only_once_no_lower_scale_is_left_to_try() -> None:
    for error, rest in ranks(2).run(half, 2, 4.0, nan_at=range(3, 12)):
        assert "gradient norm = nan at optimizer step 7, first in" in error
        assert "zero.guards.max_skipped = 2 in a row were at the lowest loss scale" in error
        # Three steps, then the scales 4 and 2, and two at 1.
        assert rest == (6, 4, 1.0, [3])
    for error, rest in ranks(2).run(half, 2, 64.0, nan_at=(3, 4, 5, 7, 8)):
        assert not error
        assert rest == (12, 5, 2.0, [7])


# Saving.


@torch.no_grad()
def _spoil(part: str, run: pl.Trainer, module: Net) -> None:
    """Make one part of a run's state bad, on the last rank alone."""
    strategy: Any = run.strategy
    if part == "buffer":
        # All take those of rank 0 before a save.
        module.layers[0].norm.mean[0] = float("nan")
    if run.global_rank < run.world_size - 1:
        return
    if part == "weight":
        guarded.local(module.layers[1].linear.weight)[:] = float("inf")
    elif part == "moment":
        guarded.local(run.optimizers[0].state[module.layers[1].linear.weight]["exp_avg_sq"])[:] = (
            float("inf")
        )
    elif part.startswith("offloaded moment"):
        state = strategy.sharded.offloading.engine.state
        state.write_moment("layers.1.linear.weight", "v", torch.full((50,), float("inf")))


def poison(part: str, path: str) -> str:
    """Spoil a run's state and save it over an earlier checkpoint."""
    by_step = part == "weight by a step"
    module = Net(lr=float("inf") if by_step else 0.01)
    name = "zero3_offload" if part.startswith("offloaded") else "zero3"
    saving = SaveConfig(background=part.endswith("in the background"))
    own = ZeroStrategy(**PRESETS[name], guards=SKIP, saving=saving)
    run = lit.trainer(own, max_steps=1, precision="bf16-mixed")
    run.fit(module, guarded.loader(1))
    if not by_step:
        run.save_checkpoint(path)
        own.wait_for_save()
        _spoil(part, run, module)
    return failure(run.save_checkpoint, path) or failure(own.wait_for_save)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "weight",
            "NonFiniteStateError: model.layers.1.linear.weight holds an inf or a NaN on rank 1: ",
        ),
        ("weight by a step", "NonFiniteStateError: model.layers.0.linear.weight holds an inf or"),
        ("buffer", "NonFiniteStateError: model.layers.0.norm.mean holds an inf or a NaN on rank 0"),
        ("moment", "NonFiniteStateError: optim.0.layers.1.linear.weight.exp_avg_sq holds an inf"),
        ("offloaded moment", "rank 1 could not write the checkpoint (NonFiniteStateError: optim.0"),
        ("offloaded moment in the background", "(NonFiniteStateError: optim.0.layers.1.linear"),
    ],
)
def test_a_state_that_is_not_finite_is_not_saved_and_what_was_there_stays(
    part: str, message: str, tmp_path: Path
) -> None:
    errors = ranks(2).run(poison, part, str(tmp_path / "a"))
    assert errors[0] == errors[1]
    assert message in errors[0]
    if part != "weight by a step":
        assert verify(tmp_path / "a", deep=True).problems == ()


def keep_count(path: str) -> list[int]:
    counts = []
    for spoilt, resume in (((1,), None), ((3,), path)):
        module = Net(nan_at=spoilt)
        run = lit.trainer(strategy("zero3"), max_epochs=2 if resume else 1)
        with warnings.catch_warnings():
            run.fit(module, guarded.loader(4), ckpt_path=resume)
        counts.append(run.strategy.skipped_steps)
        run.save_checkpoint(path)
    return counts


def test_a_resumed_run_goes_on_counting_the_steps_it_skipped(tmp_path: Path) -> None:
    assert ranks(2).run(keep_count, str(tmp_path / "a")) == [[1, 2]] * 2


# What it shows and costs.


def monitored(folder: str) -> int:
    monitor = Monitor(folder, every=1)
    guarded.fit(strategy("zero3"), Net(nan_at=(1, 3)), guarded.loader(5), callbacks=[monitor])
    with (Path(folder) / "metrics.csv").open() as file:
        return int(float([*csv.DictReader(file)][-1]["skipped_steps"]))


def test_the_monitor_shows_the_skipped_steps(tmp_path: Path) -> None:
    assert ranks(1).run(monitored, str(tmp_path)) == [2]


def reads(guards: GuardConfig, accumulate: int, *, late: bool) -> int:
    """Numbers that the host reads of tensors in a run of 8 optimizer steps."""
    real = arrivals.start_copy
    if late:
        arrivals.start_copy = lambda values: (values.clone(), guarded.Late(1))
    try:
        with scalar_reads() as counts:
            run = lit.trainer(
                strategy("zero3", guards), max_epochs=1, accumulate_grad_batches=accumulate
            )
            module = Net()
            run.fit(module, guarded.loader(8 * accumulate))
        return counts["reads"] - len(module.seen)
    finally:
        arrivals.start_copy = real


def count_reads() -> dict[str, list[int]]:
    every = {
        "stop": GuardConfig(),
        "skip": SKIP,
        "spikes": GuardConfig(spike_sigmas=8.0, spike="rollback"),
    }
    return {
        name: [reads(guards, accumulate, late=True) for accumulate in (1, 3)]
        for name, guards in every.items()
    }


def test_a_guard_reads_at_most_one_number_per_optimizer_step_and_none_per_micro_batch() -> None:
    for found in ranks(2).run(count_reads):
        assert found["stop"] == found["spikes"], "as on an accelerator, where nothing is read"
        assert found["skip"] == [count + 8 for count in found["stop"]]
        # What Lightning and the optimizer read, they read once per step too.
        assert found["stop"][0] == found["stop"][1]
