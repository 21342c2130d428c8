"""Saves that are killed at every call of the system they make, and at random times."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch._dynamo  # what a first sharded save imports, once for all forks
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_strategy.checkpoint import files, storage
from zero_strategy.checkpoint.background import BackgroundSaver
from zero_strategy.experiments.benchmarks.faults_versions import save, save_behind, version_of
from zero_strategy.experiments.benchmarks.forks import CALLS, die_at, run_ranks

EARLIER, THERE, NEXT = 1, 2, 3
"""Versions: a checkpoint of an earlier step, the one under the name that is saved to, the next."""
SITUATIONS = ("first", "later", "retry", "no exchange", "remove")
LONGEST_S = 0.08
"""Until a kill at a random time: some saves long."""
_STAGING_BYTES = 1 << 12
_DEAD_MOMENT = 17
"""Of the attempt that a retry finds: its tensors are half written."""


@final
@dataclass(slots=True)
class _Tally:
    kills: Counter[str] = field(default_factory=Counter)
    points: set[int] = field(default_factory=set)
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)


def kills(*, stride: int, num_random: int) -> dict[str, Any]:
    """Kill saves of one and of two ranks, in the foreground and in the background.

    Args:
        stride: take every n-th of the moments before and after a call; of two ranks, where a kill
            takes ten times as long, every (2 n + 1)-th.
        num_random: kills at random times, for each number of ranks and each way to save.

    Returns:
        "kills" in each situation; "points": calls before or after which the only rank of a save
        died. As lines of text: "lost", kills after which what had been saved before did not load,
        and "torn", after which something loaded that nobody saved.
    """
    torch.set_num_threads(1)
    tally = _Tally()
    with tempfile.TemporaryDirectory() as name:
        place = _Place(Path(name))
        for world_size in (1, 2):
            for behind in (False, True):
                for situation in SITUATIONS:
                    if situation == "remove" and (world_size, behind) != (1, False):
                        continue  # one rank removes, and knows of no other
                    for victim in range(world_size):
                        kill = _Kill(world_size, victim, behind, situation)
                        _sweep(place, kill, stride if world_size == 1 else 2 * stride + 1, tally)
                _at_random_times(place, world_size, behind, num_random, tally)
    return {
        "kills": dict(tally.kills),
        "points": len(tally.points),
        "lost": tally.lost,
        "torn": tally.torn,
    }


@final
class _Place:
    """A folder that is as it was before each kill.

    Args:
        folder: exists and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self._whole = folder / "whole"
        self.run = folder / "run"
        self.earlier, self.path = self.run / "step-1.ckpt", self.run / "last.ckpt"
        self._whole.mkdir()
        save(self._whole / self.earlier.name, EARLIER)
        save(self._whole / self.path.name, THERE)

    def reset(self, *, is_first: bool) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self._whole, self.run)
        if is_first:
            shutil.rmtree(self.path)


@final
@dataclass(frozen=True, slots=True)
class _Kill:
    world_size: int
    victim: int
    behind: bool
    situation: str

    @property
    def kind(self) -> str:
        return f"{self.situation} x {self.world_size}"

    def __str__(self) -> str:
        way = "background" if self.behind else "foreground"
        return f"{self.situation}, {way}, rank {self.victim} of {self.world_size}"


def _saves(place: _Place, kill: _Kill) -> Callable[[int], Iterator[Callable[[int], None]]]:
    """Return what a rank does: it prepares, and then yields its save of a version."""

    def saves(rank: int) -> Iterator[Callable[[int], None]]:
        mesh: DeviceMesh | None = None
        group: Any = None
        if kill.world_size > 1:
            mesh = init_device_mesh("cpu", (kill.world_size,))
            group = dist.new_group(backend="gloo")
        if kill.situation == "no exchange":
            files.exchange = lambda one, other: False
        saver = BackgroundSaver(group, budget_bytes=_STAGING_BYTES, pinned=False)
        if kill.behind:
            yield lambda version: save_behind(saver, place.path, version, mesh=mesh)
        else:
            yield lambda version: save(place.path, version, mesh=mesh)

    return saves


def _sweep(place: _Place, kill: _Kill, stride: int, tally: _Tally) -> None:
    """Kill at one moment after the other, until the rank lives through all of them."""
    calls = tuple(c for c in CALLS if c[1] != "exchange" or kill.situation != "no exchange")

    def run(moment: int) -> Callable[[int], None]:
        def rank_runs(rank: int) -> None:
            for write in _saves(place, kill)(rank):
                if rank == kill.victim:
                    die_at(moment, calls)
                if kill.situation == "remove":
                    storage.remove(place.earlier, newest=place.path)
                else:
                    write(NEXT)

        return rank_runs

    moment = 0
    while True:
        place.reset(is_first=kill.situation == "first")
        if kill.situation == "retry":
            run_ranks(kill.world_size, run(min(_DEAD_MOMENT, 11 if kill.victim else 99)))
        codes = run_ranks(kill.world_size, run(moment))
        if codes[kill.victim] != -signal.SIGKILL:
            if any(codes):
                raise RuntimeError(f"{kill}: ended with {codes}, must end with zeros")
            return
        tally.kills[kill.kind] += 1
        if (kill.world_size, kill.behind, kill.situation) == (1, False, "later"):
            tally.points.add(moment // 2)
        _look(place, kill, f"{kill}, moment {moment}", tally)
        moment += stride


def _at_random_times(
    place: _Place, world_size: int, behind: bool, count: int, tally: _Tally
) -> None:
    """Kill ranks that save again and again."""
    draw = random.Random(f"{world_size} {behind}")
    for number in range(count):
        kill = _Kill(world_size, number % world_size, behind, "random time")

        def run(rank: int, kill: _Kill = kill) -> None:
            for write in _saves(place, kill)(rank):
                for version in range(NEXT, NEXT + 10_000):
                    write(version)

        place.reset(is_first=False)
        after_s = draw.uniform(0, LONGEST_S * world_size)
        codes = run_ranks(world_size, run, kill=(kill.victim, after_s))
        if codes[kill.victim] != -signal.SIGKILL:
            raise RuntimeError(f"{kill}: ended with {codes} before it was killed")
        tally.kills[kill.kind] += 1
        _look(place, kill, f"{kill}, after {after_s:.4f} s", tally)


def _look(place: _Place, kill: _Kill, what: str, tally: _Tally) -> None:
    """Count what is lost and what is torn; a dead attempt must not be in the way of a next one."""
    storage.recover(place.path)
    must_load = {place.path, place.earlier}
    if kill.situation == "first":
        must_load.remove(place.path)
    if kill.situation == "remove":
        must_load.remove(place.earlier)
    for path, first in ((place.earlier, EARLIER), (place.path, THERE)):
        if not path.exists():
            if path in must_load:
                tally.lost.append(f"{what}: {path.name} is gone")
            continue
        try:
            version = version_of(path)
        except ValueError as error:
            reason = str(error).replace(f"{path.parent}{os.sep}", "")
            tally.lost.append(f"{what}: {reason}")
            continue
        if version is None or version < first or (path == place.earlier and version != EARLIER):
            tally.torn.append(f"{what}: {path.name} is version {version}")
