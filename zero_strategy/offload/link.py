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

    def wait(self) -> None:
        """Block this thread until they are done."""
        ...

    def gate(self) -> None:
        """Let what is queued from now on at the accelerator start after them."""
        ...


class Link(Protocol):
    """Moves data between host memory and one device."""

    def pull(self, copies: Copies) -> Copied:
        """Copy to the host what the work queued until now leaves in the sources."""
        ...

    def push(self, copies: Copies) -> Copied:
        """Copy to the device; the targets must not be in use there."""
        ...


@final
class HostLink:
    """For a model in host memory: a copy is done when it returns."""

    def pull(self, copies: Copies) -> Copied:
        """Copy now."""
        for target, source in copies:
            target.copy_(source)
        return DONE

    push = pull


@final
class CudaLink:
    """For a GPU: a stream in each direction, so that both run at once and under compute.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def pull(self, copies: Copies) -> Copied:
        """Queue copies behind what the current stream has queued."""
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._down)
            return _Event(self._down)

    def push(self, copies: Copies) -> Copied:
        """Queue copies behind the earlier ones of this direction."""
        with torch.cuda.stream(self._up):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            return _Event(self._up)


@final
class _Event:
    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def gate(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


@final
class _Done:
    def wait(self) -> None:
        pass

    def gate(self) -> None:
        pass


DONE: Copied = _Done()


def link_for(device: torch.device) -> Link:
    """Return the link to a device."""
    return CudaLink(device) if device.type == "cuda" else HostLink()
