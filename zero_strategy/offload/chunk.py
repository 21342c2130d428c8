"""What the engine knows of a chunk, of its gradients, and of the steps they belong to."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor

from zero_strategy.kernels.adam import AdamState, AdamStep
from zero_strategy.offload.lanes import Lane, Segment, Stepped, Target
from zero_strategy.offload.layout import ChunkLayout
from zero_strategy.offload.link import DONE, Copied

Hyper = Mapping[str, "AdamStep | None"]
"""Parameter -> hyperparameters of its next step; None where no optimizer steps it."""


@dataclass(slots=True, eq=False)
class Step:
    """One optimizer step, as its chunks share it."""

    hyper: Hyper
    scale: float | None = None
    sealed: bool = False
    """The scale is decided; None drops the step."""

    @property
    def dropped(self) -> bool:
        """Whether nothing of it is to be written."""
        return self.sealed and self.scale is None


@dataclass(slots=True, eq=False)
class Gradient:
    """A chunk's gradient of one step, in host memory or on its way there."""

    step: Step
    slot: Tensor | None = None
    """Its place in host memory; None while it waits for one on the device."""
    free: Copied = DONE
    """The end of what read the slot before."""
    names: set[str] = field(default_factory=set)
    parts: list[tuple[Sequence[tuple[int, Tensor]], Copied]] = field(default_factory=list)
    """What has no copy under way yet: where it belongs in the slot, values, when they are ready."""
    copies: list[Copied] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()
    sent: tuple[float, Sequence[Segment]] | None = None
    """What its last preview was computed with."""

    def stepped(self, scale: float) -> Stepped:
        """Return it for a pass, with a scale."""
        assert self.slot is not None, "passes wait for a slot"
        return Stepped(self.slot, self.segments, scale, self.copies)

    def decided(self) -> Stepped:
        """Return it for a commit, with the scale that was decided."""
        assert self.step.scale is not None, "committed once it is decided"
        return self.stepped(self.step.scale)

    @property
    def is_there(self) -> bool:
        """Whether the host has all of it."""
        return self.slot is not None and all(copied.is_done() for copied in self.copies)

    @property
    def is_final(self) -> bool:
        """Whether the accelerator has, or is being sent, what was decided."""
        return self.step.sealed and self.sent == (self.step.scale, self.segments)


@dataclass(slots=True, eq=False)
class Chunk:
    """A run of a unit's elements, with the gradients it holds and what runs on it."""

    layout: ChunkLayout
    index: int
    state: AdamState
    targets: tuple[tuple[str, Target], ...]
    is_pinned: bool
    """The GPU can read and write its state where it lies."""
    filling: Gradient | None = None
    """Of which some parameters have arrived."""
    arriving: Gradient | None = None
    """Of which all have, and nothing was computed."""
    pending: Gradient | None = None
    """Whose preview was sent, and which is not committed."""
    wired: Copied = DONE
    """The last weights that were sent."""
    stored: Copied = DONE
    """The last pass's end in host memory."""
    busy: bool = False

    @property
    def is_arrived(self) -> bool:
        """Whether it waits for no copy of a gradient."""
        return self.arriving is None or self.arriving.is_there

    @property
    def waits_for_slot(self) -> bool:
        """Whether its whole gradient is on the device, where it waits for a place on the host."""
        return self.arriving is not None and self.arriving.slot is None

    @property
    def is_sent(self) -> bool:
        """Whether the accelerator has, or is being sent, the weights of the last step."""
        return self.arriving is None and (self.pending is None or self.pending.is_final)

    @property
    def is_urgent(self) -> bool:
        """Whether its step is decided and the accelerator lacks its weights."""
        return not self.is_sent and not self.is_undecided and not self.waits_for_slot

    @property
    def is_early(self) -> bool:
        """Whether its gradient is there before the step is decided."""
        return self.arriving is not None and not self.arriving.step.sealed and self.is_arrived

    @property
    def is_idle(self) -> bool:
        """Whether nothing can be done but to end a step that was decided."""
        if self.pending is None or not self.pending.step.sealed:
            return False
        if self.waits_for_slot:
            return True
        return self.pending.is_final and (self.arriving is None or not self.is_arrived)

    @property
    def is_undecided(self) -> bool:
        """Whether it holds a gradient whose step is not decided."""
        gradient = self.arriving or self.pending
        return gradient is not None and not gradient.step.sealed


@dataclass(slots=True, eq=False)
class Agenda:
    """The chunks that the lanes are to look at; each takes what is most urgent when it is free.

    The host runs ahead of the device, so a chunk is noted long before its gradient is there. Among
    those that are, the first in forward order goes first: it came last and is needed first.
    """

    urgent: list[tuple[int, Chunk]] = field(default_factory=list)
    """Those whose weights a forward waits for, by its order."""
    arriving: deque[Chunk] = field(default_factory=deque)
    """Those whose gradients are on their way, as they will come."""
    arrived: list[tuple[int, Chunk]] = field(default_factory=list)
    """Those whose gradients are there, in forward order."""
    idle: list[tuple[int, Chunk]] = field(default_factory=list)
    """Those with a step to commit, in forward order: their next gradients come last, when there is
    least time for both."""

    def hurry(self, chunk: Chunk) -> None:
        """Note a chunk among the urgent ones."""
        heapq.heappush(self.urgent, (chunk.index, chunk))

    def leave(self, chunk: Chunk) -> None:
        """Note a chunk among those that can wait."""
        heapq.heappush(self.idle, (chunk.index, chunk))

    def pop(self, lane: Lane, *, idle: bool) -> Chunk | None:
        """Return the most urgent chunk that nothing has to be waited for.

        A chunk is noted anew at every change, so what it was noted for before is passed over.

        Args:
            lane: that runs the pass.
            idle: whether it takes those that can wait.

        Returns: None where there is none, or all are to be left to the other lanes.
        """
        while self.arriving and self.arriving[0].is_arrived:
            chunk = self.arriving.popleft()
            heapq.heappush(self.arrived, (chunk.index, chunk))
        heaps: list[_Noted] = [(self.urgent, _is_urgent), (self.arrived, _is_early)]
        if idle:
            heaps.append((self.idle, _is_idle))
        if lane.leaves and not _hold_more_than(lane.leaves, heaps):
            return None
        for noted in heaps:
            if (chunk := _pop_first(noted, lane)) is not None:
                return chunk
        return None

    def awaited(self) -> tuple[Copied, ...]:
        """Return the copies of the gradient that will be there first; none if none is on its way.

        A lane waits for them without a chunk in its hands: on the accelerator's streams what waits
        would hold up all that was queued after it.
        """
        for chunk in self.arriving:
            if chunk.arriving is not None and chunk.arriving.copies:
                return tuple(chunk.arriving.copies)
        return ()

    def clear(self) -> None:
        """Forget what was noted, where nothing is left to do."""
        for noted in (self.urgent, self.arriving, self.arrived, self.idle):
            noted.clear()


_Noted = tuple[list[tuple[int, Chunk]], Callable[[Chunk], bool]]
"""Chunks by their index, and whether one still is what it was noted for."""
_is_urgent, _is_early, _is_idle = map(attrgetter, ("is_urgent", "is_early", "is_idle"))


def _hold_more_than(count: int, heaps: Iterable[_Noted]) -> bool:
    """Whether so many chunks could be taken at once."""
    seen: set[int] = set()
    for heap, holds in heaps:
        for index, chunk in heap:
            if holds(chunk):
                seen.add(index)
            if len(seen) > count:
                return True
    return False


def _pop_first(noted: _Noted, lane: Lane) -> Chunk | None:
    """Pop the first chunk that a lane takes."""
    heap, holds = noted
    left: list[tuple[int, Chunk]] = []
    found = None
    while heap and found is None:
        entry = heapq.heappop(heap)
        if not holds(entry[1]):
            continue
        if lane.takes(entry[1]):
            found = entry[1]
        else:
            left.append(entry)
    for entry in left:
        heapq.heappush(heap, entry)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What to do next with a chunk."""

    chunk: Chunk
    commit: Gradient | None = None
    preview: Gradient | None = None
    scale: float = 1.0
    """Of the preview."""
    send: bool = False
    """Send the committed weights."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Where weights go: a preview holds only those of parameters with a gradient."""
        targets = self.chunk.targets
        if self.preview is not None:
            return tuple(t for name, t in targets if name in self.preview.names)
        return tuple(t for _, t in targets) if self.send else ()


def targets_of(chunk: ChunkLayout, weights: Mapping[str, Tensor]) -> tuple[tuple[str, Target], ...]:
    """Return each piece's parameter and where its weights lie on the accelerator."""
    return tuple(
        (p.name, Target(weights[p.name].narrow(0, p.start, p.length), p.offset))
        for p in chunk.pieces
    )


def segments_of(layout: ChunkLayout, gradient: Gradient) -> tuple[Segment, ...]:
    """Return the runs of a chunk that are stepped alike."""
    merged: list[Segment] = []
    for piece in layout.pieces:
        adam = gradient.step.hyper[piece.name]
        if piece.name not in gradient.names or adam is None:
            continue
        last = merged[-1] if merged else None
        if last and last.adam == adam and last.offset + last.length == piece.offset:
            merged[-1] = Segment(last.offset, last.length + piece.length, adam)
        else:
            merged.append(Segment(piece.offset, piece.length, adam))
    return tuple(merged)
