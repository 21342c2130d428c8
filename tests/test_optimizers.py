"""Which optimizers are exact over shards, which are refused, and that all ranks have the same."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim

from tests import lit
from tests.ranks import ranks
from tests.runs import refusal
from tests.test_training import assert_same


class Stepped(lit.Lit):
    """Steps with one optimizer over all parameters."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Any:
        return getattr(optim, self.kind)(self.parameters(), **self.options)


def step(strategy: str, kind: str, options: dict[str, Any]) -> lit.Outcome:
    return lit.fit(strategy, module=Stepped(kind, options), steps=4)


# Rates are small where a step is near the sign of the gradient, which rounding may turn.
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("ASGD", {}),
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": False}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"lr": 1e-6}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("kind", "options"), EXACT)
def test_an_optimizer_that_works_element_by_element_is_exact_over_shards(
    kind: str, options: dict[str, Any]
) -> None:
    expected = step("auto", kind, options)
    assert_same(ranks(2).run(step, "zero3", kind, options)[0], expected)


REFUSED = {
    "LBFGS": "flattens all parameters into one vector",
    "Adafactor": "takes means over whole rows and columns",
    "Rprop": "assigns by a mask, which torch cannot do in a sharded tensor",
    "SparseAdam": "needs sparse gradients",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_that_fails_over_shards_is_refused_with_the_true_reason(kind: str) -> None:
    for message in ranks(2).run(refusal, step, "zero3", kind, {}):
        assert message.startswith(f"{kind} {REFUSED[kind]}")
        assert message.endswith("Use AdamW, Adam or SGD.")


class RankDecides(lit.Lit):
    """Lets the rank decide something of its optimizers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def configure_optimizers(self) -> Any:
        odd = dist.get_rank() == 1
        vectors = [p for p in self.parameters() if p.ndim == 1]
        matrices = [p for p in self.parameters() if p.ndim > 1]
        adam = {
            "nothing": lambda: optim.AdamW(self.parameters(), lr=1e-3),
            "lr": lambda: optim.AdamW(self.parameters(), lr=2e-3 if odd else 1e-3),
            "tensor lr": lambda: optim.AdamW(self.parameters(), lr=torch.tensor(1e-3 * (1 + odd))),
            "betas": lambda: optim.AdamW(self.parameters(), betas=(0.9, 0.99 if odd else 0.95)),
            "class": lambda: (
                optim.SGD(self.parameters(), lr=1e-3)
                if odd
                else optim.AdamW(self.parameters(), lr=1e-3)
            ),
            "refused class": lambda: (
                optim.Rprop(self.parameters()) if odd else optim.AdamW(self.parameters())
            ),
            "order": lambda: optim.AdamW(
                [{"params": vectors + matrices if odd else matrices + vectors}], lr=1e-3
            ),
            "groups": lambda: optim.AdamW(
                [{"params": matrices}, {"params": vectors}] if odd else [*matrices, *vectors]
            ),
        }
        return adam[self.what]()


def fit_as_the_rank_decides(what: str) -> str:
    run = lit.trainer("zero3", max_steps=1)
    return refusal(run.fit, RankDecides(what), lit.loader())


DIFFERENCES: dict[str, str] = {
    "lr": "optimizer 0, group 0, lr = 0.002 on rank 1, 0.001 on rank 0: must be the same",
    "tensor lr": "optimizer 0, group 0, lr = 0.002",
    "betas": "optimizer 0, group 0, betas = (0.9, 0.99) on rank 1, (0.9, 0.95) on rank 0",
    "class": "optimizer 0 = SGD on rank 1, AdamW on rank 0",
    "refused class": "optimizer 0 = Rprop on rank 1, AdamW on rank 0",
    "order": "optimizer 0, group 0, parameters = ",
    "groups": "optimizer 0, group 0, parameters = ",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_whose_optimizers_differ_are_told_the_first_difference(what: str) -> None:
    for message in ranks(2).run(fit_as_the_rank_decides, what):
        assert message.startswith(DIFFERENCES[what])


def test_ranks_with_the_same_optimizers_train() -> None:
    assert ranks(2).run(fit_as_the_rank_decides, "nothing") == ["", ""]
