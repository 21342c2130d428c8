"""Agreement between ranks about events that only one of them may see.

A signal may reach one rank only, and a non-finite gradient norm becomes visible to the host at
a moment that differs per rank. Acting on either alone would leave the others waiting in a
collective. Each micro-batch posts one small all-reduce on a CPU process group and reads the one
posted a micro-batch earlier, which has long completed: the accelerator is never touched and the
host does not wait, yet all ranks act at the same micro-batch.
"""

import sys
import time
from collections.abc import Callable
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

JOIN_S = 60.0
"""How long a rank that failed waits for the others to fail too."""


class Event(IntEnum):
    """Index of an event in the message the ranks exchange."""

    STOP_REQUESTED = 0
    NON_FINITE = 1
    LOSS_SPIKE = 2
    REQUEUE = 3
    SAVE_FAILED = 4


class NonFiniteGradientError(ValueError):
    """The global gradient norm was inf or NaN."""


_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def control_group() -> dist.ProcessGroup | None:
    """A gloo group over all ranks for messages between hosts; None for a single process.

    Every rank must make the first call together. The group lives as long as the default one.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    default = dist.distributed_c10d._get_default_group()
    if default not in _groups:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        _groups[default] = group
    return _groups[default]


def gather_alike(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the tensor that each rank gave, in rank order; all of one shape and dtype.

    Args:
        own: this rank's.
        group: a control group; None takes the default group.

    Cost: collective; the tensors lie on the CPU.
    """
    everybodys = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, own, group=group)
    return everybodys


def all_join(group: dist.ProcessGroup, *, within_s: float) -> bool:
    """Whether every rank calls this within so many seconds."""
    work = dist.barrier(group=group, async_op=True)
    assert work is not None, "an asynchronous barrier returns its work"
    deadline = time.monotonic() + within_s
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    return work.is_completed()


def join_after_exception(group: dist.ProcessGroup | None) -> None:
    """Join the other ranks before a collective of code that handles an exception.

    Callbacks save on an exception, which takes all ranks; one that failed alone must not wait for
    them until the time limit of the run. Does nothing while no exception is handled.

    Raises: RuntimeError: the other ranks have not failed with this one.
    """
    if sys.exc_info()[0] is None or group is None:
        return
    if not all_join(group, within_s=JOIN_S):
        raise RuntimeError(
            f"nothing is saved after the exception: the other ranks did not join within "
            f"{JOIN_S:.0f} s, so they did not fail with this one. Resume from the last "
            "checkpoint."
        )


class ControlPoll:
    """Posts this rank's events and learns, one micro-batch later, of everybody's.

    Args:
        group: the control group, or None for a single process.
        handlers: what to do once an event is agreed on; called on every rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, handlers: dict[Event, Callable[[], None]]
    ) -> None:
        self._group = group
        self._handlers = handlers
        self._seen = [0] * len(Event)
        self._posted: tuple[dist.Work, Tensor] | None = None

    def report(self, event: Event) -> None:
        """Note an event on this rank; safe to call from a signal handler."""
        self._seen[event] = 1

    def withdraw(self, event: Event) -> None:
        """Forget an event that every rank has acted on."""
        self._seen[event] = 0

    def poll(self) -> None:
        """Act on what was agreed and post the next message. Call on every rank, in step."""
        if self._group is None:
            self._act(self._seen)
            return
        if self._posted is not None:
            work, message = self._posted
            work.wait()
            self._posted = None
            self._act(message.tolist())
        message = torch.tensor(self._seen, dtype=torch.int32)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "an asynchronous all-reduce returns its work"
        self._posted = (work, message)

    def finish(self) -> None:
        """Act on what any rank has seen until now. Call on every rank after the last poll."""
        self.poll()
        if self._posted is not None:
            work, message = self._posted
            work.wait()
            self._posted = None
            self._act(message.tolist())

    def _act(self, message: list[int]) -> None:
        for event in Event:
            if message[event]:
                self._handlers[event]()
