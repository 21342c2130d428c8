"""Numbers on their way from the device to the host, looked at once they have arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

Label = TypeVar("Label")


class Ending(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Whether it is reached, without waiting."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


@final
@dataclass(frozen=True, slots=True)
class _Copy(Generic[Label]):
    label: Label
    host: Tensor
    end: Ending


@final
class Reached(Ending):
    """Of what needed no copy."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


@final
class Arrivals(Generic[Label]):
    """Small tensors that are copied to the host in the background, in order."""

    def __init__(self) -> None:
        self._copies: deque[_Copy[Label]] = deque()

    def send(self, values: Tensor, label: Label) -> bool:
        """Start the copy of some values.

        Args:
            values: any shape, on any device; must not be written to afterwards.
            label: comes back with them.

        Returns: whether they needed no copy.
        Cost: no host sync.
        """
        host, end = start_copy(values)
        self._copies.append(_Copy(label, host, end))
        return isinstance(end, Reached)

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[Label, list[float]]]:
        """Give what has arrived, once each, the oldest first.

        Args:
            wait: block until all that was sent is there.
        """
        while self._copies and (wait or self._copies[0].end.query()):
            copy = self._copies.popleft()
            if wait:
                copy.end.synchronize()
            # Read as memory: a tensor operation would count as a read of the accelerator.
            yield copy.label, [float(value) for value in copy.host.numpy().flat]

    def forget(self) -> None:
        """Drop what is on its way."""
        self._copies.clear()


def start_copy(values: Tensor) -> tuple[Tensor, Ending]:
    """Copy values to the host in the background; those of the CPU are there."""
    if values.device.type == "cpu":
        return values, Reached()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    end = torch.Event(device=values.device)
    end.record()
    return host, end
