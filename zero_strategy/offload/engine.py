"""The state machine of a chunk: its gradient arrives, weights are previewed, the step is committed.

Clipping needs the norm of all gradients, which is known only when the last one has arrived. A
chunk need not wait: at arrival its weights are *previewed* with scale 1 and sent, while master
weights and moments stay at the step before. When the norm asks for another scale, only the preview
is repeated. The step is *committed* by the pass over the chunk's next gradient, with the scale that
was decided. Nothing is ever undone, and a step whose norm is not finite is dropped before anything
was written.

    filling -- last piece of the gradient --> arriving -- pass --> pending -- commit --> free
                                                                   |     ^
                                                                   +-----+ another scale

Gradients come in hooks of the backward, on any thread; each lane has a worker that runs its passes.
What chunks and steps hold changes under the engine's lock alone, or before a worker has seen it.

Source: the speculation of SuperOffload (arXiv:2509.21271) without its undo, and the delayed update
of ZeRO-Offload (arXiv:2101.06840) without its staleness.
"""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from zero_strategy.kernels.adam import AdamState, AdamStep
from zero_strategy.offload.host import HostState, SlotPool
from zero_strategy.offload.lanes import Ended, Lane, Segment, Stepped, Target
from zero_strategy.offload.layout import ChunkLayout, Layout
from zero_strategy.offload.link import DONE, Copied, Link, Several

Mode = Literal["deferred", "late", "staged"]
"""How a gradient is met whose step's norm is not yet known; all three leave the same bits.

deferred: preview with scale 1 at arrival, and commit the step before in the same pass.
late: commit the step before, and preview once the norm is known: for steps that are clipped.
staged: as late, but step in one pass once the norm is known."""

Hyper = Mapping[str, "AdamStep | None"]
"""Parameter -> hyperparameters of its next step; None where no optimizer steps it."""


@dataclass(slots=True, eq=False)
class _Step:
    """One optimizer step, as its chunks share it."""

    hyper: Hyper
    scale: float | None = None
    sealed: bool = False
    """The scale is decided; None drops the step."""

    @property
    def dropped(self) -> bool:
        return self.sealed and self.scale is None


@dataclass(slots=True, eq=False)
class _Gradient:
    """A chunk's gradient of one step, in host memory."""

    step: _Step
    slot: Tensor
    free: Copied
    """The end of what read the slot before."""
    names: set[str] = field(default_factory=set)
    copies: list[Copied] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()
    sent: tuple[float, Sequence[Segment]] | None = None
    """What its last preview was computed with."""

    def stepped(self, scale: float) -> Stepped:
        return Stepped(self.slot, self.segments, scale, self.copies)

    def decided(self) -> Stepped:
        assert self.step.scale is not None, "committed once it is decided"
        return self.stepped(self.step.scale)

    @property
    def is_final(self) -> bool:
        """Whether the accelerator has, or is being sent, what was decided."""
        return self.step.sealed and self.sent == (self.step.scale, self.segments)


@dataclass(slots=True, eq=False)
class _Chunk:
    layout: ChunkLayout
    index: int
    state: AdamState
    targets: tuple[tuple[str, Target], ...]
    lane: _LaneQueue
    filling: _Gradient | None = None
    arriving: _Gradient | None = None
    pending: _Gradient | None = None
    wired: Copied = DONE
    """The last weights that were sent."""
    stored: Copied = DONE
    """The last pass's end in host memory."""
    busy: bool = False

    @property
    def is_sent(self) -> bool:
        return self.arriving is None and (self.pending is None or self.pending.is_final)


@dataclass(slots=True, eq=False)
class _LaneQueue:
    """A lane, and the chunks that it is to look at."""

    lane: Lane
    urgent: list[tuple[int, _Chunk]] = field(default_factory=list)
    """Those whose weights a forward waits for, by its order."""
    arrived: deque[_Chunk] = field(default_factory=deque)
    idle: deque[_Chunk] = field(default_factory=deque)
    """Those with a step to commit."""

    def __bool__(self) -> bool:
        return bool(self.urgent or self.arrived or self.idle)

    def pop(self) -> _Chunk:
        """Return the most urgent chunk."""
        if self.urgent:
            return heapq.heappop(self.urgent)[1]
        return (self.arrived or self.idle).popleft()


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What to do next with a chunk."""

    chunk: _Chunk
    commit: _Gradient | None = None
    preview: _Gradient | None = None
    scale: float = 1.0
    """Of the preview."""
    send: bool = False
    """Send the committed weights."""


@final
class OffloadEngine:
    """Steps parameters whose optimizer state lies in host memory.

    Args:
        layout: the chunks, in forward order.
        state: their weights and moments.
        weights: parameter -> flat view of this rank's shard on the device, (n,), bf16.
        lanes: run the passes, each on a thread of its own.
        lane_of: chunk's index -> index of its lane.
        link: moves gradients to the host.
        grad_dtype: of gradients on their way and until they are committed.
        spare_slots: gradients that can have arrived while every chunk holds one that is pending.
        pinned: register the gradients' memory with CUDA.

    What fails in the worker is raised by the next call from outside.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        state: HostState,
        weights: Mapping[str, Tensor],
        lanes: Sequence[Lane],
        lane_of: Sequence[int],
        link: Link,
        grad_dtype: torch.dtype,
        spare_slots: int,
        pinned: bool,
    ) -> None:
        self.layout = layout
        self.state = state
        self.mode: Mode = "deferred"
        self.steps = dict.fromkeys(layout.sizes, 0)
        """Parameter -> optimizer steps it has taken."""
        self.num_redone = 0
        """Previews that were repeated with another scale."""
        self._lanes = [_LaneQueue(lane) for lane in lanes]
        self._link = link
        self._grad_dtype = grad_dtype
        num_slots = len(layout.chunks) + max(1, spare_slots)
        self._slots = SlotPool(num_slots, layout.slot_length, grad_dtype, pinned=pinned)
        self._chunks = [
            _Chunk(c, index, state.chunk(c), _targets(c, weights), self._lanes[lane_of[index]])
            for index, c in enumerate(layout.chunks)
        ]
        self._of_unit: dict[str, list[_Chunk]] = defaultdict(list)
        self._of_parameter: dict[str, list[_Chunk]] = defaultdict(list)
        for chunk in self._chunks:
            self._of_unit[chunk.layout.unit].append(chunk)
            for piece in chunk.layout.pieces:
                self._of_parameter[piece.name].append(chunk)
        self._current: _Step | None = None
        self._sums: dict[str, Tensor] = {}
        self._received: set[str] = set()
        self._squares: list[Tensor] = []
        self._changed = threading.Condition()
        self._flushing = False
        self._starved = False
        self._closed = True
        self._workers: list[threading.Thread] = []
        self._failure: BaseException | None = None

    def _ensure_workers(self) -> None:
        """Start a thread per lane, unless they run."""
        if self._closed:
            self._closed = False
            self._workers = [
                threading.Thread(target=self._work, args=(queue,), name="offload-lane", daemon=True)
                for queue in self._lanes
            ]
            for worker in self._workers:
                worker.start()

    # Backward.

    def receive(self, name: str, grad: Tensor, hyper: Callable[[], Hyper], *, last: bool) -> None:
        """Take one parameter's gradient of one micro-batch.

        Args:
            name: the parameter.
            grad: (n,), bf16 or fp32, on the device. Kept by the engine: do not write to it.
            hyper: gives the hyperparameters of the step; called once per step.
            last: no other micro-batch of this step follows.

        Cost: no host sync; waits for the lane when all spare slots are taken.
        """
        if self._current is None:
            self._ensure_workers()
            self._current = _Step(hyper())
        if self._current.hyper[name] is None:
            return
        if not last or name in self._sums:
            earlier = self._sums.get(name)
            self._sums[name] = grad.float() if earlier is None else earlier.add_(grad)
        if last:
            self._deliver(self._current, name, self._sums.pop(name, grad))

    def _deliver(self, step: _Step, name: str, grad: Tensor) -> None:
        """Send a parameter's whole gradient of a step on its way."""
        assert name not in self._received, f"{name}: two gradients in one micro-batch"
        self._received.add(name)
        # Rounded on the device, so that the norm is of what is applied.
        grad = grad.to(self._grad_dtype)
        self._squares.append(torch._foreach_norm([grad], 2, dtype=torch.float64)[0].square())
        for chunk in self._of_parameter[name]:
            self._fill(chunk, step, name, grad)

    def _fill(self, chunk: _Chunk, step: _Step, name: str, grad: Tensor) -> None:
        if chunk.filling is None:
            chunk.filling = _Gradient(step, *self._take_slot())
        gradient = chunk.filling
        gradient.copies.append(
            self._link.pull(
                [
                    (gradient.slot.narrow(0, p.offset, p.length), grad.narrow(0, p.start, p.length))
                    for p in chunk.layout.pieces
                    if p.name == name
                ],
                gradient.free,
            )
        )
        gradient.names.add(name)
        if len(gradient.names) == len(chunk.targets):
            self._arrive(chunk)

    def _take_slot(self) -> tuple[Tensor, Copied]:
        with self._changed:
            if not self._slots.num_free:
                # Chunks that wait for more of their gradient hold two slots. With their earlier
                # steps committed, one slot per chunk is enough.
                self._starved = True
                for chunk in self._chunks:
                    if chunk.filling is not None:
                        self._queue(chunk)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._slots.num_free or self._failure)
                self._starved = False
            self._raise_failure()
            return self._slots.take()

    def _arrive(self, chunk: _Chunk) -> None:
        gradient, chunk.filling = chunk.filling, None
        assert gradient is not None, "something has arrived"
        gradient.segments = _segments(chunk.layout, gradient)
        with self._changed:
            chunk.arriving = gradient
            self._queue(chunk)
            self._changed.notify_all()

    # The step.

    def _complete(self) -> None:
        """After the last backward: parameters without a part in it have their gradient now."""
        if self._current is not None:
            for name in tuple(self._sums):
                self._deliver(self._current, name, self._sums.pop(name))
        for chunk in self._chunks:
            if chunk.filling is not None:
                self._arrive(chunk)

    def square(self) -> Tensor:
        """Return this rank's sum of squares of the step's gradients, 0-dim, fp64.

        Call after the last backward. No host sync.
        """
        self._complete()
        if not self._squares:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(self._squares).sum()

    def seal(self, scale: float | None, hyper: Hyper) -> None:
        """Decide on the step whose gradients have arrived.

        Args:
            scale: the gradients' factor, such as the clip coefficient; None drops the step, and
                weights, moments and step counts stay as they were.
            hyper: as it is now; where it differs from what was previewed, that is repeated.
        """
        self._raise_failure()
        if scale is None:
            self._sums.clear()
        self._complete()
        step, self._current = self._current, None
        received, self._received = self._received, set()
        self._squares = []
        if step is None:
            return
        with self._changed:
            changed = hyper != step.hyper
            step.hyper, step.scale, step.sealed = hyper, scale, True
            for chunk in self._chunks:
                gradient = chunk.arriving or chunk.pending
                if gradient is not None and gradient.step is step:
                    if changed:
                        gradient.segments = _segments(chunk.layout, gradient)
                    self._queue(chunk)
            self._changed.notify_all()
        if scale is not None:
            for name in received:
                self.steps[name] += 1

    # What is read.

    def fetch(self, unit: str) -> None:
        """Make what is queued on the device from now on see a unit's weights of the last step.

        Blocks until the lane has sent them.

        Raises:
            RuntimeError: gradients have arrived whose step was not decided.
        """
        chunks = self._of_unit[unit]
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or all(c.is_sent or _undecided(c) for c in chunks)
            )
            self._raise_failure()
            if any(_undecided(c) for c in chunks):
                raise RuntimeError(
                    f"{unit}: a forward between the last backward and the optimizer step: must "
                    "come after the step. Step the optimizer first."
                )
        for chunk in chunks:
            chunk.wired.gate()

    def flush(self) -> None:
        """Commit every step, so that `state` holds the weights the device has.

        Raises:
            RuntimeError: gradients have arrived whose step was not decided.
        """
        if self._received:
            raise RuntimeError(
                "offload: flushed between the last backward and the optimizer step: must come "
                "after the step, whose gradients would be lost."
            )
        with self._changed:
            self._flushing = True
            for chunk in self._chunks:
                self._queue(chunk)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self._failure
                    or not any(c.busy or c.arriving or c.pending for c in self._chunks)
                )
            )
            self._flushing = False
            self._raise_failure()
        for chunk in self._chunks:
            chunk.wired.wait()
            chunk.stored.wait()

    def send(self) -> None:
        """Give the device the weights of `state`, after they were written to. Flush first."""
        for chunk in self._chunks:
            assert chunk.pending is None, "flushed before the state is written to"
            targets = tuple(t for _, t in chunk.targets)
            lane = chunk.lane.lane
            chunk.wired, chunk.stored = lane.run(chunk.state, None, None, targets, chunk.stored)
        for chunk in self._chunks:
            chunk.wired.wait()
            chunk.stored.wait()

    def reset(self) -> None:
        """Begin anew with the weights as they are: no moments, no steps taken."""
        self.flush()
        self.state.clear_moments()
        self.steps = dict.fromkeys(self.layout.sizes, 0)

    def close(self) -> None:
        """Commit every step and end the workers, which the next gradient starts again."""
        if self._failure is None:
            self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()
        self._workers.clear()

    # The worker.

    def _queue(self, chunk: _Chunk) -> None:
        """Note a chunk where the worker looks next. Under the lock."""
        arriving, pending = chunk.arriving, chunk.pending
        if chunk.busy:
            return  # queued again when its pass is over
        if arriving is not None and not arriving.step.sealed:
            if self.mode == "deferred" or pending is not None:
                chunk.lane.arrived.append(chunk)
        elif not chunk.is_sent and not _undecided(chunk):
            heapq.heappush(chunk.lane.urgent, (chunk.index, chunk))
        elif pending is not None and pending.step.sealed and self._commits_early(chunk):
            chunk.lane.idle.append(chunk)

    def _commits_early(self, chunk: _Chunk) -> bool:
        """Whether a decided step is committed without waiting for the chunk's next gradient."""
        starved = self._starved and chunk.filling is not None
        return self._flushing or self.mode != "deferred" or starved

    def _next(self, queue: _LaneQueue) -> _Pass | None:
        """Choose a pass. Under the lock."""
        while queue:
            chunk = queue.pop()
            if not chunk.busy and (chosen := self._choose(chunk)):
                return chosen
        return None

    def _choose(self, chunk: _Chunk) -> _Pass | None:
        arriving, pending = chunk.arriving, chunk.pending
        if arriving is not None and arriving.step.dropped:
            self._slots.give(arriving.slot, Several(arriving.copies))
            self._changed.notify_all()
            arriving = chunk.arriving = None
        if arriving is not None:
            scale = arriving.step.scale
            if scale is None and self.mode != "deferred":
                return _Pass(chunk, commit=pending) if pending is not None else None
            if self.mode == "staged":
                if pending is not None:
                    return _Pass(chunk, commit=pending)
                return _Pass(chunk, commit=arriving, send=True)
            speculative = 1.0 if scale is None else scale
            return _Pass(chunk, commit=pending, preview=arriving, scale=speculative)
        if pending is None or not pending.step.sealed:
            return None
        if pending.step.scale is None:
            return _Pass(chunk, send=True)
        if not pending.is_final:
            return _Pass(chunk, preview=pending, scale=pending.step.scale)
        return _Pass(chunk, commit=pending) if self._commits_early(chunk) else None

    def _work(self, queue: _LaneQueue) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: queue or self._closed)
                    if self._closed:
                        return
                    chosen = self._next(queue)
                    if chosen is None:
                        continue
                    chosen.chunk.busy = True
                    # As it is now: the step may be decided while the pass runs.
                    commit = chosen.commit and chosen.commit.decided()
                    preview = chosen.preview and chosen.preview.stepped(chosen.scale)
                ended = queue.lane.run(
                    chosen.chunk.state,
                    commit,
                    preview,
                    _sent_targets(chosen),
                    chosen.chunk.stored,
                )
                with self._changed:
                    self._finish(chosen, preview, ended)
                    self._changed.notify_all()
        except BaseException as failure:  # noqa: BLE001 - raised where the training thread looks
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _finish(self, chosen: _Pass, previewed: Stepped | None, ended: Ended) -> None:
        chunk, commit, preview = chosen.chunk, chosen.commit, chosen.preview
        chunk.busy = False
        chunk.stored = ended.stored
        if preview is not None or chosen.send:
            chunk.wired = ended.sent
        if commit is not None:
            self._slots.give(commit.slot, ended.stored)
            if commit is chunk.pending:
                chunk.pending = None
            else:
                chunk.arriving = None
        elif chosen.send:  # the previewed step was dropped
            assert chunk.pending is not None, "its weights were sent"
            self._slots.give(chunk.pending.slot, ended.stored)
            chunk.pending = None
        if preview is not None and previewed is not None:
            preview.sent = (previewed.scale, previewed.segments)
            if preview is chunk.arriving:
                chunk.arriving, chunk.pending = None, preview
            else:
                self.num_redone += 1
        self._queue(chunk)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the offload worker failed: {self._failure}") from self._failure


def _targets(chunk: ChunkLayout, weights: Mapping[str, Tensor]) -> tuple[tuple[str, Target], ...]:
    return tuple(
        (p.name, Target(weights[p.name].narrow(0, p.start, p.length), p.offset))
        for p in chunk.pieces
    )


def _sent_targets(chosen: _Pass) -> tuple[Target, ...]:
    """Where a pass sends weights: a preview holds only those of parameters with a gradient."""
    targets = chosen.chunk.targets
    if chosen.preview is not None:
        return tuple(t for name, t in targets if name in chosen.preview.names)
    return tuple(t for _, t in targets) if chosen.send else ()


def _segments(layout: ChunkLayout, gradient: _Gradient) -> tuple[Segment, ...]:
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


def _undecided(chunk: _Chunk) -> bool:
    gradient = chunk.arriving or chunk.pending
    return gradient is not None and not gradient.step.sealed
