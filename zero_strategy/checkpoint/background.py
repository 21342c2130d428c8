"""Saves while the run goes on: one at a time, and never one that fails unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch.distributed as dist

from zero_strategy.checkpoint.staging import Ring, StagedSavePlanner, Staging, ring_bytes
from zero_strategy.checkpoint.storage import Save


@final
class BackgroundSaver:
    """Writes checkpoints on a thread of its own.

    Every rank calls its methods in the same order.

    Args:
        group: of all ranks, with host tensors, that nobody else uses; None for a single process.
        budget_bytes: of copies that wait to be written; more where a single shard is larger.
        pinned: copies come from a GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, budget_bytes: int, pinned: bool) -> None:
        self._group = group
        self._budget_bytes = budget_bytes
        self._pinned = pinned
        self._ring: Ring | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._is_busy = False
        self._lock = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether the last save failed on this rank, which no call has raised yet."""
        return self._failure is not None

    def start(self, save: Save, release: Callable[[], None]) -> None:
        """Copy what the run is about to change, and write it in the background.

        Args:
            save: what is written.
            release: ends what was held for it; called when it is over.
        Raises: what the save before failed with.
        Cost: waits for the save before; then the plan of all ranks, and the copies.
        """
        self.wait()
        size = ring_bytes(save.tensors, self._budget_bytes)
        if self._ring is None or self._ring.num_bytes < size:
            self._ring = None  # not beside the new one
            self._ring = Ring(size, pinned=self._pinned)
        staging = Staging(self._ring, save.tensors)
        planner = StagedSavePlanner(save.tensors, staging)

        def write() -> None:
            try:
                save.write(planner, self._group)
            except Exception as error:  # noqa: BLE001 - raised where the run looks
                self._failure = error
            finally:
                staging.end()
                release()
                self._run_afterwards()

        # Not a daemon: a run that ends with a save in flight waits for it.
        self._is_busy = True
        self._thread = threading.Thread(target=write, name="save")
        self._thread.start()
        staging.copy_all(planner.shard)

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run an action once the save in flight is complete; not at all where it fails."""
        with self._lock:
            if self._is_busy:
                self._afterwards.append(action)
                return
        if not self.has_failed:
            action()

    def _run_afterwards(self) -> None:
        while True:
            with self._lock:
                if not self._afterwards or self.has_failed:
                    self._afterwards.clear()
                    self._is_busy = False
                    return
                action = self._afterwards.pop(0)
            try:
                action()
            except Exception as error:  # noqa: BLE001 - raised where the run looks
                self._failure = error

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises: what it failed with, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
