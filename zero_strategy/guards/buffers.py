"""Buffers as they were before a step, such as the running statistics of a BatchNorm.

A forward changes them before it is known whether its step will be taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn


@final
class KeptBuffers:
    """Copies of a module's buffers.

    Args:
        root: the module; its buffers are whole on every rank.

    Cost: the buffers' bytes a second time, and a copy of them per optimizer step, on the device.
        All are copied: that a BatchNorm writes to its own shows in no version counter.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._kept: dict[tuple[nn.Module, str], tuple[Tensor, Tensor]] = {}

    def _there(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        for owner in self._root.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                yield (owner, name), buffer

    @torch.no_grad()
    def keep(self) -> None:
        """Take the buffers as they are for those to come back to."""
        for place, buffer in self._there():
            tensor, copy = self._kept.get(place, (None, buffer))
            if tensor is not buffer:
                copy = torch.empty_like(buffer)
                self._kept[place] = (buffer, copy)
            copy.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers back the values that were kept, also where others took their place."""
        for place, buffer in list(self._there()):
            if place in self._kept:
                tensor, copy = self._kept[place]
                tensor.copy_(copy)
                if tensor is not buffer:
                    setattr(*place, tensor)
