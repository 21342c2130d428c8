"""Processes that may be killed: forks of one that has torch, which cost milliseconds each."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from zero_strategy.checkpoint import files
from zero_strategy.experiments.benchmarks.launch import free_port, rank_variables

CALLS = (
    *((os, name) for name in ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")),
    (files, "exchange"),
)
"""What a save changes the disk by, and the opening of files."""
LIMIT_S = 20.0
"""For ranks whose peer died; those that still run then are killed."""


def die_at(moment: int, calls: tuple[tuple[Any, str], ...] = CALLS) -> None:
    """Kill this process before (even) or after (odd) its n-th call of one of the functions."""
    left = [moment]

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            done = call(*args, **kwargs)
            if left[0] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 2
            return done

        return run

    for module, name in calls:
        setattr(module, name, deadly(getattr(module, name)))


def run_ranks(
    world_size: int,
    function: Callable[[int], None],
    *,
    kill: tuple[int, float] | None = None,
    limit_s: float = LIMIT_S,
) -> list[int]:
    """Run a function in a fork per rank, which form a gloo group where there are several.

    Args:
        world_size: number of ranks.
        function: told its rank; may be killed, or die of its peer.
        kill: a rank, and the seconds after which it is killed from outside; they count once every
            rank is in the group.
        limit_s: after so long, ranks that still run are killed.

    Returns: exit codes by rank, negative for a signal.
    """
    port = free_port()
    ready, tell = os.pipe()
    pids = [_fork(rank, world_size, port, function, tell) for rank in range(world_size)]
    os.close(tell)
    for _ in pids:
        os.read(ready, 1)
    os.close(ready)
    began = time.monotonic()
    codes: dict[int, int] = {}
    while len(codes) < world_size:
        for rank, pid in enumerate(pids):
            if rank in codes:
                continue
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(status)
                continue
            aged = time.monotonic() - began
            if (kill and rank == kill[0] and aged > kill[1]) or aged > limit_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)
    return [codes[rank] for rank in range(world_size)]


def _fork(rank: int, world_size: int, port: int, function: Callable[[int], None], tell: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)  # a fork has no threads of a pool that its parent had
        random.seed(rank)
        os.environ.update(rank_variables(rank, world_size, port))
        if world_size > 1:
            # What a survivor says of its peer's death is expected.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            dist.init_process_group("gloo")
        os.write(tell, b".")
        function(rank)
        code = 0
    except Exception:  # noqa: BLE001 - what the end of a program would print
        traceback.print_exc()
    finally:
        os._exit(code)
