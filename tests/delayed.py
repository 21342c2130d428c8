"""A link and a lane whose copies and passes end late, each queue in its order, as on a GPU."""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from zero_strategy.kernels.adam import AdamState
from zero_strategy.offload.lanes import (
    Ended,
    Holder,
    Lane,
    Stepped,
    Target,
    commit_segments,
    preview_segments,
)
from zero_strategy.offload.link import DONE, Copied, Copies, Link


class Ticket(Copied):
    """The end of a piece of work."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        assert self._done.wait(30), "work that never ends"

    # What the test computes with is the host's, so it has to be there.
    gate = wait

    def set(self) -> None:
        self._done.set()


class Stream:
    """Does its work in order, on a thread, after random delays."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._work: queue.Queue[tuple[Callable[[], None], Ticket]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work: Callable[[], None]) -> Ticket:
        ticket = Ticket()
        self._work.put((work, ticket))
        return ticket

    def _run(self) -> None:
        while True:
            work, ticket = self._work.get()
            time.sleep(self._draw.choice((0, 0, 0, 1e-4, 1e-3)))
            work()
            ticket.set()


class DelayedLink(Link):
    """Copies of each direction end in their order, some time later."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.up = Stream(self.draw)
        self._down = Stream(self.draw)

    def mark(self) -> Copied:
        return DONE

    def pull(self, copies: Copies, after: Copied, ready: Copied) -> Copied:
        def work() -> None:
            after.wait()
            _copy(copies)

        return self._down.submit(work)

    def push(self, copies: Copies) -> Copied:
        return self.up.submit(lambda: _copy(copies))


def _copy(copies: Copies) -> None:
    for target, source in copies:
        target.copy_(source)


class DelayedLane(Lane):
    """Steps copies of the state, as `StreamLane` does on a GPU, stream by stream."""

    def __init__(self, link: DelayedLink, num_slots: int, *, leaves: int) -> None:
        self.name = "stream"
        self.leaves = leaves
        self._link = link
        self._pass, self._down = Stream(link.draw), Stream(link.draw)
        self._free: list[Copied] = [DONE] * num_slots

    def takes(self, chunk: Holder) -> bool:
        return True

    def run(
        self,
        state: AdamState,
        commit: Stepped | None,
        preview: Stepped | None,
        targets: Sequence[Target],
        after: Copied,
    ) -> Ended:
        self._free.pop(0).wait()
        here: dict[str, torch.Tensor] = {}
        # The copies may be let go by others once this call is over.
        waits = [c for s in (commit, preview) if s is not None for c in s.copies]

        def load() -> None:
            after.wait()
            for copied in waits:
                copied.wait()
            for name, stepped in (("commit", commit), ("preview", preview)):
                if stepped is not None:
                    here[name] = stepped.grad[: state.length].clone()
            for name in ("upper", "lower", "m", "v"):
                here[name] = getattr(state, name).clone()

        def step() -> None:
            loaded.wait()
            own = AdamState(**{n: here[n] for n in ("upper", "lower", "m", "v")})
            weights = own.upper
            if preview is not None:
                weights = torch.empty_like(own.upper)
                grads = (here.get("commit"), here["preview"])
                preview_segments(own, commit, preview, grads, weights, threads=1)
            elif commit is not None:
                commit_segments(own, commit, here["commit"], threads=1)
            for target in targets:
                target.weights.copy_(weights.narrow(0, target.offset, target.weights.numel()))

        def store() -> None:
            passed.wait()
            for name in ("upper", "lower", "m", "v"):
                getattr(state, name).copy_(here[name])

        loaded = self._link.up.submit(load)
        passed = self._pass.submit(step)
        stored = passed if commit is None else self._down.submit(store)
        self._free.append(stored)
        return Ended(passed, stored)
