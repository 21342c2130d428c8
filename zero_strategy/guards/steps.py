"""Follows the micro-batches of each optimizer step: their losses, and the buffers before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from zero_strategy.guards.buffers import KeptBuffers


@final
class StepWatch:
    """What is known of the step in progress.

    Args:
        buffers: brought back where a step is not taken; None leaves them as they are.
    """

    def __init__(self, buffers: KeptBuffers | None) -> None:
        self._buffers = buffers
        self._losses: list[Tensor] = []
        self._num_begun = 0
        self._all_taken = True

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """This rank's losses of the step's micro-batches, 0-dim, as the module returned them."""
        return tuple(self._losses)

    @property
    def in_progress(self) -> bool:
        """Whether the step has micro-batches already."""
        return self._num_begun > 0

    def begin_micro_batch(self) -> None:
        """Before a forward. No host sync."""
        if self._buffers and not self._num_begun:
            self._buffers.keep()
        self._num_begun += 1

    def saw(self, output: Any) -> None:
        """Take in what the module's `training_step` returned. No host sync."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))

    def stepped(self, *, taken: bool) -> None:
        """After an optimizer's step, of which a manual step may have several."""
        self._all_taken &= taken

    def end(self) -> tuple[Tensor, ...] | None:
        """End the step, and undo what its forwards did to buffers if a step was not taken.

        Returns: its losses, as `losses`; None where they are those of a step not taken.
        """
        losses = self.losses if self._all_taken else None
        if self._buffers and not self._all_taken:
            self._buffers.restore()
        self.forget()
        return losses

    def forget(self) -> None:
        """Begin a step anew."""
        self._losses.clear()
        self._num_begun = 0
        self._all_taken = True
