"""With `check_flow`, ranks that call different modules are told where they part."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy
from tests import lit
from tests.ranks import ranks
from zero_strategy.guards.flow import RankFlowError

WIDTH = 6
NUM_LAYERS = 4


class Layer(nn.Module):
    """All alike, so that one's gather would fit another's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Routed(pl.LightningModule):
    """Calls the layers it is told, in their order, by rank.

    Args:
        routes: of each rank, from the third micro-batch on; before, all call all layers.
        recompute: whether each is called again in the backward.
    """

    def __init__(self, routes: tuple[tuple[int, ...], ...], *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.routes, self.recompute = routes, recompute
        self.losses: list[float] = []

    def loss(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        for index in route:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        early = self.global_step < 2
        loss = self.loss(
            batch[0], tuple(range(NUM_LAYERS)) if early else self.routes[dist.get_rank()]
        )
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(batch[0], tuple(range(dist.get_rank() + 1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    routes: tuple[tuple[int, ...], ...],
    *,
    stage: int = 3,
    check: bool = True,
    recompute: bool = False,
    **options: Any,
) -> tuple[str, list[float]]:
    """What a run ends with, and its losses."""
    guards = zero_strategy.GuardConfig(check_flow=check)
    strategy = zero_strategy.ZeroStrategy(stage=stage, guards=guards)
    module = Routed(routes, recompute=recompute)
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(24, WIDTH, generator=draw)
    run = lit.trainer(strategy, max_steps=4, **options)
    try:
        train, val = (DataLoader(TensorDataset(r), batch_size=3) for r in (rows, rows[:6]))
        run.fit(module, train, val)
    except RankFlowError as error:
        return str(error), module.losses
    return "", module.losses


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("routes", "told"),
    [
        (
            (ALL, (1, 2, 3)),
            "after 0 equal calls in micro-batch .* comes layers.0 on ranks [0], layers.1",
        ),
        (
            (ALL, (0, 2, 3)),
            "after 1 equal calls in micro-batch .* comes layers.1 on ranks [0], layers.2",
        ),
        ((ALL, (0, 1, 2)), "comes layers.3 on ranks [0], the end of training_step on ranks [1]"),
        (((0, 1), (0, 2)), "comes layers.1 on ranks [0], layers.2 on ranks [1]"),
        (((0, 1, 2), (0, 2, 1)), "comes layers.1 on ranks [0], layers.2 on ranks [1]"),
        (((0,), (0, 0)), "comes the end of training_step on ranks [0], layers.0 on ranks [1]"),
    ],
    ids=["first skipped", "skipped", "last skipped", "expert by rank", "other order", "twice"],
)
def test_the_first_module_that_only_some_ranks_call_is_named_on_all(
    routes: tuple[tuple[int, ...], ...], told: str, stage: int
) -> None:
    (first, losses), (second, _) = ranks(2).run(fit, routes, stage=stage)
    assert first == second
    start, _, rest = told.partition(" .* ")
    assert start in first
    assert rest in first
    assert "Decide from numbers that all ranks share" in first
    assert len(losses) in (2, 3)


def test_a_layer_called_again_in_the_backward_is_compared_too() -> None:
    found = ranks(2).run(fit, (ALL, (0, 1, 3)), recompute=True)
    assert all("layers.2 on ranks [0], layers.3 on ranks [1]" in said for said, _ in found)


@pytest.mark.parametrize("recompute", [False, True])
def test_ranks_in_step_learn_alike_with_and_without_the_check(recompute: bool) -> None:
    routes = ((0, 2, 3), (0, 2, 3))
    options = {"recompute": recompute, "accumulate_grad_batches": 2, "val_check_interval": 1}
    plain = ranks(2).run(fit, routes, check=False, **options)
    checked = ranks(2).run(fit, routes, **options)
    assert [said for said, _ in checked] == ["", ""]
    assert [losses for _, losses in checked] == [losses for _, losses in plain]
