"""Under offload: what a run changes of its optimizer and parameters, and what torch may change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests import lit
from tests.ranks import ranks
from tests.test_offload import Lit, _options
from zero_strategy import OffloadConfig, ZeroStrategy
from zero_strategy.gradient import local
from zero_strategy.reduced import ReducedGradients

OTHER_TORCH = f"torch {torch.__version__}: "


def _fit(module: Any, *callbacks: Any, **options: Any) -> tuple[str, bool, int]:
    """What is refused, whether weights are as they were built, and the steps that were taken."""
    before = {n: p.detach().clone() for n, p in Lit().named_parameters()}
    options = _options(3, 1, 0.5) | {"callbacks": list(callbacks)} | options
    run = lit.trainer(ZeroStrategy(offload="host"), **options)
    message = "not refused"
    try:
        run.fit(module, lit.loader())
    except (ValueError, RuntimeError) as error:
        message = str(error)
    try:
        masters = {n: t.full_tensor() for n, t in run.strategy.masters().items()}
    except AssertionError:  # refused before anything was sharded
        masters = {}
    same = all(torch.equal(master, before[n]) for n, master in masters.items())
    return message, same, run.global_step


# The optimizer, during a run.


class Sets(lit.pl.Callback):
    """Changes a group before the third step."""

    def __init__(self, hook: str, key: str) -> None:
        setattr(self, hook, lambda trainer, *_: self.change(trainer, key))

    def change(self, trainer: Any, key: str) -> None:
        if trainer.global_step == 2:
            trainer.optimizers[0].param_groups[0][key] = True


def _set_later(hook: str, key: str) -> tuple[str, bool, int]:
    return _fit(Lit(), Sets(hook, key))


@pytest.mark.parametrize("key", ["maximize", "amsgrad"])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
def test_a_setting_that_a_callback_changes_is_refused_at_the_step_where_it_appears(
    hook: str, key: str
) -> None:
    message, _, steps = ranks(1).run(_set_later, hook, key)[0]
    assert f"optimizer.{key} = True: must be False under offload" in message
    assert steps == 2


# Parameters that thaw.


class Thaws(lit.pl.Callback):
    """Freezes a layer before set-up, and trains it from some hook on."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda trainer, module, *_: self.thaw(module))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.sometimes.requires_grad_(False)

    def thaw(self, module: Any) -> None:
        module.sometimes.requires_grad_(True)


class AllParameters(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _thaw(hook: str) -> tuple[str, bool, int]:
    return _fit(AllParameters(), Thaws(hook))


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_parameter_that_thaws_after_set_up_is_refused_before_the_first_step(hook: str) -> None:
    message, same, steps = ranks(1).run(_thaw, hook)[0]
    assert "sometimes.weight is trained but was frozen when the strategy set up" in message
    assert same
    assert steps == 0


class Later(lit.pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.sometimes)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.sometimes, optimizer)


def _finetune() -> tuple[str, bool, int]:
    return _fit(Lit(), Later())


def test_a_finetuning_callback_is_refused_at_set_up() -> None:
    message, _, steps = ranks(1).run(_finetune)[0]
    assert "trainer.callbacks: Later freezes parameters before they are sharded" in message
    assert steps == 0


class FreezesLate(lit.pl.Callback):
    """The way out: frozen after set-up, trained after some steps."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.sometimes.requires_grad_(False)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.sometimes.requires_grad_(trainer.global_step >= 4)


def _freeze_late() -> bool:
    module = Lit()
    before = module.sometimes.weight.detach().clone()
    run = lit.trainer("zero3_offload", **_options(3, 1, 0.5) | {"callbacks": [FreezesLate()]})
    run.fit(module, lit.loader())
    return torch.equal(before, run.strategy.masters()["sometimes.weight"].full_tensor())


def test_a_parameter_that_is_frozen_after_set_up_may_be_trained_later() -> None:
    assert not ranks(1).run(_freeze_late)[0]


def test_threads_beyond_what_the_kernel_takes_are_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=r"threads = 1000000: must be None, or in \[1, 1024\]"):
        ZeroStrategy(offload=OffloadConfig(threads=10**6))


# Torch, in a version to come.


def _flipped(tap: Callable[..., None]) -> Callable[..., None]:
    return lambda self, flat: tap(self, flat.flip(0))


def _shorter(tap: Callable[..., None]) -> Callable[..., None]:
    return lambda self, flat: tap(self, flat[:-1])


def _longer(tap: Callable[..., None]) -> Callable[..., None]:
    return lambda self, flat: tap(self, torch.cat([flat, flat]))


def _never(tap: Callable[..., None]) -> Callable[..., None]:
    return lambda self, flat: None


def _changed_tap(change: Callable[..., Any]) -> tuple[str, bool, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReducedGradients, "tap", change(ReducedGradients.tap))
        return _fit(Lit())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_flipped, "is not where its unit's order puts it"),
        (_shorter, "lies beyond its unit's"),
        (_longer, "gradients were taken"),
        (_never, "came before its unit's"),
    ],
)
def test_another_order_of_reduced_gradients_is_refused_before_a_weight_changes(
    change: Any, message: str, world_size: int
) -> None:
    for found, same, steps in ranks(world_size).run(_changed_tap, change):
        assert found.startswith(OTHER_TORCH)
        assert message in found
        assert "Train without offload" in found
        assert same
        assert steps == 0


def _without_hooks(name: str) -> tuple[str, bool, int]:
    with pytest.MonkeyPatch.context() as patch:
        if name in ("both", "parameters"):
            deaf = lambda self, hook: None  # noqa: E731
            patch.setattr(Tensor, "register_post_accumulate_grad_hook", deaf)
        if name == "both":
            patch.setattr(FSDPModule, "set_all_reduce_hook", lambda self, hook: None)
        return _fit(Lit())


@pytest.mark.parametrize("name", ["both", "parameters"])
def test_hooks_that_are_not_called_are_noticed_before_the_first_step(name: str) -> None:
    message, same, steps = ranks(1).run(_without_hooks, name)[0]
    assert message.startswith(OTHER_TORCH)
    assert same
    assert steps == 0


def _count_checks() -> tuple[int, int]:
    """Comparisons of a run, and parameters with a gradient."""
    import zero_strategy.reduced as reduced

    compared: list[int] = []

    def counted(one: Tensor, other: Tensor) -> bool:
        compared.append(one.numel())
        return torch.equal(one, other)

    module = Lit()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced, "_same_bits", counted)
        lit.trainer("zero3_offload", **_options(3, 2, 0.5)).fit(module, lit.loader())
    return len(compared), sum(local(p).requires_grad for p in module.parameters())


def test_gradients_are_compared_once_per_parameter_and_run() -> None:
    compared, trained = ranks(1).run(_count_checks)[0]
    assert compared == trained
