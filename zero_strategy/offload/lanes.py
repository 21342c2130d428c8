"""Where passes run. A lane never changes the result: all share one arithmetic, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from zero_strategy.kernels import adam
from zero_strategy.kernels.adam import AdamState, AdamStep, Pending
from zero_strategy.offload.host import buffers
from zero_strategy.offload.link import DONE, Copied, Link


class Segment(NamedTuple):
    """A run of a chunk's elements that is stepped alike."""

    offset: int
    length: int
    adam: AdamStep


class Target(NamedTuple):
    """Weights on the accelerator, 1-dim, and where they begin in their chunk."""

    weights: Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A chunk's gradient and how it is applied.

    Attributes:
        grad: in host memory, as long as the longest chunk.
        segments: what of it is used.
        scale: factor of the gradient.
        copies: until their end, `grad` is not there; emptied by who waited.
    """

    grad: Tensor
    segments: Sequence[Segment]
    scale: float
    copies: list[Copied]

    def wait(self) -> None:
        """Block until the gradient is there."""
        for copied in self.copies:
            copied.wait()
        self.copies.clear()


@final
class CpuLane:
    """Runs passes on the cores of the host.

    Args:
        link: carries weights to the accelerator.
        slot_length: elements of the longest chunk.
        num_wires: weights that can be on their way at once, in chunks.
        threads: of a pass; None for one per core.
        pinned: register the weights' buffers with CUDA.
    """

    def __init__(
        self, link: Link, slot_length: int, *, num_wires: int, threads: int | None, pinned: bool
    ) -> None:
        self._link = link
        self._threads = threads
        wires = buffers(num_wires, slot_length, torch.bfloat16, pinned=pinned)
        self._wires = deque((wire, DONE) for wire in wires)

    def run(
        self,
        state: AdamState,
        commit: Stepped | None,
        preview: Stepped | None,
        targets: Sequence[Target],
    ) -> Copied:
        """Commit a step, then send what the targets become: by the preview, or as committed.

        Args:
            state: of the chunk.
            commit: the step to commit, if any.
            preview: the step whose weights are sent; without one, the committed weights are.
            targets: what is sent; may be empty.

        Returns:
            The end of the sending.
        """
        for stepped in (commit, preview):
            if stepped is not None:
                stepped.wait()
        if not targets:
            if commit is not None:
                self._commit(state, commit)
            return DONE
        wire, sent = self._wires.popleft()
        sent.wait()
        if preview is not None:
            self._preview(state, commit, preview, wire)
        else:
            if commit is not None:
                self._commit(state, commit)
            wire[: state.length].copy_(state.upper)
        copies = [(t.weights, wire.narrow(0, t.offset, t.weights.numel())) for t in targets]
        sent = self._link.push(copies)
        self._wires.append((wire, sent))
        return sent

    def _commit(self, state: AdamState, commit: Stepped) -> None:
        for offset, length, step in commit.segments:
            part, grad = state.narrow(offset, length), commit.grad.narrow(0, offset, length)
            adam.step(part, grad, step, commit.scale, threads=self._threads)

    def _preview(
        self, state: AdamState, commit: Stepped | None, preview: Stepped, wire: Tensor
    ) -> None:
        together = commit is not None and _same_runs(commit.segments, preview.segments)
        if commit is not None and not together:
            self._commit(state, commit)
        for index, (offset, length, step) in enumerate(preview.segments):
            part, grad = state.narrow(offset, length), preview.grad.narrow(0, offset, length)
            out = wire.narrow(0, offset, length)
            if commit is not None and together:
                before = commit.grad.narrow(0, offset, length)
                pending = Pending(before, commit.segments[index].adam, commit.scale)
                adam.commit_and_preview(
                    part, pending, grad, step, preview.scale, out, threads=self._threads
                )
            else:
                adam.preview(part, grad, step, preview.scale, out, threads=self._threads)


def _same_runs(left: Sequence[Segment], right: Sequence[Segment]) -> bool:
    return [s[:2] for s in left] == [s[:2] for s in right]
