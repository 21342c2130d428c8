"""The training order is a permutation per epoch and continues exactly on any number of ranks."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_strategy.data import ResumableLoader, ResumableSampler
from zero_strategy.data.sampler import Permutation

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**63)


@given(sizes, seeds, st.integers(0, 100))
@settings(max_examples=60)
def test_every_key_gives_a_permutation(n, seed, epoch):
    permutation = Permutation(n, (seed, epoch))
    assert sorted(permutation[i] for i in range(n)) == list(range(n))


@given(st.integers(1, 2**60), seeds, st.data())
def test_huge_ranges_need_no_memory_and_stay_in_range(n, seed, data):
    index = data.draw(st.integers(0, n - 1))
    assert 0 <= Permutation(n, (seed,))[index] < n


@given(st.integers(100, 2000), seeds, st.integers(0, 50))
@settings(max_examples=40)
def test_two_keys_agree_about_as_often_as_chance(n, seed, epoch):
    first, second = Permutation(n, (seed, epoch)), Permutation(n, (seed, epoch + 1))
    # Chance agreement is Poisson with mean 1; 12 or more has a probability near 1e-9.
    assert sum(first[i] == second[i] for i in range(n)) < 12


def test_a_fixed_order_is_kept_for_ever():
    # A changed order would silently break the resumption of old checkpoints.
    assert [Permutation(10, (1, 0))[i] for i in range(10)] == [0, 5, 8, 4, 6, 1, 3, 9, 7, 2]


def test_every_place_is_reached_about_equally_often():
    n, trials = 7, 2000
    counts = Counter(Permutation(n, (0, k))[0] for k in range(trials))
    chi_square = sum((counts[i] - trials / n) ** 2 / (trials / n) for i in range(n))
    assert chi_square < 27.9  # 6 degrees of freedom, p = 1e-4


def test_neighbours_do_not_stay_neighbours():
    n = 4096
    permutation = Permutation(n, (3, 0))
    steps = sum(abs(permutation[i + 1] - permutation[i]) == 1 for i in range(n - 1))
    assert steps < 15  # chance gives 2 on average


@pytest.mark.parametrize("index", [-1, 5])
def test_places_outside_the_range_are_refused(index):
    with pytest.raises(IndexError, match=r"must lie in \[0, 5\)"):
        Permutation(5, (0,))[index]


def steps(n, world_size, batch_size, num_steps, consumed=0, seed=0):
    """Return the set of samples of each global step, over as many passes as it takes."""
    batches = []
    for rank in range(world_size):
        sampler = ResumableSampler(range(n), num_replicas=world_size, rank=rank, seed=seed)
        loader = ResumableLoader(torch.arange(n), sampler=sampler, batch_size=batch_size)
        loader.load_state_dict({"consumed": consumed, "num_samples": n, "seed": seed})
        mine = []
        while len(mine) < num_steps:
            mine.extend(batch.tolist() for batch in loader)
        batches.append(mine)
    return [
        Counter(i for rank in range(world_size) for i in batches[rank][step])
        for step in range(num_steps)
    ]


@given(st.integers(12, 80), st.integers(0, 500), seeds)
@settings(max_examples=30)
def test_any_division_of_a_global_batch_reads_the_same_samples(n, consumed, seed):
    expected = steps(n, 1, 12, 9, consumed, seed)
    for world_size, batch_size in ((2, 6), (3, 4), (4, 3), (12, 1)):
        assert steps(n, world_size, batch_size, 9, consumed, seed) == expected


def test_resuming_on_other_ranks_repeats_and_loses_nothing():
    n, first = 53, steps(53, 4, 3, 5)
    rest = steps(n, 2, 6, 8, consumed=60)
    assert first + rest == steps(n, 1, 12, 13)
    assert sum((first + rest)[:4], Counter()).most_common(1)[0][1] == 1


def test_an_abandoned_pass_goes_on_where_it_was_left():
    sampler = ResumableSampler(range(20), seed=1)
    loader = ResumableLoader(torch.arange(20), sampler=sampler, batch_size=3)
    seen = []
    for _ in range(4):  # as `limit_train_batches=2` does
        for _, batch in zip(range(2), loader, strict=False):
            seen.extend(batch.tolist())
    assert sampler.consumed == 24
    assert sorted(seen[:20]) == list(range(20))


def test_every_epoch_shows_each_sample_once_and_in_another_order():
    sampler = ResumableSampler(range(30), seed=2)
    loader = ResumableLoader(torch.arange(30), sampler=sampler, batch_size=5)
    first, second = ([i for batch in loader for i in batch.tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


def test_worker_processes_change_nothing():
    def batches(num_workers):
        sampler = ResumableSampler(range(30), num_replicas=2, rank=1)
        loader = ResumableLoader(
            torch.arange(30), sampler=sampler, batch_size=2, num_workers=num_workers
        )
        read = []
        for batch in loader:
            read.append((batch.tolist(), sampler.consumed))
        return read

    assert batches(0) == batches(2)
    assert [consumed for _, consumed in batches(0)] == [4, 8, 12, 16, 20, 24, 28]


@pytest.mark.parametrize("change", [{"num_samples": 21}, {"seed": 5}])
def test_a_position_in_another_order_is_refused(change):
    sampler = ResumableSampler(range(20))
    with pytest.raises(ValueError, match=rf"checkpoint\.data\.{next(iter(change))} = .* must be"):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_more_ranks_than_samples_are_refused():
    with pytest.raises(ValueError, match="num_replicas = 4: must be at most the 3 samples"):
        ResumableSampler(range(3), num_replicas=4)
