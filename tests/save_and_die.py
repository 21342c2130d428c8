"""A rank of a save that one of the ranks does not survive: `python -m tests.save_and_die ...`."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from zero_strategy.checkpoint import storage

CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


def die_at(moment: int, modules: tuple[tuple[Any, str], ...]) -> None:
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

    for module, name in modules:
        setattr(module, name, deadly(getattr(module, name)))


def whole(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version."""
    draw = torch.Generator().manual_seed(version)
    return {f"model.{i}": torch.randn(7 + i, 5, generator=draw) for i in range(6)}


def main(path: str, victim: str, moment: str) -> None:
    """Save a first version, then a second that the victim does not live to finish."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for version in (1, 2):
        shards = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in whole(version).items()}
        if version == 2 and dist.get_rank() == int(victim):
            die_at(int(moment), tuple((os, name) for name in CALLS))
        storage.save(Path(path), shards, {"version": version})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
