"""The state machine of a chunk: its gradient arrives, weights are previewed, the step is committed.

Clipping needs the norm of all gradients, which is known only when the last one has arrived. A
chunk need not wait: at arrival its weights are *previewed* with scale 1 and sent, while master
weights and moments stay at the step before. When the norm asks for another scale, only the preview
is repeated. The step is *committed* with the scale that was decided: by the pass over the chunk's
next gradient, or before it where a lane has nothing else to do. Nothing is ever undone, and a step
whose norm is not finite is dropped before anything was written.

    filling -- last piece of the gradient --> arriving -- pass --> pending -- commit --> free
                                                                   |     ^
                                                                   +-----+ another scale

Gradients come in hooks of the backward, on any thread; each lane has a worker that runs its passes.
What chunks and steps hold changes under the engine's lock alone, or before a worker has seen it.

Source: the speculation of SuperOffload (arXiv:2509.21271) without its undo, and the delayed update
of ZeRO-Offload (arXiv:2101.06840) without its staleness.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from zero_strategy.offload.chunk import (
    Agenda,
    Chunk,
    Gradient,
    Hyper,
    Pass,
    Step,
    segments_of,
    targets_of,
)
from zero_strategy.offload.figures import EngineFigures, Meter
from zero_strategy.offload.host import SlotPool
from zero_strategy.offload.lanes import Ended, Lane, Stepped
from zero_strategy.offload.link import DONE, Copied, Link, Several
from zero_strategy.offload.slots import Slots
from zero_strategy.offload.tiers import TieredState
from zero_strategy.offload.ways import Way


@final
class OffloadEngine:
    """Steps parameters whose optimizer state lies in host memory, or stays on the device.

    Args:
        state: weights and moments; of the parameters on the host, in chunks in forward order.
        weights: parameter -> flat view of this rank's shard on the device, (n,), bf16.
        lanes: run the passes, each on a thread of its own.
        link: moves gradients to the host.
        grad_dtype: of gradients on their way and until they are committed.
        spare_slots: gradients that the host has room for while every chunk holds one that is
            pending.
        max_held: gradients that may wait on the device for such room.
        pinned: register the gradients' memory with CUDA.

    What fails in the worker is raised by the next call from outside.
    """

    def __init__(
        self,
        *,
        state: TieredState,
        weights: Mapping[str, Tensor],
        lanes: Sequence[Lane],
        link: Link,
        grad_dtype: torch.dtype,
        spare_slots: int,
        max_held: int,
        pinned: bool,
    ) -> None:
        layout = state.host.layout
        self.state = state
        self.way = Way("deferred", True)
        """How steps are taken; may be set between any two of them."""
        self.steps = dict.fromkeys(state.names, 0)
        """Parameter -> optimizer steps it has taken."""
        self.num_redone = 0
        """Previews that were repeated with another scale."""
        self._meter = Meter()
        self._lanes = tuple(lanes)
        self._agenda = Agenda()
        self._link = link
        self._grad_dtype = grad_dtype
        num_slots = len(layout.chunks) + max(1, spare_slots)
        pool = SlotPool(num_slots, layout.slot_length, grad_dtype, pinned=pinned)
        self._slots = Slots(pool, link, max_held=max_held)
        self._chunks = [
            Chunk(c, index, state.host.chunk(c), targets_of(c, weights), index in state.host.pinned)
            for index, c in enumerate(layout.chunks)
        ]
        self._of_unit: dict[str, list[Chunk]] = defaultdict(list)
        self._of_parameter: dict[str, list[Chunk]] = defaultdict(list)
        for chunk in self._chunks:
            self._of_unit[chunk.layout.unit].append(chunk)
            for piece in chunk.layout.pieces:
                self._of_parameter[piece.name].append(chunk)
        self._current: Step | None = None
        self._sums: dict[str, Tensor] = {}
        self._received: set[str] = set()
        self.squares: dict[str, Tensor] = {}
        """Parameter -> square of its gradient's norm, 0-dim, fp64, of the step in progress."""
        self._changed = threading.Condition()
        self._flushing = False
        self._closed = True
        self._workers: list[threading.Thread] = []
        self._failure: BaseException | None = None

    @property
    def can_help(self) -> bool:
        """Whether there are lanes that leave chunks to others."""
        return any(lane.leaves for lane in self._lanes)

    def _ensure_workers(self) -> None:
        """Start a thread per lane, unless they run."""
        if self._closed:
            self._closed = False
            self._workers = [
                threading.Thread(target=self._work, args=(lane,), name="offload-lane", daemon=True)
                for lane in self._lanes
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

        Cost: no host sync; waits for the lanes where too many gradients wait for room on the host.
        """
        if self._current is None:
            self._ensure_workers()
            self._current = Step(hyper())
        if self._current.hyper[name] is None:
            return
        if not last or name in self._sums:
            earlier = self._sums.get(name)
            self._sums[name] = grad.float() if earlier is None else earlier.add_(grad)
        if last:
            self._deliver(self._current, name, self._sums.pop(name, grad))

    def _deliver(self, step: Step, name: str, grad: Tensor) -> None:
        """Send a parameter's whole gradient of a step on its way."""
        if name in self._received:
            raise RuntimeError(
                f"{name}: a second backward in one optimizer step: must be one per micro-batch "
                "under offload, where gradients leave at once. Add the losses before the "
                "backward, or train without offload."
            )
        self._received.add(name)
        # Rounded on the device, so that the norm is of what is applied.
        grad = grad.to(self._grad_dtype)
        self.squares[name] = torch._foreach_norm([grad], 2, dtype=torch.float64)[0].square()
        if name in self.state.resident:
            self.state.resident.hold(name, grad)
        for chunk in self._of_parameter[name]:
            self._fill(chunk, step, name, grad)

    def _fill(self, chunk: Chunk, step: Step, name: str, grad: Tensor) -> None:
        if chunk.filling is None:
            chunk.filling = Gradient(step)
            self._place(chunk, chunk.filling)
        gradient = chunk.filling
        pieces = [p for p in chunk.layout.pieces if p.name == name]
        parts = [(p.offset, grad.narrow(0, p.start, p.length)) for p in pieces]
        ready = self._link.mark()
        with self._changed:
            self._slots.add(gradient, parts, ready)
        gradient.names.add(name)
        if len(gradient.names) == len(chunk.targets):
            self._arrive(chunk)

    def _place(self, chunk: Chunk, gradient: Gradient) -> None:
        with self._changed:
            if not self._slots.has_room:
                # Chunks that wait for more of their gradient hold two slots. With their earlier
                # steps committed, one slot per chunk is enough.
                with self._meter.slot_wait():
                    self._changed.wait_for(lambda: self._slots.has_room or self._failure)
            self._raise_failure()
            self._slots.place(chunk, gradient)

    def _arrive(self, chunk: Chunk) -> None:
        gradient, chunk.filling = chunk.filling, None
        assert gradient is not None, "something has arrived"
        gradient.segments = segments_of(chunk.layout, gradient)
        with self._changed:
            chunk.arriving = gradient
            self._meter.arrived(chunk, gradient, self._grad_dtype.itemsize)
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
        if not self.squares:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([*self.squares.values()]).sum()

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
        self.squares = {}
        if step is None:
            return
        if scale is None:
            self.state.resident.release()
        else:
            self.state.resident.step(hyper, scale)
        with self._changed:
            changed = hyper != step.hyper
            step.hyper, step.scale, step.sealed = hyper, scale, True
            for chunk in self._chunks:
                gradient = chunk.arriving or chunk.pending
                if gradient is not None and gradient.step is step:
                    if changed:
                        gradient.segments = segments_of(chunk.layout, gradient)
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
                lambda: self._failure or all(c.is_sent or c.is_undecided for c in chunks)
            )
            self._raise_failure()
            if any(c.is_undecided for c in chunks):
                raise RuntimeError(
                    f"{unit or 'the module'}: a forward between the last backward and the "
                    "optimizer step: must come after the step, also one that is skipped. Step the "
                    "optimizer after each backward, or train without offload."
                )
        for chunk in chunks:
            chunk.wired.gate()

    def fetch_all(self) -> None:
        """As `fetch`, for every unit."""
        for unit in self._of_unit:
            self.fetch(unit)

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
            ended = self._lanes[0].run(chunk.state, None, None, targets, chunk.stored)
            self._meter.passed(self._lanes[0], Pass(chunk, send=True), ended)
            chunk.wired, chunk.stored = ended.sent, ended.stored
        for chunk in self._chunks:
            chunk.wired.wait()
            chunk.stored.wait()

    def reset(self) -> None:
        """Begin anew with the weights as they are: no moments, no steps taken."""
        self.flush()
        if any(self.steps.values()):
            self.state.clear_moments()
        self.steps = dict.fromkeys(self.steps, 0)

    def withdraw(self) -> dict[str, Tensor]:
        """Return the gradients of the step that is not decided, and forget it.

        Only in mode "staged", in which nothing was computed from them.

        Returns: parameter -> (n,), on the tier where they arrived.
        """
        self._complete()
        parts: dict[str, list[Tensor]] = defaultdict(list)
        with self._changed:
            for chunk in self._chunks:
                gradient = chunk.arriving
                if gradient is None:
                    continue
                arrived = gradient.stepped(1.0)
                arrived.wait()
                for piece in chunk.layout.pieces:
                    if piece.name in gradient.names:
                        part = arrived.grad.narrow(0, piece.offset, piece.length)
                        parts[piece.name].append(part.clone())
        grads = self.state.resident.release() | {n: torch.cat(p) for n, p in parts.items()}
        self.seal(None, self._current.hyper if self._current else {})
        return grads

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
        self._agenda.clear()

    def take_figures(self) -> EngineFigures:
        """Return what was done since the last call. No host sync, and no wait for a pass."""
        with self._changed:
            host = self.state.host
            return self._meter.take(host.parameter_bytes * sum(host.layout.sizes.values()))

    # The worker.

    def _queue(self, chunk: Chunk) -> None:
        """Note a chunk where the worker looks next. Under the lock."""
        arriving, pending = chunk.arriving, chunk.pending
        if chunk.busy:
            return  # queued again when its pass is over
        if chunk.waits_for_slot:
            if chunk.is_idle:
                self._agenda.leave(chunk)
        elif arriving is not None and not arriving.step.sealed:
            if self.way.mode == "deferred" or pending is not None:
                self._agenda.arriving.append(chunk)
        elif not chunk.is_sent and not chunk.is_undecided:
            self._agenda.hurry(chunk)
        elif pending is not None and pending.step.sealed:
            self._agenda.leave(chunk)

    def _next(self, lane: Lane) -> Pass | None:
        """Choose a pass. Under the lock."""
        if lane.leaves and not self.way.helps:
            return None
        # A commit ahead of its time is worth a core, but not the link that weights are sent on.
        spares = not lane.leaves or self._flushing
        while (chunk := self._agenda.pop(lane, idle=spares)) is not None:
            if not chunk.busy and (chosen := self._choose(chunk)):
                self._meter.chose(chunk, self._agenda)
                return chosen
        return None

    def _choose(self, chunk: Chunk) -> Pass | None:
        arriving, pending = chunk.arriving, chunk.pending
        if arriving is not None and arriving.step.dropped:
            self._give_back(arriving, DONE)
            self._changed.notify_all()
            arriving = chunk.arriving = None
        if chunk.waits_for_slot:
            if pending is None or not pending.step.sealed:
                return None
            dropped = pending.step.scale is None
            return Pass(chunk, send=True) if dropped else Pass(chunk, commit=pending)
        if arriving is not None:
            scale = arriving.step.scale
            if scale is None and (self.way.mode != "deferred" or not chunk.is_arrived):
                return Pass(chunk, commit=pending) if pending is not None else None
            if self.way.mode == "staged" and pending is not None:
                return Pass(chunk, commit=pending)
            if self.way.mode == "staged":
                return Pass(chunk, commit=arriving, send=True)
            speculative = 1.0 if scale is None else scale
            return Pass(chunk, commit=pending, preview=arriving, scale=speculative)
        if pending is None or not pending.step.sealed:
            return None
        if pending.step.scale is None:
            return Pass(chunk, send=True)
        if pending.is_final:
            return Pass(chunk, commit=pending)
        if self.way.mode == "staged":
            return Pass(chunk, commit=pending, send=True)
        return Pass(chunk, preview=pending, scale=pending.step.scale)

    def _await_pass(self, lane: Lane) -> tuple[Pass, Stepped | None, Stepped | None] | None:
        """Return a pass with what it commits and previews; None where the engine is closed."""
        while True:
            lane.await_room()
            with self._changed:
                while (chosen := None if self._closed else self._next(lane)) is None:
                    if self._closed:
                        return None
                    if awaited := self._agenda.awaited():
                        break
                    self._changed.wait()
                else:
                    chosen.chunk.busy = True
                    # As it is now: the step may be decided while the pass runs.
                    commit = chosen.commit and chosen.commit.decided()
                    preview = chosen.preview and chosen.preview.stepped(chosen.scale)
                    return chosen, commit, preview
            Several(awaited).wait()

    def _work(self, lane: Lane) -> None:
        try:
            while (found := self._await_pass(lane)) is not None:
                chosen, commit, preview = found
                if commit is not None:
                    self.state.host.keep(chosen.chunk.index)
                ended = lane.run(
                    chosen.chunk.state,
                    commit,
                    preview,
                    chosen.targets,
                    chosen.chunk.stored,
                )
                with self._changed:
                    self._meter.passed(lane, chosen, ended)
                    self._finish(chosen, preview, ended)
                    self._changed.notify_all()
        except BaseException as failure:  # noqa: BLE001 - raised where the training thread looks
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _finish(self, chosen: Pass, previewed: Stepped | None, ended: Ended) -> None:
        chunk, commit, preview = chosen.chunk, chosen.commit, chosen.preview
        chunk.busy = False
        chunk.stored = ended.stored
        if preview is not None or chosen.send:
            chunk.wired = ended.sent
        if commit is not None:
            self._give_back(commit, ended.stored)
            if commit is chunk.pending:
                chunk.pending = None
            else:
                chunk.arriving = None
        elif chosen.send:  # the previewed step was dropped
            assert chunk.pending is not None, "its weights were sent"
            self._give_back(chunk.pending, ended.stored)
            chunk.pending = None
        if preview is not None and previewed is not None:
            preview.sent = (previewed.scale, previewed.segments)
            if preview is chunk.arriving:
                chunk.arriving, chunk.pending = None, preview
            else:
                self.num_redone += 1
        self._queue(chunk)

    def _give_back(self, gradient: Gradient, read: Copied) -> None:
        """Let a gradient go, and the next one have its slot. Under the lock."""
        next_one = self._slots.give_back(gradient, read)
        if next_one is not None:
            self._queue(next_one)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the offload worker failed: {self._failure}") from self._failure
