"""A rank of a save that one of the ranks does not survive: `python -m tests.save_and_die ...`."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from zero_strategy.checkpoint import storage
from zero_strategy.experiments.benchmarks.forks import CALLS, die_at


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
            die_at(int(moment), tuple(call for call in CALLS if call[0] is os))
        storage.save(Path(path), shards, {"version": version})
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
