"""Torch's errors about sharded tensors come with a note that says what to do."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests import lit
from tests.ranks import ranks
from tests.test_penalties import DecayInLoss, Penalized
from tests.test_training import NAMES, _noise_loader
from zero_strategy import ZeroStrategy
from zero_strategy.explain import explain
from zero_strategy.precision import ZeroPrecision


class PartOfABlock(lit.Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.gpt.layers[0].feed_forward(self.gpt.embed(batch)).sum()


class WeightOfABlock(lit.Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        weight = self.gpt.layers[0].feed_forward.down.weight
        return (torch.ones(3, weight.shape[1]) @ weight.T).sum() + self.loss(batch)


class OutsideAStep(lit.Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        self(lit.Tokens(4).rows[:, :-1])


class LightningsNorms(lit.Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class ReadsValues(lit.Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        next(self.parameters()).detach().cpu().numpy()


class FusedSgd(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)


class SlopeByParameters(Penalized):
    def penalized(self, batch: Tensor) -> Tensor:
        loss = self(batch).square().mean()
        slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(s.square().sum() for s in slopes)


CASES: dict[Callable[[], Any], str] = {
    PartOfABlock: "go through the block's forward()",
    WeightOfABlock: "whole only inside that unit's forward",
    DecayInLoss: "p.grad.add_(p.detach(), alpha=2 * weight)",
    OutsideAStep: "with trainer.strategy.inference():",
    LightningsNorms: "trainer.strategy.grad_norm",
    ReadsValues: "tensor.full_tensor()",
    FusedSgd: "foreach=True",
    SlopeByParameters: "Differentiate by inputs or activations",
}


def notes(kind: type[Any]) -> list[str]:
    module = kind()
    data = _noise_loader() if isinstance(module, Penalized) else lit.loader()
    try:
        lit.trainer("zero3", max_steps=2).fit(module, data)
    except Exception as error:  # noqa: BLE001 - torch raises many kinds
        return error.__notes__
    return []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", CASES)
def test_an_error_of_torch_about_sharded_tensors_says_what_to_do(
    kind: type[Any], world_size: int
) -> None:
    for found in ranks(world_size).run(notes, kind):
        assert len(found) == 1
        assert CASES[kind] in found[0]


class Own(lit.Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        raise ValueError("an error of the user's own")


def notes_of_own() -> list[str]:
    try:
        lit.trainer("zero3", max_steps=2).fit(Own(), lit.loader())
    except ValueError as error:
        return vars(error).get("__notes__", [])
    return ["none was raised"]


def test_who_is_left_alone_in_a_collective_is_told_of_the_rank_that_left() -> None:
    error = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")
    explain(error)
    assert "another rank left the run" in error.__notes__[0]


def test_other_errors_are_left_alone() -> None:
    assert ranks(1).run(notes_of_own) == [[]]


class Asking(lit.Lit):
    """Reads the norm before the step, between steps and after each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float | None]] = defaultdict(list)

    def ask(self, moment: str) -> None:
        norm = self.trainer.strategy.grad_norm
        self.seen[moment].append(None if norm is None else float(norm))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.ask("in the step")
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.ask("before")
        for p in self.parameters():
            p.grad.mul_(2.0)
        self.ask("doubled")

    def on_train_batch_end(self, *_: Any) -> None:
        self.ask("after")


def ask(strategy: str, precision: str) -> dict[str, list[float | None]]:
    module = Asking()
    # Lightning knows no 16-mixed on a CPU.
    plugins = [ZeroPrecision(precision)]
    run = lit.trainer(strategy, max_steps=3, gradient_clip_val=0.5, plugins=plugins)
    run.fit(module, lit.loader())
    return dict(module.seen)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_norm_can_be_read_before_the_step_and_is_that_of_the_moment(
    name: str, precision: str
) -> None:
    for seen in ranks(2).run(ask, name, precision):
        assert seen["in the step"] == [None] * 3
        assert all(norm > 0 for norm in seen["before"])
        assert seen["doubled"] == pytest.approx([2 * n for n in seen["before"]], rel=1e-6)
        assert seen["after"] == seen["doubled"]


@pytest.mark.parametrize("timeout", [30, 1.5, None, "30"])
def test_a_timeout_that_is_no_timedelta_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"^zero\.timeout = .*: must be a datetime\.timedelta"):
        ZeroStrategy(timeout=timeout)
