"""Training loaders of which some rank has fewer batches than the others.

Every training step takes all ranks. Where one runs out first, the others would wait for it in the
next step. So ranks compare their lengths before the first step. Under "pad", and where some loader
does not know its length, ranks say at each batch on the control group whether they have one.
Nothing is read on the accelerator, and where lengths are not known Lightning asks for batches one
ahead: under "error" and "pad" the message has a micro-batch to arrive before a host waits for it.

Under "pad" the mean of gradients over ranks is to be that over the ranks that have a batch: with W
ranks of which n have one, their losses count W / n, that of a repeated batch 0. This is what one
process learns from the samples that there are, where all batches are of one size and the loss is a
mean over a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.config import Uneven
from zero_strategy.control import gather_alike
from zero_strategy.protocols import KeepsPosition

_UNKNOWN = -1
_NO_BATCH = object()


class UnevenBatchesError(ValueError):
    """Ranks have different numbers of training batches."""


def refuse_uneven(
    counts: Sequence[float], policy: Uneven, *, so_far: bool = False
) -> UnevenBatchesError:
    """Return the error that names the ranks and their numbers of batches.

    Args:
        counts: of each rank.
        policy: under which they are refused.
        so_far: whether ranks with most may have more.
    """
    ranks_of: dict[float, list[int]] = {}
    for rank, count in enumerate(counts):
        ranks_of.setdefault(count, []).append(rank)
    told = ", ".join(
        f"{count:.0f}{' or more' if so_far and count == max(counts) else ''} on ranks {ranks}"
        for count, ranks in sorted(ranks_of.items())
    )
    fix = (
        "Give every rank as many samples, or use uneven='drop' or 'pad'."
        if policy == "error"
        else "Give every rank at least one batch; resume at the end of an epoch, or before a rank "
        "ran out of batches."
    )
    return UnevenBatchesError(
        f"zero.guards.uneven = {policy!r}: training batches must be as many on every rank, "
        f"found {told}. {fix}"
    )


def gathered(value: float, group: dist.ProcessGroup) -> list[float]:
    """Return the number that each rank gave. Collective, on the CPU."""
    return [float(v) for v in gather_alike(torch.tensor([value], dtype=torch.float64), group)]


def even_loader(loader: Any, policy: Uneven, group: dist.ProcessGroup | None) -> Any:
    """Return a training loader that ends together on all ranks; the loader itself where it does.

    Args:
        loader: of this rank; any iterable.
        policy: what to do where some rank has fewer batches.
        group: the control group, or None for a single process.

    Raises:
        UnevenBatchesError: a rank has no batch at all, others have some.
    Cost: collective; one all-gather of 8 bytes per rank.
    """
    if group is None:
        return loader
    kind = _PositionedEvenLoader if isinstance(loader, KeepsPosition) else EvenLoader
    lengths = gathered(_length(loader), group)
    if min(lengths) == _UNKNOWN:
        return kind(loader, policy, group, None)
    if min(lengths) == 0 < max(lengths):
        raise refuse_uneven(lengths, policy)
    if policy == "error" or min(lengths) == max(lengths):
        # Different lengths may still make equal epochs, under a limit or beside a longer loader.
        return loader
    length = min(lengths) if policy == "drop" else max(lengths)
    return kind(loader, policy, group, int(length))


def check_epochs(num_batches: float, policy: Uneven, group: dist.ProcessGroup) -> None:
    """Refuse epochs that do not end together.

    Args:
        num_batches: of this rank's epoch; infinite where nobody knows.
        policy: under which loaders were made even, as far as each could be.
        group: the control group.
    Raises: UnevenBatchesError: naming ranks and numbers.
    Cost: collective; one all-gather of 8 bytes per rank on the CPU.
    """
    counts = gathered(num_batches, group)
    if min(counts) != max(counts):
        raise refuse_uneven(counts, policy)


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return _UNKNOWN


class EvenLoader(Iterable[Any]):
    """A rank's loader, made to end with those of the other ranks.

    Anything but iteration and length is the loader's own.

    Args:
        loader: of this rank.
        policy: what to do where some rank has fewer batches.
        group: the control group.
        length: batches that it hands out, or None where some rank does not know.

    Cost: none under "drop" with a known length. Otherwise one all-reduce of 8 bytes on the CPU per
    batch, for which the host waits: under "drop" at once, under "pad" when the batch is trained,
    under "error" when the next one is asked for.
    """

    def __init__(
        self,
        loader: Any,
        policy: Uneven,
        group: dist.ProcessGroup,
        length: int | None,
    ) -> None:
        self.loader = loader
        self.policy: Uneven = policy
        self._group = group
        self._length = length
        self._world_size = dist.get_world_size(group)
        self._weights: deque[Callable[[], float]] = deque()

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # asked for by a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("some rank does not know how many batches it has")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._weights.clear()
        if self.policy == "drop" and self._length is not None:
            return self._first(self._length)
        return self._asking()

    def take_weight(self) -> float:
        """Return what the loss of the batch handed out first counts, and forget that batch.

        Raises: ValueError: no batch was handed out before the step that asks for it.
        """
        if not self._weights:
            raise ValueError(
                "zero.guards.uneven = 'pad': must be 'error' or 'drop' where training_step takes "
                "batches from dataloader_iter by itself. Use training_step(batch, batch_idx)."
            )
        return self._weights.popleft()()

    def _first(self, length: int) -> Iterator[Any]:
        batches = iter(self.loader)
        for index in range(length):
            batch = next(batches, _NO_BATCH)
            if batch is _NO_BATCH:
                raise UnevenBatchesError(
                    f"the training loader of this rank ended after {index} batches: must give "
                    f"{len(self.loader)}, which its length says. Correct its __len__."
                )
            yield batch

    def _asking(self) -> Iterator[Any]:
        batches, batch, had, message = iter(self.loader), _NO_BATCH, 0, None
        has_one = True
        while True:
            is_first = message is None
            if message is not None and self.policy == "error":
                self._check(message.total(), had)
            following = next(batches, _NO_BATCH) if has_one else _NO_BATCH
            has_one = following is not _NO_BATCH
            had += has_one
            message = _Sum(has_one, self._group)
            if is_first or not has_one or self.policy == "drop":
                having = message.total()
                if is_first and having:
                    self._check(having, had)
                if having == 0 or (having < self._world_size and self.policy == "drop"):
                    return
            # Without one of its own a rank goes along; under "error" until all ask for the next.
            batch = following if has_one else batch
            if self.policy == "pad" and batch is not None:
                self._weights.append(self._weight(has_one, message))
            yield batch

    def _check(self, having: int, had: int) -> None:
        if having < self._world_size:
            raise refuse_uneven(gathered(had, self._group), self.policy, so_far=True)

    def _weight(self, is_own: bool, message: _Sum) -> Callable[[], float]:
        return lambda: self._world_size / message.total() if is_own else 0.0


@final
class _PositionedEvenLoader(EvenLoader):
    """Of a loader that keeps its position. From Python 3.12 on a protocol asks the class alone."""

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)


class _Sum:
    """How many ranks say yes; asked now, read later."""

    def __init__(self, answer: bool, group: dist.ProcessGroup) -> None:
        self._count = torch.tensor([answer], dtype=torch.int64)
        self._work = dist.all_reduce(self._count, group=group, async_op=True)

    def total(self) -> int:
        """Wait until all ranks have answered."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return int(self._count)


def weighted(loss: Tensor, weight: float) -> Tensor:
    """Return the loss as it counts; a weight of 1 leaves it as it is."""
    return loss if weight == 1.0 else loss * weight
