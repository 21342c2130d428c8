"""How far this process has come, for the watcher that tells a stuck rank from those that wait.

A process is at one place at a time, so there is one object for all: whoever works on something sets
an attribute of it, which costs nothing, and the watcher reads them from its own thread.
"""

from __future__ import annotations

from typing import final


@final
class Progress:
    """Counts that move while a process gets on.

    Attributes:
        phase: what it does, in words.
        batch: micro-batches begun.
        marks: phases entered since the last micro-batch began.
        made: parts of a phase that are done, such as blocks of a file.
        unit: index of the unit entered last; -1 before the first of a micro-batch.
    """

    __slots__ = ("batch", "made", "marks", "phase", "unit")

    def __init__(self) -> None:
        self.phase = "set-up"
        self.batch = self.marks = self.made = 0
        self.unit = -1

    def begin_batch(self) -> None:
        """Note that a micro-batch of training begins."""
        self.batch += 1
        self.marks = 0
        self.unit = -1
        self.phase = "training step"

    def mark(self, phase: str) -> None:
        """Note that a phase begins."""
        self.marks += 1
        self.phase = phase

    @property
    def place(self) -> tuple[int, int, int]:
        """Where this process is; comparable between ranks that run the same code."""
        return self.batch, self.marks, self.unit


PROGRESS = Progress()
"""Of this process."""
