"""Copies between host and accelerator, in order on their own streams, with what waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

Copies = Sequence[tuple[Tensor, Tensor]]
"""(target, source), 1-dim and of one length each."""


class Copied(Protocol):
    """The end of some copies."""

    def is_done(self) -> bool:
        """Whether they are done, without waiting."""
        ...

    def wait(self) -> None:
        """Block this thread until they are done."""
        ...

    def gate(self) -> None:
        """Let what is queued from now on at the accelerator start after them."""
        ...


class Link(Protocol):
    """Moves data between host memory and one device."""

    def mark(self) -> Copied:
        """Return the end of the work that this thread has queued on the device until now."""
        ...

    def pull(self, copies: Copies, after: Copied, ready: Copied) -> Copied:
        """Copy to the host.

        Args:
            copies: what to copy.
            after: what must have ended before the targets are written to.
            ready: a mark, at which the sources hold what is to be copied.
        """
        ...

    def push(self, copies: Copies) -> Copied:
        """Copy to the device; the targets must not be in use there."""
        ...


@final
class HostLink:
    """For a model in host memory: a copy is done when it returns."""

    def mark(self) -> Copied:
        """What is computed here is there."""
        return DONE

    def pull(self, copies: Copies, after: Copied, ready: Copied) -> Copied:
        """Copy now."""
        after.wait()
        return self.push(copies)

    def push(self, copies: Copies) -> Copied:
        """Copy now."""
        for target, source in copies:
            target.copy_(source)
        return DONE


@final
class CudaLink:
    """For a GPU: a stream in each direction, so that both run at once and under compute.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up = torch.cuda.Stream(device)
        """The stream of copies to the GPU."""
        self._down = torch.cuda.Stream(device)

    def mark(self) -> Copied:
        """Return the end of what the current stream has queued."""
        return Event(torch.cuda.current_stream(self.device))

    def pull(self, copies: Copies, after: Copied, ready: Copied) -> Copied:
        """Queue copies behind the earlier ones of this direction."""
        with torch.cuda.stream(self._down):
            ready.gate()
            after.gate()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._down)
            return Event(self._down)

    def push(self, copies: Copies) -> Copied:
        """Queue copies behind the earlier ones of this direction."""
        with torch.cuda.stream(self.up):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            return Event(self.up)


@final
class Event(Copied):
    """The end of what a CUDA stream has queued until now."""

    def __init__(self, stream: Any) -> None:
        # Who waits for it sleeps: a core that spins is one less for the passes.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def is_done(self) -> bool:
        """Whether it is reached."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block until it is reached."""
        self._event.synchronize()

    def gate(self) -> None:
        """Let what the current stream queues from now on start after it."""
        torch.cuda.current_stream().wait_event(self._event)


@final
class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def gate(self) -> None:
        pass


DONE: Copied = _Done()


@final
class Several(Copied):
    """The end of several."""

    def __init__(self, copied: Sequence[Copied]) -> None:
        self._copied = tuple(copied)

    def is_done(self) -> bool:
        """Whether all are done."""
        return all(copied.is_done() for copied in self._copied)

    def wait(self) -> None:
        """Block until all are done."""
        for copied in self._copied:
            copied.wait()

    def gate(self) -> None:
        """Let what is queued from now on start after all."""
        for copied in self._copied:
            copied.gate()


def link_for(device: torch.device) -> Link:
    """Return the link to a device."""
    return CudaLink(device) if device.type == "cuda" else HostLink()
