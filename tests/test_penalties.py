"""Losses that look at parameters or at gradients learn what one plain process learns."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests import lit
from tests.ranks import ranks
from tests.test_training import FP32_TOLERANCE, NAMES, _noise_loader, assert_same

PENALTY = 0.05

# torch, in the plain process: advice against what a test does on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


class Block(nn.Module):
    """Weights that autograd keeps as views (of the matrices) and as they are (the scale)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 17), nn.Linear(17, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class Penalized(pl.LightningModule):
    """A small network with a penalty on what it is sensitive to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def penalized(self, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        y = self(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().sum(1).mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.penalized(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class BackwardInside(Penalized):
    """Takes the slope by a backward of its own; what it leaves in the gradients stays there."""

    def penalized(self, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        y = self(x)
        y.square().sum(1).mean().backward(create_graph=True)
        assert x.grad is not None
        # Each sample's slope, which the mean over this rank's samples has divided.
        slope = x.grad * len(x)
        x.grad = None
        return y.square().mean() + slope.square().sum(1).mean()


class ByHand(Penalized):
    """Two optimizers under manual optimization, as in a GAN with a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(*self.layers)
        del self.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizers: Any = self.optimizers(use_pl_optimizer=self.wrapped)
        for optimizer in optimizers:
            loss = self.penalized(batch)
            optimizer.zero_grad()
            self.go_back(loss)
            optimizer.step()
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))

    wrapped = True

    def go_back(self, loss: Tensor) -> None:
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.02) for m in (self.net, self.head)]


class ByHandPastLightning(ByHand):
    """Neither the backward nor the step goes through Lightning."""

    wrapped = False

    def go_back(self, loss: Tensor) -> None:
        loss.backward()


def fit_penalized(strategy: str, kind: type[Penalized], accumulate: int) -> lit.Outcome:
    # Lightning counts no step that goes past it, so an epoch of 8 batches is the end.
    return lit.fit(
        strategy,
        module=kind(),
        data=_noise_loader(),
        steps=-1,
        max_epochs=1,
        accumulate=accumulate,
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Penalized, BackwardInside])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_penalty_learns_what_it_learns_in_a_plain_process(
    name: str, kind: type[Penalized], accumulate: int
) -> None:
    expected = fit_penalized("auto", kind, accumulate)
    for world_size in (1, 2):
        assert_same(ranks(world_size).run(fit_penalized, name, kind, accumulate)[0], expected)


@pytest.mark.parametrize("kind", [ByHand, ByHandPastLightning])
@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_penalty_by_hand_learns_what_it_learns_in_a_plain_process(
    name: str, kind: type[Penalized]
) -> None:
    expected = fit_penalized("auto", kind, 1)
    assert len(expected.losses) == 2 * 8
    for world_size in (1, 2):
        assert_same(ranks(world_size).run(fit_penalized, name, kind, 1)[0], expected)


class Gathered(Penalized):
    """Without a penalty: what is still gathered after the backward of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: list[int] = []

    penalized = lambda self, batch: self(batch).square().mean()  # noqa: E731

    def on_after_backward(self) -> None:
        units = [p for layer in self.layers for p in layer.parameters()]
        self.whole.append(sum(not isinstance(p, DTensor) for p in units))


def whole_after_backward(strategy: str) -> list[int]:
    module = Gathered()
    lit.fit(strategy, module=module, data=_noise_loader(), steps=2, accumulate=2)
    return module.whole


def test_without_a_penalty_parameters_are_let_go_in_backward_as_before() -> None:
    assert ranks(2).run(whole_after_backward, "zero3")[0] == [0, 0, 0, 0]


class DecayInLoss(lit.Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss + PENALTY * sum(p.square().sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class DecayOfShards(lit.Lit):
    """The penalty's gradient, as the note on the error says."""

    configure_optimizers = DecayInLoss.configure_optimizers

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=2 * PENALTY)


def fit_decayed(strategy: str) -> lit.Outcome:
    module = DecayInLoss() if strategy == "auto" else DecayOfShards()
    return lit.fit(strategy, module=module, gradient_clip_val=0.5)


@pytest.mark.parametrize("name", NAMES)
def test_a_penalty_on_parameters_added_to_the_shards_gradients_equals_one_in_the_loss(
    name: str,
) -> None:
    expected = fit_decayed("auto")
    for outcome in ranks(2).run(fit_decayed, name):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
        for parameter, value in expected.parameters.items():
            torch.testing.assert_close(
                outcome.parameters[parameter], value, rtol=0, atol=FP32_TOLERANCE, msg=parameter
            )
