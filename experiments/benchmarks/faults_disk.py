"""Disks that are full, broken or slow to take bytes, at every call by which a save writes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from zero_strategy.checkpoint.background import BackgroundSaver
from zero_strategy.experiments.benchmarks.faults_versions import save, save_behind, version_of
from zero_strategy.experiments.benchmarks.forks import CALLS

EARLIER, NEXT = 1, 2
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
# Not what tidies up: that may fail unseen, and leaves nothing that looks like a checkpoint.
WRITING = tuple(call for call in CALLS if call[1] not in ("unlink", "rmdir"))
_STAGING_BYTES = 1 << 12
_FILE_BYTES = 3000
"""A limit of the system's own: less than a rank's shards."""


class _Fault(NamedTuple):
    """What one rank meets in one save."""

    rank: int
    call: str
    number: int
    """Of its calls of that name, the one that fails."""
    kind: int | str
    """Error number; or "half": it takes half, and the next finds the disk full; "none": nothing is
    taken; "short": 97 bytes at a time are, which is no failure; "limit": the system's own."""


def faults(*, stride: int) -> dict[str, Any]:
    """Let each writing call of each rank fail, in the foreground and in the background.

    Every rank calls it; one process group goes through all of them.

    Args:
        stride: take every n-th fault.

    Returns: "faults" that must fail a save; "raised": of these, those that all ranks raised;
        "slowest_s": of all, from the begin of the save to the last rank's error; "short": saves
        that only got few bytes at a time, and "written": those of them that are whole;
        "broken": lines that say which earlier checkpoint was not intact, or had lost its name.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"faults": 0, "raised": 0, "short": 0, "written": 0}
    slowest_s, broken = 0.0, []
    told: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    folder = Path(told[0])
    try:
        for behind in (False, True):
            bench = _Bench(folder, behind)
            for fault in bench.plan()[::stride]:
                raised, seconds, version = bench.meet(fault)
                must_fail = fault.kind != "short"
                found["faults" if must_fail else "short"] += 1
                if must_fail:
                    found["raised"] += raised == dist.get_world_size()
                    slowest_s = max(slowest_s, seconds)
                else:
                    found["written"] += raised == 0 and version == NEXT
                if version is None or (must_fail and version != EARLIER):
                    broken.append(f"{fault}, {behind=}: the earlier checkpoint is not intact")
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    return {**found, "slowest_s": slowest_s, "broken": broken}


class _Bench:
    """Saves of one process group, into a folder that is as it was before each.

    Args:
        folder: the same on all ranks.
        behind: save in the background.
    """

    def __init__(self, folder: Path, behind: bool) -> None:
        self._folder, self._whole, self._behind = folder / "run", folder / "whole.ckpt", behind
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        group = cast(Any, dist.new_group(backend="gloo"))
        self._saver = BackgroundSaver(group, budget_bytes=_STAGING_BYTES, pinned=False)
        self._earlier, self._path = self._folder / "step-1.ckpt", self._folder / "last.ckpt"
        save(self._whole, EARLIER, mesh=self._mesh)

    def _reset(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            for path in (self._earlier, self._path):
                shutil.copytree(self._whole, path)
        dist.barrier()

    def _save(self) -> None:
        if self._behind:
            save_behind(self._saver, self._path, NEXT, mesh=self._mesh)
        else:
            save(self._path, NEXT, mesh=self._mesh)

    def plan(self) -> Sequence[_Fault]:
        """Count what each rank calls in a save, and return a fault for each of it. Collective."""
        self._reset()
        mine: dict[str, int] = {}
        with _calls_pass(lambda name, number, call: mine.update({name: number + 1}) or call()):
            self._save()
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        planned = []
        for rank, counts in enumerate(of_ranks):
            for name, count in counts.items():
                kinds = [*ERRORS, *(("half", "none") if name == "write" else ())]
                planned += [_Fault(rank, name, n, k) for n in range(count) for k in kinds]
            planned += [_Fault(rank, "write", 0, kind) for kind in ("short", "limit")]
        return planned

    def meet(self, fault: _Fault) -> tuple[int, float, int | None]:
        """Save and meet a fault. Collective.

        Returns: how many ranks raised, the seconds until the last one did, and which version is
            under the name that was saved to; None where a checkpoint does not load.
        """
        self._reset()
        mine = fault.rank == dist.get_rank()
        began, raised = time.monotonic(), False
        try:
            if mine:
                with _limited() if fault.kind == "limit" else _calls_pass(_failing(fault)):
                    self._save()
            else:
                self._save()
        except (RuntimeError, OSError):
            raised = True
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (raised, time.monotonic() - began))
        return sum(r for r, _ in told), max(s for _, s in told), self._look()

    def _look(self) -> int | None:
        try:
            earlier, version = (version_of(p) for p in (self._earlier, self._path))
        except ValueError:
            return None
        return version if earlier == EARLIER and version in (EARLIER, NEXT) else None


def _failing(fault: _Fault) -> Callable[[str, int, Callable[..., Any]], Any]:
    """Return what stands in for a call, told its name and how many of that name came before."""

    def stand_in(name: str, number: int, call: Callable[..., Any]) -> Any:
        if fault.kind == "short":
            return call(97) if name == "write" else call()
        if name != fault.call or number < fault.number:
            return call()
        if fault.kind == "none":
            return 0
        if fault.kind == "half" and number == fault.number:
            return call(0.5)
        if number > fault.number + (fault.kind == "half"):
            return call()
        code = errno.ENOSPC if fault.kind == "half" else int(fault.kind)
        raise OSError(code, os.strerror(code))

    return stand_in


@contextmanager
def _calls_pass(through: Callable[[str, int, Callable[..., Any]], Any]) -> Iterator[None]:
    """Let what writes pass through a function."""
    real = {name: (module, getattr(module, name)) for module, name in WRITING}
    counts = dict.fromkeys(real, 0)

    def wrapped(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real[name][1](*args, **kwargs)  # reads a folder, to bring it to the disk
            number, counts[name] = counts[name], counts[name] + 1

            def call(part: float = 1.0) -> Any:
                if part != 1.0:
                    size = int(part) if part > 1 else max(1, int(part * len(args[1])))
                    return real[name][1](args[0], bytes(args[1][:size]))
                return real[name][1](*args, **kwargs)

            return through(name, number, call)

        return run

    for name, (module, _) in real.items():
        setattr(module, name, wrapped(name))
    try:
        yield
    finally:
        for name, (module, call) in real.items():
            setattr(module, name, call)


@contextmanager
def _limited() -> Iterator[None]:
    """Let the system itself refuse what goes beyond so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
