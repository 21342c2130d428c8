"""Copies of what a run goes on changing, taken between two steps and written in the background.

Copies and writes go through the tensors in one order, so a ring of host memory is enough, however
small: where it is full, the run waits until something was written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner import WriteItem
from typing_extensions import override

from zero_strategy.checkpoint.late import Late, LateSavePlanner
from zero_strategy.checkpoint.shards import write_order
from zero_strategy.gradient import local
from zero_strategy.offload.host import Memory
from zero_strategy.offload.link import DONE, Copied, Event

_ALIGN_BYTES = 256


class _Copy(NamedTuple):
    """A shard in host memory."""

    tensor: Tensor
    end: int
    """Of its memory, in bytes since the ring was made."""
    copied: Copied


@final
class Ring:
    """Host memory that is taken and given back in one order.

    Args:
        num_bytes: of it.
        pinned: register it with CUDA.

    Attributes:
        begin, end: of what is taken, in bytes since the start; both only grow.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._memory = Memory(num_bytes, torch.uint8)
        self.num_bytes = num_bytes
        if pinned and num_bytes:
            self._memory.register([self._memory.values])
        self.begin = self.end = 0

    def take(self, num_bytes: int) -> Tensor | None:
        """Return so many bytes, (num_bytes,), uint8, or None where they are not free yet."""
        start = -(-self.end // _ALIGN_BYTES) * _ALIGN_BYTES
        place = start % self.num_bytes
        if place + num_bytes > self.num_bytes:
            start += self.num_bytes - place
            place = 0
        if self.begin < self.end and start + num_bytes > self.begin + self.num_bytes:
            return None
        if self.begin == self.end:
            self.begin = start
        self.end = start + num_bytes
        return self._memory.values.narrow(0, place, num_bytes)

    def give_back(self, end: int) -> None:
        """Free what was taken until a position of `end`."""
        self.begin = end


@final
class Staging:
    """What one save copies between two steps. Two threads: the run copies, the other writes.

    Args:
        ring: where to.
        tensors: canonical name -> tensor, late or not. Late ones that stay are not copied.
    """

    def __init__(self, ring: Ring, tensors: Mapping[str, Tensor | Late]) -> None:
        self._ring = ring
        self._tensors = tensors
        self._items: Sequence[WriteItem] | None = None
        self._copies: deque[_Copy] = deque()
        self._given: _Copy | None = None
        self._failure: Exception | None = None
        self._ended = False
        self._changed = threading.Condition()

    def is_copied(self, item: WriteItem) -> bool:
        """Whether a planned shard goes through the ring."""
        return _is_copied(self._tensors[item.index.fqn])

    # The run.

    def copy_all(self, shard: Callable[[WriteItem], Tensor]) -> None:
        """Copy each planned shard, in order; returns early where the save fails.

        A shard that cannot be had fails the save, which every rank learns of; not this call.

        Args:
            shard: gives it, on its device. What the current stream queues later may change it.
        Cost: waits for the plan of all ranks, and for room; the copies themselves are queued.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items is not None or self._ended)
        try:
            for item in self._items or ():
                if self.is_copied(item):
                    self._copy(shard(item).detach())
        except BaseException as error:  # raised where it is written
            interrupted = not isinstance(error, Exception)
            with self._changed:
                self._failure = InterruptedError("the run ended") if interrupted else error
                self._changed.notify_all()
            if interrupted:
                raise

    def _copy(self, source: Tensor) -> None:
        with self._changed:
            room: Tensor | None = None
            while not self._ended and (room := self._ring.take(source.nbytes)) is None:
                self._changed.wait()
            if room is None:
                return
            end = self._ring.end
        target = room.view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
        on_gpu = source.device.type == "cuda"
        copied = Event(torch.cuda.current_stream(source.device)) if on_gpu else DONE
        with self._changed:
            self._copies.append(_Copy(target, end, copied))
            self._changed.notify_all()

    # The thread that writes.

    def planned(self, items: Sequence[WriteItem]) -> None:
        """Let the run copy, in this order."""
        with self._changed:
            self._items = items
            self._changed.notify_all()

    def next_copy(self) -> Tensor:
        """Return the next copied shard; the one before is written and let go."""
        with self._changed:
            if self._given is not None:
                self._ring.give_back(self._given.end)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._copies or self._failure)
            if not self._copies and self._failure is not None:
                raise self._failure
            self._given = self._copies.popleft()
        self._given.copied.wait()
        return self._given.tensor

    def end(self) -> None:
        """Let the run go on, and free the ring."""
        with self._changed:
            self._ended = True
            self._copies.clear()
            self._ring.give_back(self._ring.end)
            self._changed.notify_all()


@final
class StagedSavePlanner(LateSavePlanner):
    """Gives the copies of shards to be written.

    Args:
        tensors: as in `LateSavePlanner`.
        staging: of the same.
    """

    def __init__(self, tensors: Mapping[str, Tensor | Late], staging: Staging) -> None:
        super().__init__(tensors)
        self._staging = staging

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._staging.planned(write_order(plan.items))
        return plan

    def shard(self, item: WriteItem) -> Tensor:
        """Return a planned shard itself."""
        shard = super().resolve_data(item)
        assert isinstance(shard, Tensor), "only tensors were planned"
        return shard

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        copied = self._staging.is_copied(write_item)
        return self._staging.next_copy() if copied else self.shard(write_item)


def ring_bytes(tensors: Mapping[str, Tensor | Late], budget_bytes: int) -> int:
    """Return the size of a ring for some tensors: all of them, or the budget, or the largest."""
    sizes = [
        -(-_shard_bytes(tensor) // _ALIGN_BYTES) * _ALIGN_BYTES
        for tensor in tensors.values()
        if _is_copied(tensor)
    ]
    return max(min(sum(sizes), budget_bytes), max(sizes, default=0))


def _is_copied(tensor: Tensor | Late) -> bool:
    return not (isinstance(tensor, Late) and tensor.stays)


def _shard_bytes(tensor: Tensor | Late) -> int:
    return local(tensor.like if isinstance(tensor, Late) else tensor).nbytes
