"""Training features beside plain parity: each does what one process does."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests import lit
from tests.counting import collectives
from tests.ranks import RankError, ranks
from zero_strategy.experiments.models.gpt import GPT
from zero_strategy.precision import ZeroPrecision

NAMES = ("zero1", "zero2", "zero3")
FP32_TOLERANCE = 2e-6  # see tests/test_parity.py


def assert_same(outcome: lit.Outcome, expected: lit.Outcome) -> None:
    assert outcome.losses == pytest.approx(expected.losses, rel=FP32_TOLERANCE, abs=FP32_TOLERANCE)
    assert outcome.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        torch.testing.assert_close(
            outcome.parameters[name], value, rtol=0, atol=FP32_TOLERANCE, msg=name
        )


# Collectives.


def _count(name: str) -> dict[str, int]:
    module = lit.Lit()
    run = lit.trainer(name, max_steps=2, accumulate_grad_batches=4)
    run.validate(module, lit.loader(12), verbose=False)  # the set-up gathers the root once
    with collectives() as counts:
        run.fit(module, lit.loader())
    return dict(counts)


@pytest.mark.parametrize(
    ("name", "gathers", "reductions"), [("zero1", 8, 8), ("zero2", 8, 32), ("zero3", 56, 32)]
)
def test_accumulation_sends_what_its_stage_promises(
    name: str, gathers: int, reductions: int
) -> None:
    # 2 optimizer steps of 4 micro-batches, 3 blocks and the root.
    for counts in ranks(2).run(_count, name):
        assert counts["all_gather"] == gathers
        assert counts["reduce_scatter"] == reductions
        assert "broadcast" not in counts


# Optimization.


class Gan(pl.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 7))
        self.critic = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> None:
        noise, real = batch[:, :5], batch[:, 5:]
        first, second = self.optimizers()
        for optimizer, loss in (
            (
                second,
                lambda: (
                    self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()
                ),
            ),
            (first, lambda: -self.critic(self.generator(noise)).mean()),
        ):
            self.toggle_optimizer(optimizer)
            value = loss()
            optimizer.zero_grad()
            self.manual_backward(value)
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(self.trainer.strategy.reduce(value.detach().clone())))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.9)),
            torch.optim.AdamW(self.critic.parameters(), lr=3e-3),
        ]


class _Noise(lit.Tokens):
    def __init__(self, num_rows: int) -> None:
        self.rows = torch.randn(num_rows, 12, generator=torch.Generator().manual_seed(4))


def _noise_loader() -> DataLoader:
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    data = _Noise(96)
    if not dist.is_initialized():
        return DataLoader(data, batch_size=12)
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)


def fit_gan(strategy: str) -> lit.Outcome:
    return lit.fit(strategy, module=Gan(), data=_noise_loader(), steps=16)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_two_optimizers_under_manual_optimization_learn_alike(name: str, world_size: int) -> None:
    expected = fit_gan("auto")
    assert len(expected.losses) == 16
    assert_same(ranks(world_size).run(fit_gan, name)[0], expected)


class _BareParameter(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def _fit_bare(name: str) -> None:
    lit.trainer(name).fit(_BareParameter(), _noise_loader())


def test_bare_parameters_under_manual_optimization_are_refused() -> None:
    with pytest.raises(RankError, match=r"scale: parameters of the LightningModule itself"):
        ranks(2).run(_fit_bare, "zero3")


class Partial(lit.Lit):
    """Frozen, tied and unused parameters at once."""

    def __init__(self) -> None:
        super().__init__(lit.TINY)
        torch.manual_seed(8)
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(lit.TINY.hidden_size, lit.TINY.vocab_size, bias=False)
        self.gpt.head.weight = self.gpt.embed.weight
        self.gpt.layers[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)


def fit_partial(strategy: str) -> lit.Outcome:
    return lit.fit(strategy, module=Partial(), accumulate=2)


@pytest.mark.parametrize("name", NAMES)
def test_frozen_tied_and_unused_parameters_learn_alike(name: str) -> None:
    expected = fit_partial("auto")
    untouched = Partial()
    outcome = ranks(2).run(fit_partial, name)[0]
    assert_same(outcome, expected)
    for parameter in ("unused.weight", "gpt.layers.1.attention.qkv.weight"):
        if parameter in outcome.parameters:
            assert torch.equal(
                outcome.parameters[parameter], dict(untouched.named_parameters())[parameter]
            )


def fit_by_value(strategy: str) -> lit.Outcome:
    return lit.fit(strategy, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@pytest.mark.parametrize("name", NAMES)
def test_clipping_by_value_learns_alike(name: str) -> None:
    assert_same(ranks(2).run(fit_by_value, name)[0], fit_by_value("auto"))


class _NormKeeping(lit.Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        self.norms.append(float(self.trainer.strategy.grad_norm))


class _PlainNorm(lit.Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def _norms(strategy: str, precision: str, clip: float | None) -> list[float]:
    module = _PlainNorm() if strategy == "auto" else _NormKeeping()
    lit.fit(strategy, module=module, steps=5, precision=precision, gradient_clip_val=clip)
    return module.norms


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_logged_norm_is_the_true_fp32_norm_before_clipping(name: str, clip: float | None) -> None:
    expected = _norms("auto", "32-true", clip)
    for norms in ranks(4).run(_norms, name, "32-true", clip):
        assert norms == pytest.approx(expected, rel=1e-5)


# Precision.


def _dtypes(name: str, precision: str) -> dict[str, set[torch.dtype]]:
    module = lit.Lit()
    run = lit.trainer(name, max_steps=2, precision=precision)
    run.fit(module, lit.loader())
    slots = run.optimizers[0].state.values()
    return {
        "parameters": {p.dtype for p in module.parameters()},
        "moments": {s["exp_avg"].dtype for s in slots},
        "buffers": {b.dtype for b in module.buffers()},
    }


@pytest.mark.parametrize(
    ("precision", "stored", "buffer"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_name_decides_what_is_stored(
    precision: str, stored: torch.dtype, buffer: torch.dtype
) -> None:
    dtypes = ranks(2).run(_dtypes, "zero3", precision)[0]
    assert dtypes == {"parameters": {stored}, "moments": {stored}, "buffers": {buffer}}


class _Overflowing(lit.Lit):
    """Loses its finiteness at one step, on one rank only."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        bad = index == 2 and self.trainer.global_rank == self.trainer.world_size - 1
        return loss * float("inf") if bad else loss

    def on_train_batch_end(self, *_: Any) -> None:
        shard = next(self.parameters())
        shard = shard.to_local() if isinstance(shard, DTensor) else shard
        self.norms.append(float(shard.detach().double().norm()))


def _overflow(name: str) -> tuple[list[float], int, float, bool]:
    module = _Overflowing()
    run = lit.trainer(name, max_steps=5, precision=None, plugins=[ZeroPrecision("16-mixed")])
    run.fit(module, lit.loader())
    finite = all(bool(p.isfinite().all()) for p in lit.whole(module).values())
    return (
        module.norms,
        run.strategy.skipped_steps,
        run.strategy.zero_precision.scaler.scale,
        finite,
    )


@pytest.mark.parametrize("name", NAMES)
def test_fp16_overflow_on_one_rank_skips_the_step_on_all(name: str) -> None:
    for norms, skipped, scale, finite in ranks(2).run(_overflow, name):
        assert skipped == 1
        assert scale == 65536.0 / 2
        assert norms[2] == norms[1]
        assert len(set(norms)) == 4
        assert finite


def _non_finite(name: str, clip: float | None) -> tuple[str, bool]:
    module = _Overflowing()
    try:
        lit.trainer(name, max_steps=5, gradient_clip_val=clip).fit(module, lit.loader())
    except ValueError as error:
        return str(error), all(bool(p.isfinite().all()) for p in lit.whole(module).values())
    return "", False


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_non_finite_gradient_stops_all_ranks_before_it_is_used(
    name: str, clip: float | None
) -> None:
    for message, finite in ranks(2).run(_non_finite, name, clip):
        assert "at optimizer step 3" in message
        assert "must be finite" in message
        assert finite


# Building.


class Configured(lit.Lit):
    """Builds its model in `configure_model`."""

    def __init__(self) -> None:
        super(lit.Lit, self).__init__()
        self.lr = 3e-3
        self.losses = []
        self.gpt = None

    def configure_model(self) -> None:
        if self.gpt is None:
            torch.manual_seed(7)
            self.gpt = GPT(lit.TINY)


def _fit_configured(options: dict[str, Any]) -> tuple[lit.Outcome, list[float]]:
    from zero_strategy import ZeroStrategy

    module = Configured()
    torch.manual_seed(7)
    return lit.fit(ZeroStrategy(**options), module=module), module.losses


@pytest.mark.parametrize("init", ["cpu", "meta"])
@pytest.mark.parametrize("stage", [1, 3])
def test_module_built_in_configure_model_equals_the_plain_one(stage: int, init: str) -> None:
    outcome, _ = ranks(2).run(_fit_configured, {"stage": stage, "init": init})[0]
    assert_same(outcome, lit.fit("auto"))


def _unseeded(name: str) -> list[float]:
    import torch.distributed as dist

    module = lit.Lit(seed=dist.get_rank())
    lit.trainer(name, max_steps=3).fit(module, lit.loader())
    return module.losses


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_drew_other_weights_all_start_from_rank_0(name: str) -> None:
    module = lit.Lit(seed=0)
    lit.trainer("auto", max_steps=3).fit(module, lit.loader())
    for losses in ranks(4).run(_unseeded, name):
        assert losses == pytest.approx(module.losses, rel=FP32_TOLERANCE)


def _other_module(name: str) -> None:
    import dataclasses

    import torch.distributed as dist

    config = dataclasses.replace(lit.TINY, num_layers=2 + dist.get_rank())
    lit.trainer(name).fit(lit.Lit(config), lit.loader())


def test_ranks_that_built_different_modules_are_named() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] built another module than rank 0"):
        ranks(2).run(_other_module, "zero3")


class _EarlyOptimizer(lit.Lit):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def _fit_early(name: str) -> None:
    lit.trainer(name).fit(_EarlyOptimizer(), lit.loader())


def test_optimizer_over_unsharded_parameters_is_refused() -> None:
    with pytest.raises(RankError, match=r"SGD holds \d+ parameters that are not the module's"):
        ranks(2).run(_fit_early, "zero3")


def _fit_blocks(blocks: list[type[nn.Module]] | None) -> tuple[lit.Outcome, int, int]:
    from zero_strategy import ZeroStrategy

    strategy = ZeroStrategy(stage=3, blocks=blocks)
    outcome = lit.fit(strategy)
    held = sum(p.to_local().numel() for p in strategy.sharded.root.parameters())
    return outcome, len(strategy.sharded.units), held


def test_named_block_classes_replace_the_repeated_blocks() -> None:
    from zero_strategy.experiments.models.gpt import Linear

    expected = lit.fit("auto")
    found, num_found, held_found = ranks(2).run(_fit_blocks, None)[0]
    named, num_named, held_named = ranks(2).run(_fit_blocks, [Linear])[0]
    assert_same(found, expected)
    assert_same(named, expected)
    total = sum(p.numel() for p in lit.Lit().parameters())
    assert num_found == 3
    assert num_named > 3
    assert abs(held_found - total / 2) / total < 0.02
    assert abs(held_named - total / 2) / total < 0.02


class _FloatTargets(pl.LightningModule):
    """Takes targets that lose digits in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch.dtype)
        return F.mse_loss(self.net(batch[:, :4]).float(), batch[:, 4:5])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_targets(name: str) -> list[torch.dtype]:
    module = _FloatTargets()
    lit.trainer(name, max_steps=1, precision="bf16-mixed").fit(module, _noise_loader())
    return module.seen


def test_float_targets_keep_their_precision_under_bf16_mixed() -> None:
    assert ranks(2).run(_fit_targets, "zero3")[0] == [torch.float32]


def _fit_compiled(stage: int) -> tuple[lit.Outcome, list[str]]:
    from zero_strategy import ZeroStrategy

    torch._dynamo.config.cache_size_limit = 16
    module = lit.Lit()
    outcome = lit.fit(ZeroStrategy(stage, compile="blocks"), module=module, steps=3)
    return outcome, list(module.state_dict())


def test_compiled_blocks_learn_alike_and_keep_their_names() -> None:
    outcome, names = ranks(2).run(_fit_compiled, 3, timeout_s=500)[0]
    assert_same(outcome, lit.fit("auto", steps=3))
    assert names == list(lit.Lit().state_dict())


class _LateAdapter(lit.Lit):
    """Adds a trainable layer after sharding."""

    def configure_optimizers(self) -> Any:
        self.adapter = nn.Linear(3, 3)
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit_late(name: str) -> None:
    lit.trainer(name).fit(_LateAdapter(), lit.loader())


def test_trainable_parameter_added_after_sharding_is_refused() -> None:
    with pytest.raises(RankError, match=r"adapter\.weight, adapter\.bias: trainable parameters"):
        ranks(2).run(_fit_late, "zero3")


class _MixedDtypes(lit.Lit):
    def __init__(self) -> None:
        super().__init__()
        self.gpt.layers[1].attention.double()


def _fit_mixed(name: str) -> None:
    lit.trainer(name).fit(_MixedDtypes(), lit.loader())


def test_unit_of_several_dtypes_is_refused_with_a_parameter_of_each() -> None:
    with pytest.raises(RankError, match=r"unit 'gpt\.layers\.1': .* one dtype, but .*float64"):
        ranks(2).run(_fit_mixed, "zero3")


def _plan(name: str) -> tuple[Any, dict[str, int]]:
    module = lit.Lit()
    run = lit.trainer(name, max_steps=1)
    run.fit(module, lit.loader())
    slots = [v for s in run.optimizers[0].state.values() for v in s.values() if v.ndim > 0]
    held = {
        "params": sum(p.to_local().nbytes for p in module.parameters()),
        "optimizer": sum(v.to_local().nbytes for v in slots),
    }
    return run.strategy.plan, held


@pytest.mark.parametrize("name", NAMES)
def test_plan_states_the_bytes_a_rank_holds(name: str) -> None:
    total = sum(p.numel() for p in lit.Lit().parameters())
    for plan, held in ranks(4).run(_plan, name):
        assert plan.params_bytes == held["params"]
        assert plan.optimizer_bytes == held["optimizer"]
        assert plan.num_params == plan.num_trainable == total
        assert plan.strategy == name
        assert plan.unit_class == "Block"
        # A quarter each, but for rows that do not divide by four.
        assert held["params"] == pytest.approx(total * 4 / 4, rel=0.1)
        assert held["optimizer"] == 2 * held["params"]


class _Stages(lit.Lit):
    """Blocks in lists of lists, and modules in a list of dictionaries."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        blocks = list(self.gpt.layers)
        del self.gpt.layers
        self.kind = kind
        if kind == "lists":
            self.stages = nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])])
        else:
            self.stages = nn.ModuleList(nn.ModuleDict({"block": block}) for block in blocks)

    def forward(self, token_BT: Tensor) -> Tensor:
        x_BTH = self.gpt.embed(token_BT)
        cos, sin = self.gpt.rotary(x_BTH.shape[1], x_BTH.dtype)
        for stage in self.stages:
            for block in stage if self.kind == "lists" else stage.values():
                x_BTH = block(x_BTH, cos, sin)
        return self.gpt.head(self.gpt.norm(x_BTH))


def _fit_stages(name: str, kind: str) -> tuple[lit.Outcome, int]:
    module = _Stages(kind)
    outcome = lit.fit(name, module=module)
    units = 0 if name == "auto" else len(module.trainer.strategy.sharded.units)
    return outcome, units


@pytest.mark.parametrize("kind", ["lists", "dictionaries"])
def test_blocks_in_nested_containers_are_found(kind: str) -> None:
    outcome, units = ranks(2).run(_fit_stages, "zero3", kind)[0]
    assert units == 3
    assert_same(outcome, _fit_stages("auto", kind)[0])
