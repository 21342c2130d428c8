"""An endless shuffled order that is a pure function of (seed, position).

The order is one stream of positions 0, 1, 2, ... Position p shows sample
`Permutation(n, (seed, p // n))[p % n]`: every run of n positions shows each sample once. All that a
resumed run must know is how far the stream was read, one number that holds for any number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sized
from typing import Any, final

from torch.utils.data import DistributedSampler

NUM_ROUNDS = 6


@final
class Permutation:
    """A keyed shuffle of range(n) that stores no array.

    A Feistel network shuffles the smallest even-bit range that holds n; results outside range(n)
    are shuffled again until they fall inside, which takes 4 turns at worst on average.

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (cycle walking).

    Args:
        n: size of the range, at least 1.
        key: any integers; equal keys give equal shuffles on every machine.
    """

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        if n < 1:
            raise ValueError(f"n = {n}: must be at least 1. Give a dataset that is not empty.")
        self.n = n
        self.half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(
            ",".join(map(str, key)).encode(), digest_size=8 * NUM_ROUNDS
        ).digest()
        self.round_keys = [
            int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(NUM_ROUNDS)
        ]

    def __getitem__(self, index: int) -> int:
        """Return where `index` goes.

        Raises:
            IndexError: index lies outside range(n).
        """
        if not 0 <= index < self.n:
            raise IndexError(f"index = {index}: must lie in [0, {self.n}).")
        shuffled = self._shuffle(index)
        while shuffled >= self.n:
            shuffled = self._shuffle(shuffled)
        return shuffled

    def _shuffle(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self.half_bits | right


def _mix(value: int) -> int:
    """Scatter the bits of a 64-bit integer. Source: Steele et al. 2014, SplitMix64's finalizer."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


class ResumableSampler(DistributedSampler):
    """One rank's share of the stream, from wherever the stream was left.

    Ranks take turns: of the next W positions, rank r takes the r-th. One step of W ranks with B
    samples each therefore reads the next W*B positions whatever W and B are. A pass ends after
    len(dataset) // W samples; the next pass goes on from `consumed`, so a batch may span two
    shuffles and no sample is lost between passes.

    It derives from torch's sampler because Lightning leaves such a sampler in place.

    Args:
        dataset: anything with a length.
        num_replicas: data-parallel ranks, W.
        rank: this rank among them.
        seed: chooses the order.

    Attributes:
        consumed: positions read by all ranks together; `ResumableLoader` counts it.
        goes_on_from: tells what to store instead, where not all that was read is to be left out by
            a run that resumes; None stores `consumed`.
    """

    def __init__(
        self, dataset: Sized, *, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> None:
        self.num_positions = len(dataset)
        if num_replicas > self.num_positions:
            raise ValueError(
                f"num_replicas = {num_replicas}: must be at most the {self.num_positions} samples "
                "of the dataset. Use fewer ranks, a longer text or shorter sequences."
            )
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)  # pyright: ignore[reportArgumentType]
        self.consumed = 0
        self.goes_on_from: Callable[[], int] | None = None

    def __len__(self) -> int:
        return self.num_positions // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        start, epoch, shuffled = self.consumed + self.rank, -1, None
        for position in range(start, start + len(self) * self.num_replicas, self.num_replicas):
            next_epoch, index = divmod(position, self.num_positions)
            if shuffled is None or next_epoch != epoch:
                epoch = next_epoch
                shuffled = Permutation(self.num_positions, (self.seed, epoch))
            yield shuffled[index]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks, and what it is a position in."""
        return self.state_at(self.goes_on_from() if self.goes_on_from else self.consumed)

    def state_at(self, consumed: int) -> dict[str, Any]:
        """Return the state of another position."""
        return {"consumed": consumed, "num_samples": self.num_positions, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, on any number of ranks.

        Raises:
            ValueError: the position belongs to another order: the dataset or the seed changed.
        """
        for name, own in (("num_samples", self.num_positions), ("seed", self.seed)):
            if state[name] != own:
                raise ValueError(
                    f"checkpoint.data.{name} = {state[name]}: must be {own} as in this run, or "
                    "samples would repeat. Use the data and seed of the first run, or start anew."
                )
        self.consumed = state["consumed"]
