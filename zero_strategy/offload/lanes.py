"""Where passes run. A lane never changes the result: all share one arithmetic, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from zero_strategy.kernels import adam
from zero_strategy.kernels.adam import AdamState, AdamStep, Pending
from zero_strategy.offload.host import buffers
from zero_strategy.offload.link import DONE, Copied, CudaLink, Event, Link


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


class Ended(NamedTuple):
    """When a pass is over."""

    sent: Copied
    """The accelerator has the weights."""
    stored: Copied
    """The host has what was committed, and the gradients are no longer read."""
    up_bytes: int = 0
    """What it copies to the accelerator."""
    down_bytes: int = 0
    """What it copies to the host."""


class Holder(Protocol):
    """A chunk, as a lane looks at it."""

    is_pinned: bool


class Lane(Protocol):
    """Runs passes over chunks, one after the other."""

    name: str
    """What its passes are counted under."""
    leaves: int
    """Takes a chunk only where more than so many wait, so that it helps but does not compete."""

    def takes(self, chunk: Holder) -> bool:
        """Whether it can run passes over a chunk."""
        ...

    def await_room(self) -> None:
        """Block until a pass can begin, so that it is chosen by what is most urgent then."""
        ...

    def run(
        self,
        state: AdamState,
        commit: Stepped | None,
        preview: Stepped | None,
        targets: Sequence[Target],
        after: Copied,
    ) -> Ended:
        """Commit a step, then send what the targets become: by the preview, or as committed.

        Args:
            state: of the chunk, in host memory.
            commit: the step to commit, if any.
            preview: the step whose weights are sent; without one, the committed weights are.
            targets: what is sent; may be empty.
            after: the end of the pass before over this chunk.
        """
        ...


@final
class CpuLane(Lane):
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
        self.name = "cpu"
        self.leaves = 0
        self._link = link
        self._threads = threads
        wires = buffers(num_wires, slot_length, torch.bfloat16, pinned=pinned)
        self._wires: list[tuple[Tensor, Copied]] = [(wire, DONE) for wire in wires]
        """By use; with the end of what was sent from each."""

    def takes(self, chunk: Holder) -> bool:
        """Every chunk."""
        return True

    def await_room(self) -> None:
        """Wait for a buffer whose weights were sent."""
        if not any(sent.is_done() for _, sent in self._wires):
            self._wires[0][1].wait()

    def run(
        self,
        state: AdamState,
        commit: Stepped | None,
        preview: Stepped | None,
        targets: Sequence[Target],
        after: Copied,
    ) -> Ended:
        """Run a pass; it is stored on return."""
        after.wait()
        for stepped in (commit, preview):
            if stepped is not None:
                stepped.wait()
        if not targets:
            if commit is not None:
                self._commit(state, commit)
            return Ended(DONE, DONE)
        wire = self._take_wire()
        if preview is not None:
            self._preview(state, commit, preview, wire)
        else:
            if commit is not None:
                self._commit(state, commit)
            wire[: state.length].copy_(state.upper)
        copies = [(t.weights, wire.narrow(0, t.offset, t.weights.numel())) for t in targets]
        sent = self._link.push(copies)
        self._wires.append((wire, sent))
        return Ended(sent, DONE, up_bytes=sum(target.nbytes for target, _ in copies))

    def _take_wire(self) -> Tensor:
        """Return the free buffer that was used last: it may still lie in the host's cache."""
        free = [index for index, (_, sent) in enumerate(self._wires) if sent.is_done()]
        wire, sent = self._wires.pop(free[-1] if free else 0)
        sent.wait()
        return wire

    def _commit(self, state: AdamState, commit: Stepped) -> None:
        commit_segments(state, commit, commit.grad, threads=self._threads)

    def _preview(
        self, state: AdamState, commit: Stepped | None, preview: Stepped, wire: Tensor
    ) -> None:
        grads = (commit.grad if commit else None, preview.grad)
        preview_segments(state, commit, preview, grads, wire, threads=self._threads)


@final
class StreamLane(Lane):
    """Runs passes on the GPU: a chunk's state goes there, is stepped, and comes back.

    Args:
        link: to the GPU. States go up in its stream, so that neither they nor the weights that
            another lane sends wait for more than what was queued before.
        slot_length: elements of the longest chunk.
        grad_dtype: of gradients.
        moments: dtype of the state's.
        num_slots: chunks that can be on the GPU at once.
        leaves: as in `Lane`.
    """

    def __init__(
        self,
        link: CudaLink,
        slot_length: int,
        *,
        grad_dtype: torch.dtype,
        moments: torch.dtype,
        num_slots: int,
        leaves: int,
    ) -> None:
        self.name = "stream"
        self.leaves = leaves
        device = link.device
        self._up = link.up
        self._pass, self._down = (torch.cuda.Stream(device) for _ in range(2))
        self._slots = deque(
            (_Slot.empty(device, slot_length, grad_dtype, moments), DONE) for _ in range(num_slots)
        )

    def takes(self, chunk: Holder) -> bool:
        """Those that the GPU can read."""
        return chunk.is_pinned

    def await_room(self) -> None:
        """Wait for a slot on the GPU."""
        self._slots[0][1].wait()

    def run(
        self,
        state: AdamState,
        commit: Stepped | None,
        preview: Stepped | None,
        targets: Sequence[Target],
        after: Copied,
    ) -> Ended:
        """Queue a pass; waits until a slot on the GPU is free."""
        slot, free = self._slots.popleft()
        free.wait()
        n = state.length
        here = slot.state.narrow(0, n)
        state_bytes = sum(part.nbytes for part in (here.upper, here.lower, here.m, here.v))
        up_bytes = state_bytes
        with torch.cuda.stream(self._up):
            after.gate()
            for stepped, grad in ((commit, slot.committed), (preview, slot.previewed)):
                if stepped is not None:
                    for copied in stepped.copies:
                        copied.gate()
                    grad[:n].copy_(stepped.grad[:n], non_blocking=True)
                    up_bytes += grad[:n].nbytes
            _copy_state(here, state)
            arrived = Event(self._up)
        with torch.cuda.stream(self._pass):
            arrived.gate()
            weights = here.upper
            if preview is not None:
                grads = (slot.committed[:n], slot.previewed[:n])
                preview_segments(here, commit, preview, grads, slot.wire)
                weights = slot.wire
            elif commit is not None:
                commit_segments(here, commit, slot.committed[:n])
            for target in targets:
                part = weights.narrow(0, target.offset, target.weights.numel())
                target.weights.copy_(part)
            passed = Event(self._pass)
        if commit is None:
            self._slots.append((slot, passed))
            return Ended(passed, passed, up_bytes)
        with torch.cuda.stream(self._down):
            passed.gate()
            _copy_state(state, here)
            stored = Event(self._down)
        self._slots.append((slot, stored))
        return Ended(passed, stored, up_bytes, state_bytes)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Memory on the GPU for one chunk."""

    state: AdamState
    committed: Tensor
    previewed: Tensor
    wire: Tensor

    @classmethod
    def empty(
        cls, device: torch.device, length: int, grad_dtype: torch.dtype, moments: torch.dtype
    ) -> _Slot:
        def of(dtype: torch.dtype) -> Tensor:
            return torch.empty(length, dtype=dtype, device=device)

        state = AdamState(
            upper=of(torch.bfloat16),
            lower=of(torch.int16),
            m=of(moments),
            v=of(moments),
        )
        return cls(state, of(grad_dtype), of(grad_dtype), of(torch.bfloat16))


def _copy_state(target: AdamState, source: AdamState) -> None:
    target.upper.copy_(source.upper, non_blocking=True)
    target.lower.copy_(source.lower, non_blocking=True)
    target.m.copy_(source.m, non_blocking=True)
    target.v.copy_(source.v, non_blocking=True)


def commit_segments(
    state: AdamState, commit: Stepped, grad: Tensor, *, threads: int | None = None
) -> None:
    """Commit a step where state and gradient lie."""
    for offset, length, step in commit.segments:
        part = state.narrow(offset, length)
        adam.step(part, grad.narrow(0, offset, length), step, commit.scale, threads=threads)


def preview_segments(
    state: AdamState,
    commit: Stepped | None,
    preview: Stepped,
    grads: tuple[Tensor | None, Tensor],
    wire: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Commit a step, if any, and preview one into `wire`; in one pass where both step alike."""
    before, current = grads
    together = commit is not None and _same_runs(commit.segments, preview.segments)
    if commit is not None and before is not None and not together:
        commit_segments(state, commit, before, threads=threads)
    for index, (offset, length, step) in enumerate(preview.segments):
        part, grad = state.narrow(offset, length), current.narrow(0, offset, length)
        out = wire.narrow(0, offset, length)
        if commit is not None and before is not None and together:
            earlier = before.narrow(0, offset, length)
            pending = Pending(earlier, commit.segments[index].adam, commit.scale)
            adam.commit_and_preview(part, pending, grad, step, preview.scale, out, threads=threads)
        else:
            adam.preview(part, grad, step, preview.scale, out, threads=threads)


def _same_runs(left: Sequence[Segment], right: Sequence[Segment]) -> bool:
    return [s[:2] for s in left] == [s[:2] for s in right]
