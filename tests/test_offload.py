"""`zero*_offload` beside sharded fp32 masters on the device, bit for bit, and what it refuses."""

import contextlib
import threading
import weakref
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_strategy.offloading
from tests import lit
from tests.ranks import ranks
from zero_strategy import OffloadConfig, ShardedEMA, ZeroStrategy
from zero_strategy.control import NonFiniteGradientError
from zero_strategy.gradient import local
from zero_strategy.offload.ways import Way
from zero_strategy.planning.host_memory import HostRoom

STEPS = 8
STAGES = (1, 2, 3)


class MasterAdamW(torch.optim.AdamW):
    """fp32 masters of its own; parameters hold what they round to, half away from zero.

    Torch steps its scalar tail in another order, so masters are padded to whole vectors.
    """

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, **options)
        self.leaves = {
            p: nn.Parameter(_padded(local(p.detach())))
            for g in self.param_groups
            for p in g["params"]
        }
        leaf_groups = [
            {**g, "params": [self.leaves[p] for p in g["params"]], "fused": True}
            for g in self.param_groups
        ]
        self.inner = torch.optim.AdamW(leaf_groups)
        self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for parameter, leaf in self.leaves.items():
            bits = leaf.view(torch.int32)
            rounded = (((bits + 0x8000) >> 16) << 16).view(torch.float32)
            own = local(parameter)
            own.copy_(rounded[: own.numel()].view_as(own))

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for parameter, leaf in self.leaves.items():
            leaf.grad = None if parameter.grad is None else _padded(local(parameter.grad))
        self.inner.step()
        self._write()
        return loss


def _padded(tensor: Tensor) -> Tensor:
    return nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % 64))


class Lit(lit.Lit):
    """With a frozen matrix, a tied one, and one that is used every other time."""

    optimizer_class = torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(13, 13)
        self.gpt.layers[1].feed_forward.gate_up.weight.requires_grad_(False)
        self.calls = 0

    def loss(self, row_BT: Tensor) -> Tensor:
        self.calls += 1
        loss = super().loss(row_BT)
        if self.calls % 2:
            loss = loss + self.sometimes(row_BT[:, 1:].float()).square().mean() * 1e-4
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = self.optimizer_class(groups, lr=self.lr, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MasterLit(Lit):
    optimizer_class = MasterAdamW


def _options(stage: int, accumulate: int, clip: float | None) -> dict[str, Any]:
    return {
        "max_steps": STEPS,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": clip,
        "precision": "bf16-mixed",
    }


def _on_device(stage: int, accumulate: int, clip: float | None) -> tuple[list[float], dict]:
    module = MasterLit()
    run = lit.trainer(f"zero{stage}", **_options(stage, accumulate, clip))
    run.fit(module, lit.loader())
    names = {id(p): n for n, p in module.named_parameters()}
    optimizer: Any = run.optimizers[0]
    masters = {
        names[id(p)]: leaf.detach()[: local(p).numel()].view_as(local(p))
        for p, leaf in optimizer.leaves.items()
    }
    return module.losses, masters


def _offloaded(
    stage: int, accumulate: int, clip: float | None, mode: str
) -> tuple[list[float], dict, dict]:
    module = Lit()
    strategy = ZeroStrategy(stage=stage, offload=OffloadConfig(chunk_elements=512, threads=1))
    run = lit.trainer(strategy, **_options(stage, accumulate, clip))
    run.fit(module, lit.loader()) if mode == "chosen" else _fit_in(mode, run, module)
    masters = {n: local(t) for n, t in strategy.sharded.offloading.masters().items()}
    weights = {n: local(p.detach()) for n, p in module.named_parameters() if n in masters}
    return module.losses, masters, weights


def _fit_in(mode: str, run: Any, module: Lit) -> None:
    class Switch(lit.pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.sharded.offloading.engine.way = Way(mode, helps=True)

    run.callbacks.append(Switch())
    run.fit(module, lit.loader())


@cache
def on_device(stage: int, accumulate: int, clip: float | None, world_size: int) -> list[Any]:
    return ranks(world_size).run(_on_device, stage, accumulate, clip)


@pytest.mark.parametrize("mode", ["chosen", "deferred", "late", "staged"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("stage", "accumulate", "clip"),
    [(3, 1, 0.5), (3, 1, None), (3, 3, 0.5), (2, 3, 0.5), (1, 3, 0.5)],
)
def test_offloaded_run_equals_masters_on_the_device_bit_for_bit(
    stage: int, accumulate: int, clip: float | None, world_size: int, mode: str
) -> None:
    expected = on_device(stage, accumulate, clip, world_size)
    outcomes = ranks(world_size).run(_offloaded, stage, accumulate, clip, mode)
    for (want_losses, want), (losses, masters, weights) in zip(expected, outcomes, strict=True):
        assert losses == want_losses
        assert masters.keys() == want.keys()
        for name, master in want.items():
            assert torch.equal(masters[name], master), name
            rounded = (((master.view(torch.int32) + 0x8000) >> 16) << 16).view(torch.float32)
            assert torch.equal(weights[name].float(), rounded), name


# Placement.


def _placed(placement: Any, room: int, accumulate: int) -> tuple[list[float], dict, dict, float]:
    before: list[weakref.ref[Any]] = []

    def device_room(device: Any) -> int:
        before.append(weakref.ref(strategy.sharded.offloading.engine))
        return room

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_strategy.offloading, "device_room", device_room)
        module = Lit()
        config = OffloadConfig(placement=placement, chunk_elements=512, threads=1)
        strategy = ZeroStrategy(stage=3, offload=config)
        run = lit.trainer(strategy, **_options(3, accumulate, 0.5))
        run.fit(module, lit.loader())
    # Once, at the first step; and the memory of where state lay before is free.
    assert [ref() for ref in before] == ([None] if placement == "auto" else [])
    masters = {n: local(t) for n, t in strategy.sharded.offloading.masters().items()}
    weights = {n: local(p.detach()) for n, p in module.named_parameters() if n in masters}
    return module.losses, masters, weights, strategy.sharded.offloading.share


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("placement", "room"), [(0.0, 0), (0.6, 0), ("host", 10**9), ("auto", 10**9), ("auto", 60_000)]
)
def test_where_state_lies_changes_no_bit(
    placement: Any, room: int, accumulate: int, world_size: int
) -> None:
    expected = on_device(3, accumulate, 0.5, world_size)
    outcomes = ranks(world_size).run(_placed, placement, room, accumulate)
    for (want_losses, want), (losses, masters, weights, share) in zip(
        expected, outcomes, strict=True
    ):
        if placement == "auto":
            assert share == 0.0 if room == 10**9 else 0.0 < share < 1.0
        assert losses == want_losses
        assert masters.keys() == want.keys()
        for name, master in want.items():
            assert torch.equal(masters[name], master), name
            rounded = (((master.view(torch.int32) + 0x8000) >> 16) << 16).view(torch.float32)
            assert torch.equal(weights[name].float(), rounded), name


# Checkpoints.


def _save(name: str, path: str) -> dict[str, Tensor]:
    module = Lit()
    run = lit.trainer(name, **_options(3, 1, 0.5) | {"max_steps": 4})
    run.fit(module, lit.loader())
    run.save_checkpoint(path)
    return _state(run, module)


def _resume(name: str, path: str, max_steps: int) -> tuple[dict[str, Tensor], list[float]]:
    module = Lit()
    module.calls = 4
    run = lit.trainer(name, **_options(3, 1, 0.5) | {"max_steps": max_steps})
    run.fit(module, lit.loader(), ckpt_path=path)
    return _state(run, module), module.losses


def _state(run: Any, module: Lit) -> dict[str, Tensor]:
    """fp32 weights and moments of this rank, as they would be saved."""
    weights = run.strategy.lightning_module_state_dict()
    saved = run.strategy.optimizer_state(run.optimizers[0])["state"]
    slots = {f"{n}.{k}": v for n, s in saved.items() for k, v in s.items()}
    return {n: local(t).detach().clone() for n, t in {**weights, **slots}.items()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("zero3_offload", "zero3_offload"),
        ("zero3_offload", "zero2"),
        ("zero2", "zero1_offload"),
    ],
)
def test_a_checkpoint_resumes_with_and_without_offload_with_the_same_state(
    saved_by: str, resumed_by: str, world_size: int, tmp_path: Any
) -> None:
    path = str(tmp_path / "a.ckpt")
    saved = ranks(world_size).run(_save, saved_by, path)
    resumed = ranks(world_size).run(_resume, resumed_by, path, 4)
    for (state, _), want in zip(resumed, saved, strict=True):
        assert state.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_offloaded_run_goes_on_bit_for_bit(world_size: int, tmp_path: Any) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(world_size).run(_save, "zero3_offload", path)
    outcomes = ranks(world_size).run(_resume, "zero3_offload", path, STEPS)
    expected = on_device(3, 1, 0.5, world_size)
    for (state, losses), (want_losses, want) in zip(outcomes, expected, strict=True):
        assert losses == want_losses[4:]
        for name, master in want.items():
            assert torch.equal(state[name], master), name


class Averages(lit.pl.Callback):
    """The average by definition, from the fp32 weights after each step."""

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.means = {n: local(t).clone() for n, t in trainer.strategy.masters().items()}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for name, master in trainer.strategy.masters().items():
            self.means[name].lerp_(local(master), 1 - 0.7)


def _average() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], list[float]]:
    average, definition = ShardedEMA(decay=0.7), Averages()
    module = Lit()
    options = _options(3, 1, 0.5) | {"callbacks": [definition, average], "val_check_interval": 3}
    run = lit.trainer("zero3_offload", **options)
    run.fit(module, lit.loader(), lit.loader(24))
    means = {n: local(t) for n, t in average.average.items()}
    masters = {n: local(t) for n, t in run.strategy.masters().items()}
    return means, definition.means, masters, module.losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_average_is_of_fp32_masters_and_evaluating_it_leaves_no_trace(world_size: int) -> None:
    expected = on_device(3, 1, 0.5, world_size)
    outcomes = ranks(world_size).run(_average)
    for (means, want_means, masters, losses), (want_losses, want) in zip(
        outcomes, expected, strict=True
    ):
        assert means.keys() == want_means.keys() == masters.keys()
        for name, mean in want_means.items():
            assert torch.equal(means[name], mean), name
            assert torch.equal(masters[name], want[name]), name
        # The losses of validation are among those noted.
        assert [loss for loss in losses if loss in want_losses] == want_losses


# Runs that are not plain.


class Reuses(Lit):
    """Runs one block twice in each forward."""

    def forward(self, token_BT: Tensor) -> Tensor:
        gpt = self.gpt
        x_BTH = gpt.embed(token_BT)
        cos, sin = gpt.rotary(x_BTH.shape[1], torch.bfloat16)
        for index in (0, 1, 0, 2):
            x_BTH = gpt.layers[index](x_BTH, cos, sin)
        return gpt.head(gpt.norm(x_BTH))


class MasterReuses(Reuses):
    optimizer_class = MasterAdamW


def _reuse(name: str, accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    module = Reuses() if "offload" in name else MasterReuses()
    run = lit.trainer(name, **_options(3, accumulate, 0.5))
    run.fit(module, lit.loader())
    if "offload" in name:
        return module.losses, {n: local(t) for n, t in run.strategy.masters().items()}
    names = {id(p): n for n, p in module.named_parameters()}
    leaves: Any = run.optimizers[0].leaves
    return module.losses, {
        names[id(p)]: leaf.detach()[: local(p).numel()].view_as(local(p))
        for p, leaf in leaves.items()
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_block_that_runs_twice_in_a_forward_is_stepped_once_by_the_sum(
    accumulate: int, world_size: int
) -> None:
    outcomes = ranks(world_size).run(_reuse, "zero3_offload", accumulate)
    expected = ranks(world_size).run(_reuse, "zero3", accumulate)
    for (losses, masters), (want_losses, want) in zip(outcomes, expected, strict=True):
        assert losses == want_losses
        for name, master in want.items():
            assert torch.equal(masters[name], master), name


class Recomputes(Lit):
    """Repeats each block's forward in the backward, from outside the block."""

    def forward(self, token_BT: Tensor) -> Tensor:
        gpt = self.gpt
        x_BTH = gpt.embed(token_BT)
        cos, sin = gpt.rotary(x_BTH.shape[1], torch.bfloat16)
        for layer in gpt.layers:
            x_BTH = checkpoint(layer, x_BTH, cos, sin, use_reentrant=False)
        return gpt.head(gpt.norm(x_BTH))


def _recompute() -> list[int]:
    waiting: list[int] = []

    class Look(lit.pl.Callback):
        def on_after_backward(self, trainer: Any, *_: Any) -> None:
            waiting.append(len(trainer.strategy.sharded.offloading.engine._sums))

    options = _options(3, 1, 0.5) | {"callbacks": [Look()]}
    lit.trainer("zero3_offload", **options).fit(Recomputes(), lit.loader())
    return waiting


def test_gradients_of_recomputed_blocks_leave_during_the_backward() -> None:
    assert ranks(1).run(_recompute)[0] == [0] * STEPS


def _fit_often() -> tuple[int, bool, str]:
    module = Lit()
    for _ in range(3):
        lit.trainer("zero3_offload", **_options(3, 1, 0.5) | {"max_steps": 2}).fit(
            module, lit.loader()
        )
    threads = sum(t.name == "offload-lane" for t in threading.enumerate())
    try:
        lit.trainer("zero3", **_options(3, 1, 0.5)).fit(module, lit.loader())
    except ValueError as error:
        return (
            threads,
            all(torch.isfinite(p).all() for p in map(local, module.parameters())),
            str(error),
        )
    return threads, False, "not refused"


def test_fits_leave_no_thread_and_a_module_keeps_its_offload() -> None:
    threads, finite, message = ranks(1).run(_fit_often)[0]
    assert threads == 0
    assert finite
    assert "sharded by an earlier run with other ranks, another precision or another" in message


def _interrupt(path: str) -> bool:
    module = Lit()
    kept: list[dict[str, Tensor]] = []

    class Break(lit.pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            kept.append(_state(trainer, module))

        def on_after_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError

        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(path)

    run = lit.trainer("zero3_offload", **_options(3, 1, 0.5) | {"callbacks": [Break()]})
    with contextlib.suppress(ZeroDivisionError):
        run.fit(module, lit.loader())
    saved = _state(run, module)
    return len(kept) == 3 and all(torch.equal(saved[n], v) for n, v in kept[-1].items())


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_exception_after_the_backward_saves_the_last_whole_step(
    world_size: int, tmp_path: Any
) -> None:
    assert all(ranks(world_size).run(_interrupt, str(tmp_path / "a.ckpt")))


# What goes wrong.


class Spoilt(Lit):
    def loss(self, row_BT: Tensor) -> Tensor:
        loss = super().loss(row_BT)
        return loss * float("inf") if self.calls == 4 else loss


def _spoil() -> tuple[bool, str]:
    module = Spoilt()
    run = lit.trainer("zero3_offload", **_options(3, 1, 0.5))
    kept: list[dict[str, Tensor]] = []

    class Keep(lit.pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            kept.append(_state(trainer, module))

    run.callbacks.append(Keep())
    try:
        run.fit(module, lit.loader())
    except NonFiniteGradientError as error:
        after = _state(run, module)
        return all(torch.equal(after[n], v) for n, v in kept[-1].items()), str(error)
    return False, "no error"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_non_finite_norm_stops_the_run_and_changes_nothing(world_size: int) -> None:
    for unchanged, message in ranks(world_size).run(_spoil):
        assert "must be finite. No weight was changed by this step" in message
        assert unchanged


def _without_room() -> str:
    import zero_strategy.offloading as offloading

    real = offloading.host_room
    # One rank of two has little left.
    left = 100_000 if dist.get_rank() == dist.get_world_size() - 1 else 10**12
    offloading.host_room = lambda n: HostRoom(available_bytes=left, bound="a test")
    try:
        lit.trainer("zero3_offload", **_options(3, 3, None)).fit(Lit(), lit.loader())
    except ValueError as error:
        return str(error)
    finally:
        offloading.host_room = real
    return "not refused"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_host_memory_cannot_hold_is_refused_on_all_ranks(world_size: int) -> None:
    for message in ranks(world_size).run(_without_room):
        assert "of host memory per rank: must be at most" in message
        assert 'zero.offload.grad_dtype = "bf16"' in message


def _refused(options: dict[str, Any], optimizer: Any) -> str:
    module = Lit()
    if optimizer:
        module.configure_optimizers = lambda: optimizer(module.parameters())
    try:
        lit.trainer("zero3_offload", **_options(3, 1, None) | options).fit(module, lit.loader())
    except ValueError as error:
        return str(error)
    return "not refused"


def _amsgrad(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, amsgrad=True)


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("options", "optimizer", "message"),
    [
        ({"precision": "32-true"}, None, "trainer.precision = '32-true': must be 'bf16-mixed'"),
        ({"precision": "bf16-true"}, None, "trainer.precision = 'bf16-true'"),
        ({}, _sgd, "optimizer = SGD: must be torch.optim.AdamW or torch.optim.Adam"),
        ({}, _amsgrad, "optimizer.amsgrad = True: must be False under offload"),
        (
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            None,
            "trainer.gradient_clip_algorithm = 'value': must be 'norm'",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(
    options: dict[str, Any], optimizer: Any, message: str
) -> None:
    assert message in ranks(1).run(_refused, options, optimizer)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "gpu"}, "zero.offload = 'gpu': must be None or auto or host"),
        ({"offload": OffloadConfig(placement="cpu")}, "zero.offload.placement = 'cpu'"),
        ({"offload": OffloadConfig(chunk_elements=100)}, "zero.offload.chunk_elements = 100"),
        ({"offload": OffloadConfig(threads=0)}, "zero.offload.threads = 0"),
    ],
)
def test_a_wrong_offload_option_is_refused_with_its_path(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(**options)
