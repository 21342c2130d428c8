"""Ends a run that hangs, on all ranks, with the name and the stack of the rank that it hangs on.

Each rank has a thread that looks at `PROGRESS` and sends a beat to the run's store. A rank that has
made no progress for too long reads everybody's beats, and `judge` tells those that wait from the
one that they wait for. Its verdict, with the stack that the stuck rank sent of itself, ends every
rank. The same thread ends a rank that would wait for one that failed or died.

The thread does not outlive the run, does not keep the process alive, and is not there in a forked
child. It cannot run while C code of the process never lets Python run; other ranks then miss its
beats and name the rank without a stack.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from zero_strategy.control import gather_alike
from zero_strategy.guards import stacks
from zero_strategy.guards.progress import PROGRESS
from zero_strategy.guards.verdict import Beat, judge

HUNG_EXIT_CODE = 86
"""Of every rank of a run that hung, or that was left by another rank."""
ENDING = "end of the run"
"""The phase in which ranks may end at different times."""

GRACE_S = 3.0
"""How long a rank that makes no progress stays after another one failed or died: its own error may
be on its way, and says more."""
_FAREWELL_S = 3.0
"""How long a rank waits for the others to read a verdict, and a run's end for its watcher."""
_LONGEST_TICK_S = 1.0
_SHORTEST_TICK_S = 0.05

_runs = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Why all ranks end."""

    ranks: tuple[int, ...]
    """Those at fault."""
    text: str
    at_once: bool
    """Whether also ranks end that still make progress."""


@final
class Line:
    """What the ranks tell one another, through a connection of our own to the run's store.

    Args:
        store: a client that nobody else uses.
        rank: this process.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size

    def send(self, beat: Beat, stack: str) -> None:
        """Replace this rank's last beat, and its stack where there is one to tell."""
        self._store.set(f"beat/{self._rank}", beat.to_json())
        if stack:
            self._store.set(f"stack/{self._rank}", stack)

    def beats(self) -> dict[int, Beat]:
        """Return the last beat of every rank that has sent one."""
        ranks = [r for r in range(self._world_size) if self._store.check([f"beat/{r}"])]
        return {r: Beat.from_json(self._store.get(f"beat/{r}")) for r in ranks}

    def stack(self, rank: int) -> str:
        """Return the stack that a rank sent, or nothing."""
        key = f"stack/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tell all ranks; the first alarm stays."""
        self._store.compare_set("alarm", "", json.dumps(asdict(alarm)))

    def alarm(self) -> Alarm | None:
        """Return the alarm that some rank raised."""
        if not self._store.check(["alarm"]):
            return None
        fields = json.loads(self._store.get("alarm"))
        return Alarm(**fields | {"ranks": tuple(fields["ranks"])})

    def take_leave(self) -> None:
        """Wait until all ranks have read the alarm, so that none ends with an error about another.

        Rank 0, whose process may host the store, then waits until the others are done with it.
        """
        deadline = time.monotonic() + _FAREWELL_S
        self._wait_for("read", self._world_size, deadline)
        if self._rank:
            self._store.add("left", 1)
        else:
            self._wait_for("left", self._world_size, deadline)

    def _wait_for(self, key: str, count: int, deadline: float) -> None:
        here = self._store.add(key, 1)
        while here < count and time.monotonic() < deadline:
            time.sleep(_SHORTEST_TICK_S)
            here = self._store.add(key, 0)


@final
class HangWatch:
    """Watches over this rank, from `start` to `stop`.

    Args:
        timeout_s: how long a rank may make no progress.
        step: returns the optimizer steps taken.
        units: qualified name -> unit, in the same order on every rank.
        rank: this process.
        line: to the other ranks; None for a single process.
        peers: process ids of the other ranks of this machine.

    Cost: none for the training thread beyond the attributes that it sets. The watcher sends some
    hundred bytes per second at most.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        step: Callable[[], int],
        units: Mapping[str, nn.Module],
        rank: int = 0,
        line: Line | None = None,
        peers: Mapping[int, int] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._tick_s = min(max(timeout_s / 20, _SHORTEST_TICK_S), _LONGEST_TICK_S)
        self._step, self._units, self._rank, self._line = step, tuple(units), rank, line
        self._peers = dict(peers or {})
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        # Before FSDP2's own hooks, in which a rank may wait.
        self._hooks = [
            unit.register_forward_pre_hook(_entering(index), prepend=True)
            for index, unit in enumerate(units.values())
        ]
        self._beats = 0
        self._seen: tuple[object, ...] = ()
        self._stalled_s = 0.0
        self._looked_at = time.monotonic()
        self._earlier: tuple[float, dict[int, int]] | None = None
        self._alarm: Alarm | None = None
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch; the other ranks learn that this one waits for nobody any more."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for hook in self._hooks:
            hook.remove()
        self._thread.join(_FAREWELL_S)
        if self._line is not None and not self._thread.is_alive():
            with suppress(RuntimeError):  # the process that hosts the store may have ended
                self._line.send(self._beat(ended=True), "")

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, lest they wait for it."""
        if self._line is None:
            return
        lines = str(error).splitlines() or [""]
        text = f"rank {self._rank} failed with {type(error).__name__}: {lines[0]}"
        with suppress(RuntimeError):
            self._line.raise_alarm(Alarm(ranks=(self._rank,), text=text, at_once=False))

    # On the watcher's thread.

    def _run(self) -> None:
        while not self._stopped.wait(self._tick_s):
            self._measure()
            self._alarm = self._alarm or self._look()
            if self._alarm is not None and not self._stopped.is_set() and self._ends_for():
                self._leave(self._alarm)

    def _measure(self) -> None:
        """Bring up to date how long this rank has made no progress.

        Only time in which the watcher itself ran counts: a process that was stopped, or a machine
        that slept, has not hung.
        """
        now = time.monotonic()
        elapsed_s = min(now - self._looked_at, max(2 * self._tick_s, 1.0))
        self._looked_at = now
        seen = (*PROGRESS.place, PROGRESS.made, PROGRESS.phase)
        self._stalled_s = self._stalled_s + elapsed_s if seen == self._seen else 0.0
        self._seen = seen

    def _look(self) -> Alarm | None:
        is_stalled = 2 * self._stalled_s >= self._timeout_s
        beat = self._beat()
        if self._line is None:
            return self._judged({self._rank: beat}, frozenset())
        try:
            self._line.send(beat, stacks.stack_text(self._main) if is_stalled else "")
            found = self._line.alarm() or self._dead_peer() or self._hung(is_stalled)
            if found is not None:
                self._line.raise_alarm(found)
                return self._line.alarm()
        except RuntimeError:
            text = "the process that hosts the run's store, usually rank 0, has ended"
            return Alarm(ranks=(), text=text, at_once=False)
        return None

    def _beat(self, *, ended: bool = False) -> Beat:
        self._beats += 1
        stalled = 4 * self._stalled_s >= self._timeout_s
        return Beat(
            rank=self._rank,
            beats=self._beats,
            stalled_s=self._stalled_s,
            place=PROGRESS.place,
            step=self._step(),
            phase=PROGRESS.phase,
            call=stacks.innermost_call(self._main) if stalled else "",
            waits=stalled and stacks.waits_for_ranks(self._main),
            ended=ended,
        )

    def _dead_peer(self) -> Alarm | None:
        for rank, pid in list(self._peers.items()):
            if _is_alive(pid):
                continue
            del self._peers[rank]
            assert self._line is not None, "peers are other ranks"
            last = self._line.beats().get(rank)
            if last is None or not last.ended:
                text = (
                    f"rank {rank}, process {pid}, ended without a word: it was killed, perhaps by "
                    "the system for want of memory"
                )
                return Alarm(ranks=(rank,), text=text, at_once=False)
        return None

    def _hung(self, is_stalled: bool) -> Alarm | None:
        if not is_stalled:
            self._earlier = None
            return None
        if self._earlier is not None and self._stalled_s < self._timeout_s:
            return None
        assert self._line is not None, "a single process judges itself"
        beats = self._line.beats()
        counts = {rank: beat.beats for rank, beat in beats.items()}
        at, before = self._earlier or (self._looked_at, {})
        silent = frozenset()
        if self._earlier is None or self._looked_at - at >= self._timeout_s / 2:
            silent = frozenset(r for r, n in counts.items() if before.get(r) == n)
            self._earlier = self._looked_at, counts
        return self._judged(beats, silent)

    def _judged(self, beats: Mapping[int, Beat], silent: frozenset[int]) -> Alarm | None:
        if self._stalled_s < self._timeout_s:
            return None
        verdict = judge(beats, silent, timeout_s=self._timeout_s, units=self._units)
        if verdict is None:
            return None
        own = {self._rank: stacks.stack_text(self._main)}
        others = {r: self._line.stack(r) if self._line else "" for r in verdict.ranks}
        told = [verdict.told]
        for rank, stack in {**others, **{r: s for r, s in own.items() if r in others}}.items():
            told.append(f"rank {rank} is here:\n{stack.rstrip()}" if stack else "")
        return Alarm(ranks=verdict.ranks, text="\n".join(filter(None, told)), at_once=True)

    def _ends_for(self) -> bool:
        """Whether the alarm ends this rank now."""
        assert self._alarm is not None, "there is an alarm"
        if self._alarm.at_once:
            return True
        if not self._alarm.ranks and PROGRESS.phase == ENDING:
            return False
        waited = self._stalled_s >= GRACE_S
        return waited and not stacks.handles_exception(self._main)

    def _leave(self, alarm: Alarm) -> None:
        ranks = ", ".join(map(str, alarm.ranks))
        if alarm.at_once:
            reason = (
                f"zero.guards.hang_timeout = {self._timeout_s:g} s: the run hangs on rank {ranks}."
            )
            advice = (
                "Resume from the last checkpoint. Call trainer.strategy.alive() in a phase of "
                "yours that takes longer, or allow more by GuardConfig(hang_timeout=...), None to "
                "debug."
            )
        else:
            reason = f"the run was left by {f'rank {ranks}' if ranks else 'its store'}."
            advice = "Resume from the last checkpoint."
        text = (
            f"{reason} Rank {self._rank} ends with exit code {HUNG_EXIT_CODE}.\n{alarm.text}\n"
            f"{advice}\n"
        )
        # Not through sys.stderr, whose lock the stuck thread may hold.
        os.write(2, text.encode())
        if self._line is not None and alarm.at_once:
            with suppress(RuntimeError):
                self._line.take_leave()
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        os._exit(HUNG_EXIT_CODE)


def watch_run(
    timeout_s: float,
    *,
    step: Callable[[], int],
    units: Mapping[str, nn.Module],
    group: dist.ProcessGroup | None,
) -> HangWatch:
    """Start to watch over a run.

    Args:
        timeout_s: how long a rank may make no progress.
        step: returns the optimizer steps taken.
        units: qualified name -> unit, in the same order on every rank.
        group: the control group, or None for a single process.
    Cost: collective; one all-gather of 24 bytes per rank on the CPU.
    """
    if group is None:
        watch = HangWatch(timeout_s, step=step, units=units)
    else:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        own = torch.tensor([next(_runs), os.getpid(), _process_space()])
        every = gather_alike(own, group)
        # Ranks of an earlier run may have failed before they came here: rank 0's count is taken.
        run = int(every[0][0])
        store = cast(Any, dist.distributed_c10d._get_default_store()).clone()
        line = Line(dist.PrefixStore(f"zero_strategy/watch/{run}", store), rank, world_size)
        peers = {r: int(e[1]) for r, e in enumerate(every) if r != rank and e[2] == own[2]}
        watch = HangWatch(timeout_s, step=step, units=units, rank=rank, line=line, peers=peers)
    watch.start()
    return watch


def _entering(index: int) -> Callable[..., None]:
    def enter(module: nn.Module, args: object) -> None:
        PROGRESS.unit = index

    return enter


def _process_space() -> int:
    """A number that processes share whose ids mean the same; of its own where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        space = f"{boot}{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        space = os.urandom(16).hex()
    return int.from_bytes(hashlib.sha256(space.encode()).digest()[:7])


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
