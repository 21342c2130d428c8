"""The state of one step, read while later steps are committed.

A chunk that is about to be written to is copied first, if it was not read yet: so much of the state
lies twice as is stepped before it is read, and never more than a budget. Beyond it the writer waits
for the reader. What has been read as often as was announced is let go.

Source: copy-on-write as of fork(2), by hand, since large pages and CUDA do not survive a fork.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import final

from zero_strategy.kernels.adam import AdamState


@final
class Snapshot:
    """Chunks as they are now.

    Args:
        chunk: gives a chunk's state where it lies, by index.
        reads: chunk -> how often it is going to be read; the others are not kept.
        budget_bytes: of copies at one time; a chunk that is larger is copied alone.
    """

    def __init__(
        self, chunk: Callable[[int], AdamState], reads: Mapping[int, int], budget_bytes: int
    ) -> None:
        self._chunk = chunk
        self._reads = Counter(reads)
        self._room_bytes = self._budget_bytes = budget_bytes
        self._copies: dict[int, AdamState] = {}
        self._readers: Counter[int] = Counter()
        self._changed = threading.Condition()

    def keep(self, index: int) -> None:
        """Have a chunk's state apart before it is written to, by one thread at a time.

        Cost: nothing once it was read or copied; else a copy, after waiting for room.
        """
        with self._changed:
            if not self._reads[index] or index in self._copies:
                return
            num_bytes = _bytes_of(self._chunk(index))
            self._changed.wait_for(
                lambda: (
                    not self._reads[index]
                    or num_bytes <= self._room_bytes
                    or self._room_bytes == self._budget_bytes
                )
            )
            if not self._reads[index]:
                return
            self._room_bytes -= num_bytes
        # Readers of the chunk itself do not mind; that of the copy is not there yet.
        copy = _copy_of(self._chunk(index))
        with self._changed:
            if self._reads[index]:
                self._copies[index] = copy
            else:
                self._room_bytes += num_bytes
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers[index])

    @contextmanager
    def reading(self, index: int) -> Generator[AdamState, None, None]:
        """Give a chunk's state as it was.

        Raises: RuntimeError: it was read as often as announced, and may have changed since.
        """
        with self._changed:
            if not self._reads[index]:
                raise RuntimeError(f"chunk {index}: read more often than was announced.")
            copy = self._copies.get(index)
            self._readers[index] += copy is None
        try:
            yield self._chunk(index) if copy is None else copy
        finally:
            with self._changed:
                self._readers[index] -= copy is None
                self._reads[index] -= 1
                if not self._reads[index] and (dropped := self._copies.pop(index, None)):
                    self._room_bytes += _bytes_of(dropped)
                self._changed.notify_all()

    def end(self) -> None:
        """Keep nothing more."""
        with self._changed:
            self._reads.clear()
            self._copies.clear()
            self._room_bytes = self._budget_bytes
            self._changed.notify_all()


def _bytes_of(state: AdamState) -> int:
    return sum(part.nbytes for part in (state.upper, state.lower, state.m, state.v))


def _copy_of(state: AdamState) -> AdamState:
    return AdamState(
        upper=state.upper.clone(),
        lower=state.lower.clone(),
        m=state.m.clone(),
        v=state.v.clone(),
    )
