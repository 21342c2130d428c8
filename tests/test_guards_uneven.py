"""Ranks with different numbers of training batches end together, as the policy says."""

from collections.abc import Iterator
from inspect import getattr_static
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import zero_strategy
from tests import lit
from tests.ranks import ranks
from tests.runs import refusal
from zero_strategy.control import control_group
from zero_strategy.guards.uneven import even_loader

FP32_TOLERANCE = 2e-6  # see tests/test_parity.py
COUNTS = (8, 5)
ROWS = 3
"""Of one batch of a rank."""


def batches_of(rank: int, count: int) -> list[Tensor]:
    """Batch i of rank r holds other rows than any other."""
    rows = lit.Tokens(300).rows
    return [rows[(2 * i + rank) * ROWS :][:ROWS] for i in range(count)]


class Known:
    """A loader that knows its length, and maybe gives less than that."""

    def __init__(self, batches: list[Tensor], *, short_by: int = 0) -> None:
        self.batches, self.short_by = batches, short_by

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches[: len(self.batches) - self.short_by]

    def __len__(self) -> int:
        return len(self.batches)


class Stream(IterableDataset):
    """Batches, of which nobody knows how many there are."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.batches


def loader(kind: str, counts: tuple[int, ...]) -> Any:
    rank = dist.get_rank()
    batches = batches_of(rank, counts[rank])
    if kind == "known" or (kind == "mixed" and rank == 0):
        return Known(batches)
    return DataLoader(Stream(batches), batch_size=None)


class Recording(lit.Lit):
    """Notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.steps: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append(int(batch[0, 0]) if isinstance(batch, Tensor) else -1)
        return super().training_step(batch, index)

    def on_train_epoch_end(self) -> None:
        self.steps.append(self.trainer.global_step)


def fit(
    kind: str, policy: str, counts: tuple[int, ...] = COUNTS, **options: Any
) -> tuple[str, list[int], list[int], dict[str, Tensor]]:
    """What a run is refused with, the batches it saw, its steps by epoch, and its weights."""
    guards = zero_strategy.GuardConfig(uneven=policy)  # pyright: ignore[reportArgumentType]
    strategy = zero_strategy.ZeroStrategy(stage=3, guards=guards)
    module = Recording()
    run = lit.trainer(strategy, **({"max_epochs": 2} | options))
    said = refusal(run.fit, module, loader(kind, counts))
    return said, module.seen, module.steps, {} if said else lit.whole(module)


@pytest.mark.parametrize("kind", ["known", "stream", "mixed"])
def test_uneven_loaders_are_refused_on_every_rank_with_ranks_and_counts(kind: str) -> None:
    (first, seen, *_), (second, also_seen, *_) = ranks(2).run(fit, kind, "error")
    assert first == second
    assert "zero.guards.uneven = 'error': training batches must be as many on every rank" in first
    more = "8" if kind == "known" else "6 or more"
    assert f"found 5 on ranks [1], {more} on ranks [0]" in first
    # Known lengths are compared before the first step; else the run goes as far as all have one.
    assert len(seen) == len(also_seen) == (0 if kind == "known" else 5)


@pytest.mark.parametrize("policy", ["error", "drop", "pad"])
@pytest.mark.parametrize("kind", ["known", "stream"])
def test_even_loaders_are_left_as_they_are(kind: str, policy: str) -> None:
    for rank, (said, seen, steps, _) in enumerate(ranks(2).run(fit, kind, policy, (4, 4))):
        assert not said
        assert seen == [int(b[0, 0]) for b in batches_of(rank, 4)] * 2
        assert steps == [4, 8]


@pytest.mark.parametrize("kind", ["known", "stream", "mixed"])
def test_under_drop_every_epoch_ends_on_all_ranks_with_the_shortest(kind: str) -> None:
    found = ranks(2).run(fit, kind, "drop", accumulate_grad_batches=2)
    for rank, (said, seen, steps, _) in enumerate(found):
        assert not said
        assert seen == [int(b[0, 0]) for b in batches_of(rank, 5)] * 2
        # The last batch steps, though no second one follows.
        assert steps == [3, 6]


def learn_alone(counts: tuple[int, ...], accumulate: int) -> dict[str, Tensor]:
    """The weights of one process that gets, each time, all batches that there are."""
    batches = [
        torch.cat([batches_of(r, n)[i] for r, n in enumerate(counts) if i < n])
        for i in range(max(counts))
    ]
    module = lit.Lit()
    run = lit.trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    run.fit(module, Known(batches))
    return lit.whole(module)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["known", "stream", "mixed"])
def test_under_pad_the_run_learns_what_one_process_learns_from_the_samples_there_are(
    kind: str, accumulate: int
) -> None:
    expected = ranks(1).run(learn_alone, COUNTS, accumulate)[0]
    found = ranks(2).run(fit, kind, "pad", accumulate_grad_batches=accumulate)
    for rank, (said, seen, steps, weights) in enumerate(found):
        assert not said
        own = [int(b[0, 0]) for b in batches_of(rank, COUNTS[rank])]
        assert seen == (own + own[-1:] * (8 - len(own))) * 2
        assert steps == [8 // accumulate, 16 // accumulate]
        for name, value in expected.items():
            torch.testing.assert_close(
                weights[name], value, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE, msg=name
            )


@pytest.mark.parametrize("policy", ["error", "drop", "pad"])
@pytest.mark.parametrize("kind", ["known", "stream"])
def test_a_rank_without_any_batch_is_refused_by_name(kind: str, policy: str) -> None:
    first, second = (said for said, *_ in ranks(2).run(fit, kind, policy, (3, 0)))
    assert first == second
    assert "found 0 on ranks [1]" in first


def read_short() -> str:
    rank = dist.get_rank()
    short = Known(batches_of(rank, COUNTS[rank]), short_by=rank)
    return refusal(list, even_loader(short, "drop", control_group()))


def test_a_loader_that_ends_before_its_length_is_an_error() -> None:
    said = ranks(2).run(read_short)
    assert said[0] == ""
    assert "ended after 4 batches: must give 5, which its length says" in said[1]


class Placed(Known):
    """One that keeps its position, as the class alone says."""

    place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def look_at_positions() -> tuple[bool, bool, int]:
    batches = batches_of(dist.get_rank(), COUNTS[dist.get_rank()])
    plain, placed = (
        even_loader(kind(batches), "drop", control_group()) for kind in (Known, Placed)
    )
    placed.load_state_dict({"place": 3})
    # As isinstance looks at a protocol from Python 3.12 on.
    found = [getattr_static(one, "state_dict", None) is not None for one in (plain, placed)]
    return *found, placed.state_dict()["place"]


def test_an_even_loader_keeps_its_position_where_its_own_does() -> None:
    assert ranks(2).run(look_at_positions) == [(False, True, 3)] * 2


def fit_limited() -> list[int]:
    module = Recording()
    run = lit.trainer("zero3", max_epochs=1, limit_train_batches=4)
    run.fit(module, loader("known", COUNTS))
    return module.seen


def test_a_limit_below_every_length_makes_epochs_even() -> None:
    assert [len(seen) for seen in ranks(2).run(fit_limited)] == [4, 4]


def fit_two(policy: str) -> str:
    guards = zero_strategy.GuardConfig(uneven=policy)  # pyright: ignore[reportArgumentType]
    strategy = zero_strategy.ZeroStrategy(stage=3, guards=guards)
    two = {"a": loader("known", COUNTS), "b": loader("known", (2, 2))}

    class Two(lit.Lit):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch["a"], index)

    return refusal(lit.trainer(strategy, max_epochs=1).fit, Two(), two)


def test_padding_one_of_several_loaders_is_refused() -> None:
    assert all("must be 'error' or 'drop'" in said for said in ranks(2).run(fit_two, "pad"))
    assert ranks(2).run(fit_two, "drop") == ["", ""]
