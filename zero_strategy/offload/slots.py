"""Slots of the host for gradients, and the gradients that wait on the device until one is free.

Where lanes fall behind the backward, more gradients arrive than the host has slots for. They stay
where they are, in memory that the backward has let go of by then, and the first in forward order
gets the next slot: it came last and its weights are needed first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import final

from torch import Tensor

from zero_strategy.offload.chunk import Chunk, Gradient
from zero_strategy.offload.host import SlotPool
from zero_strategy.offload.link import Copied, Link, Several


@final
class Slots:
    """Places gradients in the host's memory. Its user holds one lock around every call.

    Args:
        pool: the slots.
        link: copies gradients to them.
        max_held: gradients that may wait on the device.
    """

    def __init__(self, pool: SlotPool, link: Link, *, max_held: int) -> None:
        self._pool = pool
        self._link = link
        self._max_held = max_held
        self._held: list[tuple[int, int, Chunk, Gradient]] = []
        self._order = count()

    @property
    def has_room(self) -> bool:
        """Whether another gradient may come, to the host or to wait."""
        return self._pool.num_free > 0 or len(self._held) < self._max_held

    def place(self, chunk: Chunk, gradient: Gradient) -> None:
        """Give a chunk's new gradient a slot, or let it wait for one."""
        if self._pool.num_free:
            gradient.slot, gradient.free = self._pool.take()
        else:
            heapq.heappush(self._held, (chunk.index, next(self._order), chunk, gradient))

    def add(self, gradient: Gradient, parts: Sequence[tuple[int, Tensor]], ready: Copied) -> None:
        """Send a part of a gradient on its way, now or when it has a slot.

        Args:
            gradient: that was placed.
            parts: where each begins in the slot, and its values on the device.
            ready: when these are computed.
        """
        gradient.parts.append((parts, ready))
        if gradient.slot is not None:
            self._send(gradient)

    def give_back(self, gradient: Gradient, read: Copied) -> Chunk | None:
        """Let a gradient go.

        Args:
            gradient: that no pass needs any more.
            read: the end of what reads its slot.

        Returns: the chunk whose gradient waited for a slot and is on its way now.
        """
        if gradient.slot is None:
            self._held = [entry for entry in self._held if entry[3] is not gradient]
            heapq.heapify(self._held)
            return None
        read = Several([read, *gradient.copies])
        if not self._held:
            self._pool.give(gradient.slot, read)
            return None
        _, _, chunk, next_one = heapq.heappop(self._held)
        next_one.slot, next_one.free = gradient.slot, read
        self._send(next_one)
        return chunk

    def _send(self, gradient: Gradient) -> None:
        assert gradient.slot is not None, "placed"
        for parts, ready in gradient.parts:
            copies = [(gradient.slot.narrow(0, at, part.numel()), part) for at, part in parts]
            gradient.copies.append(self._link.pull(copies, gradient.free, ready))
        gradient.parts.clear()
