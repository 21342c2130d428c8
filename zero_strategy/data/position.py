"""A map-style DataLoader that goes on in the middle of a pass, without loading what was seen.

What a pass shows is decided by indices, which cost nothing: a loader that goes on skips those of
the samples that were seen. That the order is the one that was saved is not assumed of a sampler but
compared: a fingerprint says which samples stood at which places of the order.

Samplers draw from a stream of their own when a pass starts, whose seed is stored, so that
`RandomSampler` repeats its order too. A `DistributedSampler` deals one order out, to any number of
ranks; that order goes on with another number of ranks or another batch size.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zero_strategy.checkpoint.random_state import apart

_MANY = 1 << 20
"""Samples that are looked at together, which bounds the memory for it."""
_TORCHS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a pass was shown on one rank.

    Attributes:
        seed: of the stream that the pass's order was drawn from.
        generator: state of the loader's own torch generator before the pass; None without one.
        batches: shown on this rank.
        consumed: samples shown on all ranks together.
        fingerprint: of the samples shown on this rank and their places in the order.
        world_size: ranks among which the order is dealt out.
        batch_size: samples per batch, or None where batches are the loader's own.
        dataset: what the indices are of, as `description` has it.
    """

    seed: int
    generator: bytes | None
    batches: int
    consumed: int
    fingerprint: int
    world_size: int
    batch_size: int | None
    dataset: str

    def after(self, num_samples: int, fingerprint: int) -> Self:
        """Return the position one batch of this rank later."""
        return dataclasses.replace(
            self,
            batches=self.batches + 1,
            consumed=self.consumed + num_samples * self.world_size,
            fingerprint=(self.fingerprint + fingerprint) % 2**64,
        )


@final
class Order(Sampler[Any]):
    """Stands in for a loader's batch sampler, and knows what was shown of it.

    Args:
        loader: whose order it is.
        name: of the loader, for warnings.
        rank: this rank.
        world_size: ranks that train. A DistributedSampler's own numbers come before both.
        new_seed: gives the seed of a pass that starts; a resumed run must give the same.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        name: str,
        rank: int,
        world_size: int,
        new_seed: Callable[[Order], int],
    ) -> None:
        self.name = name
        self._sampler: Any = _inner(loader.sampler)
        self._batches: Any = _inner(loader.batch_sampler)
        self._batch_size = loader.batch_size
        self._dataset = description(loader.dataset)
        self._rank, self._world_size = rank, world_size
        self._dealt = isinstance(self._sampler, DistributedSampler) and (
            self._batches is None or type(self._batches) is BatchSampler
        )
        if self._dealt:
            self._rank, self._world_size = self._sampler.rank, self._sampler.num_replicas
        self._generator: torch.Generator | None = loader.generator
        if self._generator is None and isinstance(self._sampler, _TORCHS):
            self._generator = self._sampler.generator
        self._new_seed = new_seed
        self._shown: Position | None = None
        self._next: Position | None = None
        self._expected = 0
        self._drawn: deque[tuple[int, int]] = deque()

    @property
    def inner(self) -> Any:
        """The loader's own batch sampler, or its sampler where it makes no batches."""
        return self._sampler if self._batches is None else self._batches

    def __getattr__(self, name: str) -> Any:
        # What a batch sampler is asked for besides, such as `batch_size` or `set_epoch`.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    # What was shown.

    def rest(self) -> None:
        """A pass is about to start: nothing of it was shown."""
        self._shown = None
        self._drawn.clear()

    @contextmanager
    def started(self) -> Generator[None, None, None]:
        """Start a pass inside, or go on with one."""
        self._shown, self._next = self._next or self._fresh(), None
        with apart(self._shown.seed):
            yield

    def show(self) -> None:
        """Count a batch that is handed out; batches come in the order of their indices."""
        assert self._shown is not None, "a pass was started"
        self._shown = self._shown.after(*self._drawn.popleft())

    def position(self, *, at_end: bool) -> Position:
        """Return what a run that resumes goes on from.

        Args:
            at_end: the epoch is at its end, so the next batch starts a pass.
        """
        if at_end:
            return self._fresh()
        return self._shown or self._next or self._fresh()

    def _fresh(self) -> Position:
        generator = self._generator
        return Position(
            seed=self._new_seed(self),
            generator=None if generator is None else generator.get_state().numpy().tobytes(),
            batches=0,
            consumed=0,
            fingerprint=0,
            world_size=self._world_size,
            batch_size=self._batch_size,
            dataset=self._dataset,
        )

    # Going on.

    def go_on(self, ranks: Sequence[Position]) -> str | None:
        """Let the next pass go on from the positions of all ranks, as they were then.

        Returns: why it cannot; the pass then starts at its beginning.
        """
        own = ranks[self._rank % len(ranks)]
        if self._generator is not None and own.generator is not None:
            state = torch.frombuffer(bytearray(own.generator), dtype=torch.uint8)
            self._generator.set_state(state)
        if own.consumed == 0:
            return None
        if own.dataset != self._dataset:
            self._warn(f"it has samples of {self._dataset}, the run that was saved {own.dataset}")
        if self._dealt:
            self._expected = sum(p.fingerprint for p in ranks) % 2**64
            # The sum over ranks is what counts, also at the next save.
            self._next = dataclasses.replace(
                ranks[0],
                fingerprint=self._expected if self._rank == 0 else 0,
                world_size=self._world_size,
                batch_size=self._batch_size,
            )
            return None
        if (own.world_size, own.batch_size) != self.division:
            return (
                f"the order of {type(self._sampler).__name__} cannot go on with another number of "
                "ranks or another batch size"
            )
        self._next, self._expected = own, own.fingerprint
        return None

    @property
    def division(self) -> tuple[int, int | None]:
        """Among how many ranks, and into batches of what size, the order is dealt out."""
        return self._world_size, self._batch_size

    @property
    def num_shown(self) -> int:
        """Batches of the pass that a run which goes on has behind it, in batches of this run."""
        if self._next is None:
            return 0
        if not self._dealt:
            return self._next.batches
        rest = len(self._sampler.dataset) - self._next.consumed
        rest = _parts(rest, self._world_size, drop_last=self._sampler.drop_last)
        if self._batches is not None:
            rest = _parts(rest, self._batches.batch_size, drop_last=self._batches.drop_last)
        return len(self) - rest

    def __iter__(self) -> Iterator[Any]:
        start = self._shown
        assert start is not None, "a pass was started"
        with apart(start.seed):
            indices = self._after(start)
            # Samplers draw when they are first asked.
            batch = next(indices, None)
        place = start.consumed + self._rank
        while batch is not None:
            samples = [batch] if self._batches is None else list(batch)
            self._drawn.append((len(samples), _fingerprint(samples, place, self._world_size)))
            place += len(samples) * self._world_size
            yield batch if self._batches is None else samples
            batch = next(indices, None)

    def _after(self, start: Position) -> Iterator[Any]:
        """The indices that are to be shown, from a position on."""
        if start.consumed == 0:
            return iter(self.inner)
        if self._dealt:
            return self._deal(start)
        indices = iter(self.inner)
        place, found = self._rank, 0
        for batch in islice(indices, start.batches):
            samples = [batch] if self._batches is None else list(batch)
            found += _fingerprint(samples, place, self._world_size)
            place += len(samples) * self._world_size
        self._compare(found)
        return indices

    def _deal(self, start: Position) -> Iterator[Any]:
        """This rank's part of what is left of the one order, in batches."""
        alone = copy.copy(self._sampler)
        alone.num_replicas, alone.rank = 1, 0
        alone.num_samples = alone.total_size = len(alone.dataset)
        order = list(alone)
        shown = range(0, start.consumed, _MANY)
        ends = (min(first + _MANY, start.consumed) for first in shown)
        pairs = zip(shown, ends, strict=True)
        self._compare(sum(_fingerprint(order[first:end], first, 1) for first, end in pairs))
        rest = order[start.consumed :]
        if self._sampler.drop_last:
            rest = rest[: len(rest) // self._world_size * self._world_size]
        else:
            rest += order[: -len(rest) % self._world_size]
        own = rest[self._rank :: self._world_size]
        if self._batches is None:
            return iter(own)
        return iter(BatchSampler(own, self._batches.batch_size, self._batches.drop_last))

    def _compare(self, found: int) -> None:
        if found % 2**64 != self._expected:
            self._warn(
                "its order is not that of the run that was saved (another seed, dataset or sampler)"
            )

    def _warn(self, problem: str) -> None:
        warnings.warn(
            f"{self.name}: {problem}, so of this epoch some samples come twice and others not at "
            "all. Resume with the same, or at the end of an epoch.",
            stacklevel=3,
        )


def description(dataset: Any) -> str:
    """Return what tells a dataset from others without loading a sample.

    Example:
        >>> description(range(5))
        'range of 5'
    """
    said = type(dataset).__name__
    if isinstance(dataset, Sized):
        said += f" of {len(dataset)}"
    if isinstance(dataset, Subset):
        indices = zlib.crc32(np.asarray(dataset.indices).astype(np.int64).tobytes())
        said += f" ({indices:08x}) of {description(dataset.dataset)}"
    return said


def _parts(number: int, size: int, *, drop_last: bool) -> int:
    return number // size if drop_last else -(-number // size)


def _inner(sampler: Any) -> Any:
    return sampler.inner if isinstance(sampler, Order) else sampler


def _fingerprint(samples: Sequence[Any], first: int, stride: int) -> int:
    """Return a number that tells which sample stands at which place, to be summed over samples.

    Source: Steele et al. 2014, SplitMix64's finalizer.
    """
    if not samples:
        return 0
    numbers = [s if type(s) is int else zlib.crc32(repr(s).encode()) for s in samples]
    sample = np.array(numbers, dtype=np.int64).astype(np.uint64)
    place = np.arange(first, first + stride * len(samples), stride).astype(np.uint64)
    mixed = place * np.uint64(0x9E3779B97F4A7C15) + sample
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ mixed >> np.uint64(31)).sum(dtype=np.uint64))


class GoesOn(DataLoader):
    """Mixed into the class of a loader by `that_goes_on`."""

    order_shown: Order

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.order_shown.rest()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        # Workers start at the first batch, after the sampler was told its epoch and what was seen.
        with self.order_shown.started():
            batches = super().__iter__()
        for batch in batches:
            self.order_shown.show()
            yield batch


def can_go_on(loader: Any) -> bool:
    """Whether a loader is one of torch's over a map-style dataset, with a length."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader).__iter__ in (DataLoader.__iter__, GoesOn.__iter__)
        and isinstance(loader.sampler, Sized)
        and (loader.batch_sampler is None or isinstance(loader.batch_sampler, Sized))
        and loader.in_order
    )


def that_goes_on(loader: DataLoader, *, name: str, **told: Any) -> GoesOn:
    """Return a copy of a loader that can go on; dataset and samplers are the loader's own.

    Args:
        loader: one that `can_go_on`.
        name: of the loader, for warnings.
        told: what `Order` is told.
    """
    made: Any = copy.copy(loader)
    kind = type(loader)
    if not isinstance(loader, GoesOn):
        made.__class__ = type(kind.__name__, (GoesOn, kind), {})
    order = Order(loader, name=name, **told)
    # A DataLoader refuses to be given another sampler, for which it would have to make batches.
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(made).update({"order_shown": order, place: order, "_iterator": None})
    return made
