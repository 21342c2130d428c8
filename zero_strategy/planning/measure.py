"""This machine's rates, measured once and kept in the cache directory of the built kernels.

Unlike the rest of planning this needs the machine itself, and ranks may find different figures:
where a decision must be the same everywhere, one rank measures and tells the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy import __version__
from zero_strategy.kernels import adam
from zero_strategy.kernels.adam import AdamState, AdamStep, Pending
from zero_strategy.kernels.build import cache_directory
from zero_strategy.planning.host_memory import host_room
from zero_strategy.planning.machines import H200, Machine

NUM_PARAMS = 20 << 20
"""State and gradients of so many are 380 MB, more than caches hold."""
COPY_BYTES = 256 << 20
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
# A whole training step of a decoder runs at 530 of the 790 TFLOP/s of one large product on an H200.
SUSTAINED_SHARE = 530 / 790
# Bytes that the streamed state moves each way per parameter, with what its copies lose.
STREAMED_BYTES = H200.duplex_bytes_per_s / H200.streamed_params_per_s
# Copies reach memory that the cores' own traffic leaves unused; bytes of a plain pass over all.
PASS_BYTES = 26
MEMORY_FACTOR = H200.host_memory_bytes_per_s / (PASS_BYTES * H200.step_params_per_s)
# CUDA's context and what the allocator cannot hand out.
GPU_RESERVE_BYTES = 3 << 30
_ADAM = AdamStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=5, decoupled=True)


def measured(
    *,
    folder: Path | None = None,
    num_params: int = NUM_PARAMS,
    copy_bytes: int = COPY_BYTES,
) -> Machine:
    """Return this machine, from the cache where it was measured before.

    Args:
        folder: of the cache; by default `kernels.build.cache_directory()`.
        num_params: of the passes that are timed.
        copy_bytes: of the copies that are timed.

    Raises:
        zero_strategy.kernels.build.BuildError: the default cache directory cannot be used.

    Cost: a file read; without it 1 to 3 s, and about 2 s more where the kernels are not built.
    Memory is asked anew each time.
    """
    key = _key(num_params, copy_bytes)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = (cache_directory() if folder is None else folder) / f"machine-{name}.json"
    rates = _read(file, key)
    if rates is None:
        rates = _rates(num_params, copy_bytes)
        _write(file, {"key": key, "rates": rates})
    gpus = torch.cuda.device_count()
    return Machine(
        name="this",
        source=f"measured here: {key['cpu']}, {key['cores']} cores, {key['gpu'] or 'no GPU'}",
        num_gpus=gpus,
        gpu_bytes=_gpu_bytes() if gpus else 0,
        host_bytes=host_room(1).available_bytes,
        cores=_num_cores(),
        disk_read_bytes_per_s=None,
        disk_write_bytes_per_s=None,
        disk_update_bytes_per_s=None,
        **rates,
    )


# The cache.


def _key(num_params: int, copy_bytes: int) -> dict[str, str | int]:
    """Everything by which a measurement is known to be of this machine and of this code."""
    return {
        "version": __version__,
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "num_params": num_params,
        "copy_bytes": copy_bytes,
    }


def _cpu_model() -> str:
    """Name of the processor; x86 tells it in a file, others by `platform`."""
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _read(file: Path, key: Mapping[str, str | int]) -> dict[str, float] | None:
    """Return the rates of a file that is whole and has this key, or None."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if not isinstance(tree, dict) or tree.get("key") != key:
        return None
    rates = tree.get("rates")
    if not isinstance(rates, dict) or set(rates) != set(_RATES):
        return None
    fine = all(type(r) in (int, float) and math.isfinite(r) and r >= 0 for r in rates.values())
    return rates if fine else None


def _write(file: Path, tree: Mapping[str, object]) -> None:
    """Write beside the file and rename, since every rank of a machine may measure at once."""
    handle, beside = tempfile.mkstemp(dir=file.parent, suffix=".json")
    with os.fdopen(handle, "w") as stream:
        json.dump(tree, stream)
    Path(beside).replace(file)


# What is measured. Names are those of `Machine`.


def _rates(num_params: int, copy_bytes: int) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    down, up, duplex = _copies(device, copy_bytes)
    passes = _passes(num_params)
    rates = {
        **passes,
        "host_memory_bytes_per_s": MEMORY_FACTOR * PASS_BYTES * passes["step_params_per_s"],
        "matmul_flops_per_s": SUSTAINED_SHARE * _matmul_flops(device),
        "gpu_memory_bytes_per_s": _memory_rate(device, copy_bytes),
        "down_bytes_per_s": down,
        "up_bytes_per_s": up,
        "duplex_bytes_per_s": duplex,
        "copy_slowdown": H200.copy_slowdown,
        "streamed_params_per_s": duplex / STREAMED_BYTES,
    }
    assert set(rates) == set(_RATES), "every rate of a machine is measured"
    return rates


_RATES = (
    "copy_slowdown",
    *(
        field.name
        for field in dataclasses.fields(Machine)
        if field.name.endswith("_per_s") and not field.name.startswith("disk_")
    ),
)


def _passes(num_params: int) -> dict[str, float]:
    """Time the passes of the real kernel over state that caches cannot hold."""
    state = AdamState(
        upper=torch.zeros(num_params, dtype=torch.bfloat16),
        lower=torch.zeros(num_params, dtype=torch.int16),
        m=torch.zeros(num_params),
        v=torch.zeros(num_params),
    )
    grad, before, wire = (torch.zeros(num_params, dtype=torch.bfloat16) for _ in range(3))
    pending = Pending(before, _ADAM, 0.5)
    passes: dict[str, Callable[[], object]] = {
        "step_params_per_s": lambda: adam.step(state, grad, _ADAM, 1.0),
        "deferred_params_per_s": lambda: adam.commit_and_preview(
            state, pending, grad, _ADAM, 1.0, wire
        ),
        "preview_params_per_s": lambda: adam.preview(state, grad, _ADAM, 1.0, wire),
    }
    return {name: num_params / _best_s(run, torch.device("cpu")) for name, run in passes.items()}


def _matmul_flops(device: torch.device) -> float:
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best_s(lambda: left @ left, device)


def _memory_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written by a copy on the device, per second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / _best_s(lambda: target.copy_(source), device)


def _copies(device: torch.device, num_bytes: int) -> tuple[float, float, float]:
    """Bytes per second to the host, from it, and each way at once."""
    if device.type == "cpu":
        # "Copies to the host" are copies within it; both ways share its memory.
        rate = _memory_rate(device, num_bytes) / 2
        return rate, rate, rate / 2
    to_host, from_host = (
        torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
    )
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    streams: Any = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def down() -> None:
        with torch.cuda.stream(streams[0]):
            to_host.copy_(source, non_blocking=True)

    def up() -> None:
        with torch.cuda.stream(streams[1]):
            target.copy_(from_host, non_blocking=True)

    seconds = (_best_s(run, device) for run in (down, up, lambda: (down(), up())))
    down_rate, up_rate, duplex_rate = (num_bytes / s for s in seconds)
    return down_rate, up_rate, duplex_rate


def _best_s(run: Callable[[], object], device: torch.device, *, repeats: int = 3) -> float:
    """Shortest of some runs after one that is not counted: what else runs only adds time."""
    times = []
    for _ in range(repeats + 1):
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return max(min(times[1:]), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory - GPU_RESERVE_BYTES
