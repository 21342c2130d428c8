"""Checkpoints whose every value follows from a number, so that a mixture of two is seen."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.background import BackgroundSaver
from zero_strategy.checkpoint.casts import Casts


def tensors(version: int, num_rows: int = 301) -> dict[str, Tensor]:
    """Return the tensors of a version: several dtypes, odd sizes, an empty one, a scalar.

    Args:
        version: of the checkpoint.
        num_rows: of the two that weigh most, (num_rows, 7), fp32.
    """
    draw = torch.Generator().manual_seed(version)
    return {
        "model.a": torch.randn(num_rows, 7, generator=draw),
        "model.b": torch.randn(129, generator=draw).bfloat16(),
        "model.count": torch.tensor(version),
        "model.empty": torch.zeros(0, 3),
        "optim.0.a.m": torch.randn(num_rows, 7, generator=draw),
        "optim.0.flags": torch.rand(77, generator=draw) > 0.5,
    }


def _meta(version: int, num_rows: int) -> dict[str, Any]:
    return {
        "version": version,
        "num_rows": num_rows,
        "random": torch.arange(9) * version,
        "at": (1, 2.5, {"x": b"y"}),
    }


def _to_save(path: Path, version: int, mesh: DeviceMesh | None, num_rows: int) -> storage.Save:
    values = tensors(version, num_rows)
    if mesh is not None:
        values = {
            name: distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value
            for name, value in values.items()
        }
    return storage.Save(path, values, _meta(version, num_rows))


def save(path: Path, version: int, *, mesh: DeviceMesh | None = None, num_rows: int = 301) -> None:
    """Write a version, and wait for it. Collective over the mesh, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _to_save(path, version, mesh, num_rows).write()


def save_behind(
    saver: BackgroundSaver, path: Path, version: int, *, mesh: DeviceMesh | None = None
) -> None:
    """Write a version in the background, while its tensors are spoilt; returns when it is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = _to_save(path, version, mesh, 301)
        saver.start(job, release=lambda: None)
        for name, value in job.tensors.items():
            if name.startswith(("model.", "optim.")):
                part: Any = value
                (part.to_local() if mesh is not None and part.ndim else part).zero_()
        saver.wait()


def version_of(path: Path) -> int | None:
    """Load everything in this process, as a run does, and return which version it is.

    Returns: the version of which each value has every bit; None where there is no such.

    Raises:
        ValueError: the checkpoint is refused.
    """
    found = storage.load_meta(path)
    version, num_rows = found["version"], found["num_rows"]
    random_state, wanted_meta = found.pop("random"), _meta(version, num_rows)
    same = torch.equal(random_state, wanted_meta.pop("random")) and found == wanted_meta
    want = tensors(version, num_rows)
    got = {
        name: torch.full(entry.size, 1, dtype=entry.properties.dtype)
        for name, entry in storage.stored(path).items()
        if not name.startswith("meta.")
    }
    storage.load(path, got, Casts(allowed=False))
    same = same and got.keys() == want.keys()
    return version if same and all(torch.equal(got[n], t) for n, t in want.items()) else None
