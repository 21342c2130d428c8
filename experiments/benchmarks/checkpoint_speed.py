"""How long a save holds up training, and how fast it reaches the disk, beside DCP's own writer.

One process holds fp32 weights and two moments in plain tensors. All saves of one run go to the same
disk in turns, each brought there by fsync; the first of each kind only warms up.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from zero_strategy.checkpoint import files, storage
from zero_strategy.checkpoint.background import BackgroundSaver
from zero_strategy.experiments.benchmarks.launch import Launcher
from zero_strategy.experiments.benchmarks.result import OURS, Findings, Row, ratio

DCP, COPY = "dcp", "copy"
BYTES_PER_PARAM = 12
FOLDER = Path("runs")
"""Where runs lie by default, so on the disk that is meant to hold checkpoints."""
_SPARE = 1.25
"""Room that is wanted on the disk, for one byte of a checkpoint."""
_COPY_BYTES = 1 << 30
_NUM_COPIES = 8


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpeed:
    """Saves of a large state.

    Attributes:
        num_params: parameters; halved until the disk has room for one checkpoint.
        num_tensors: over which they are spread, evenly, and so are the moments.
        rounds: measured saves of each kind.
        timeout_s: for all of them.
    """

    num_params: int = 3_400_000_000
    num_tensors: int = 64
    rounds: int = 2
    timeout_s: int = 580

    def quick(self) -> Self:
        """Return the same with few parameters."""
        return dataclasses.replace(self, num_params=1 << 20, num_tensors=8, rounds=1, timeout_s=100)

    def measure(self, launcher: Launcher) -> Findings:
        """Save in each way, in turns.

        Raises:
            ValueError: more than one rank; the link and the disk are those of one process.
        """
        if launcher.num_ranks != 1:
            raise ValueError(
                f"devices = {launcher.num_ranks}: must be 1, because one process has the whole "
                "disk. Add devices=1."
            )
        sizes = {"num_params": self.num_params, "num_tensors": self.num_tensors}
        report = launcher.run(measure, timeout_s=self.timeout_s, rounds=self.rounds, **sizes)
        findings = Findings()
        if report.reason:
            findings.rows.append(Row.failed(OURS, "save", "GB/s", report.reason))
            findings.broken.append(f"{OURS}: {report.reason}")
            return findings
        _add_rows(findings, report.value)
        return findings


def _add_rows(findings: Findings, found: dict[str, Any]) -> None:
    num_bytes, seconds = found["num_bytes"], found["seconds"]
    size = (
        f"{found['num_params'] / 1e9:.3g}B parameters, {num_bytes / 1e9:.4g} GB: fp32 weights and "
        f"two moments in {found['num_entries']} tensors on {found['device']}"
    )
    rate = found["copy_bytes_per_s"]

    def add(system: str, metric: str, unit: str, values: list[float], note: str) -> None:
        findings.rows.append(Row.of(system, metric, unit, values, note))

    def speeds(kind: str) -> list[float]:
        return [num_bytes / s / 1e9 for s in seconds[kind]]

    add(COPY, "to pinned memory", "GB/s", [r / 1e9 for r in rate], "from the device, alone")
    floor_s = num_bytes / max(rate)
    copied = "until all is copied, so that training may change it; staging of the whole state"
    add(OURS, "stall", "s", found["stalls"], f"background save, {copied}; {size}")
    add(OURS, "stall: calling thread", "s", found["calls"], "until the call returns")
    stalls = [s / floor_s for s in found["stalls"]]
    note = f"stall over bytes / fastest measured copy rate ({floor_s:.4g} s)"
    add(OURS, "stall over copy time", "x", stalls, note)
    add(OURS, "background save", "GB/s", speeds("behind"), f"until it is on the disk; {size}")
    add(OURS, "save", "GB/s", speeds("ours"), f"with checksums and fsync; {size}")
    add(OURS, "save without checksums", "GB/s", speeds("unchecked"), "the same, CRC32 left out")
    pairs = zip(seconds["ours"], seconds["unchecked"], strict=True)
    costs = [100 * (with_s - without_s) / with_s for with_s, without_s in pairs]
    note = "of the save's time, round by round; below 0 where the disk's own changes are larger"
    add(OURS, "checksum cost", "%", costs, note)
    note = f"FileSystemWriter(sync_files=True), one thread as by default; {size}"
    add(DCP, "save", "GB/s", speeds("dcp"), note)
    x = ratio(findings.median(OURS, "save"), findings.median(DCP, "save"))
    if x is not None:
        findings.ratios[f"vs {DCP}"] = x


# The measuring process.


def measure(*, num_params: int, num_tensors: int, rounds: int) -> dict[str, Any]:
    """Save in each way, one after the other, round by round.

    Args:
        num_params: parameters; halved until the disk has room.
        num_tensors: over which they are spread.
        rounds: measured saves of each kind, after one that is not.

    Raises:
        RuntimeError: a checkpoint does not hold what was saved.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        num_params = fitting(num_params, shutil.disk_usage(name).free)
        tensors = _state(num_params, num_tensors, device)
        kinds = _Kinds(Path(name, "a.ckpt"), tensors, device)
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds.by_name}
        stalls: list[float] = []
        calls: list[float] = []
        for number in range(rounds + 1):
            for kind, save in kinds.by_name.items():
                elapsed_s = kinds.timed(save, is_checked=kind in ("ours", "behind"))
                if number:
                    seconds[kind].append(elapsed_s)
            if number:
                stalls.append(kinds.stall_s)
                calls.append(kinds.call_s)
    return {
        "num_params": num_params,
        "num_entries": len(tensors),
        "num_bytes": sum(t.nbytes for t in tensors.values()),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "the CPU",
        "copy_bytes_per_s": _copy_rates(next(iter(tensors.values())), device),
        "seconds": seconds,
        "stalls": stalls,
        "calls": calls,
    }


def fitting(num_params: int, free_bytes: int) -> int:
    """Return a number of parameters, halved until a checkpoint has room on the disk."""
    while num_params * BYTES_PER_PARAM * _SPARE > free_bytes:
        num_params //= 2
    return num_params


def _state(num_params: int, num_tensors: int, device: torch.device) -> dict[str, Tensor]:
    shape = (num_params // num_tensors // 128, 128)
    draw = torch.Generator(device).manual_seed(1)
    kinds = ("model.{}", "optim.0.{}.exp_avg", "optim.0.{}.exp_avg_sq")
    return {
        kind.format(f"w{index}"): torch.randn(shape, generator=draw, device=device)
        for kind in kinds
        for index in range(num_tensors)
    }


class _Kinds:
    """The ways to save, each to the same path, which is empty before.

    Args:
        path: of the checkpoint.
        tensors: what is saved.
        device: where they are.

    Attributes:
        by_name: what saves.
        stall_s: of the last background save, until all was copied.
        call_s: of the same, until the call returned.
    """

    def __init__(self, path: Path, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._path, self._tensors, self._device = path, tensors, device
        on_gpu = device.type == "cuda"
        size = sum(tensor.nbytes + 256 for tensor in tensors.values())
        self._saver = BackgroundSaver(None, budget_bytes=size, pinned=on_gpu)
        self.stall_s = self.call_s = 0.0
        self.by_name: dict[str, Callable[[], None]] = {
            "ours": self._ours,
            "unchecked": self._unchecked,
            "dcp": self._dcp,
            "behind": self._behind,
        }

    def timed(self, save: Callable[[], None], *, is_checked: bool) -> float:
        """Return the seconds of a save; remove what it left."""
        name, tensor = next(iter(self._tensors.items()))
        saved = tensor.cpu().clone()
        os.sync()  # what others left to be written
        self._synchronize()
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save()
        elapsed_s = time.perf_counter() - began
        if is_checked and not torch.equal(
            storage.read(self._path, storage.contents(self._path), name), saved
        ):
            raise RuntimeError(f"{name}: must be stored as it was when the save began, but is not")
        shutil.rmtree(self._path)
        return elapsed_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _ours(self) -> None:
        storage.save(self._path, self._tensors, {})

    def _unchecked(self) -> None:
        with _without_checksums():
            self._ours()

    def _dcp(self) -> None:
        writer = FileSystemWriter(self._path, sync_files=True)
        dcp.save(dict(self._tensors), storage_writer=writer)

    def _behind(self) -> None:
        began = time.perf_counter()
        self._saver.start(storage.Save(self._path, self._tensors, {}), release=lambda: None)
        self.call_s = time.perf_counter() - began
        # Copies are queued before whatever the run queues next; that is when it may go on.
        self._synchronize()
        self.stall_s = time.perf_counter() - began
        next(iter(self._tensors.values())).add_(1)
        self._saver.wait()


@contextmanager
def _without_checksums() -> Iterator[None]:
    real = files.checksum
    files.checksum = lambda data: 0
    try:
        yield
    finally:
        files.checksum = real


def _copy_rates(source: Tensor, device: torch.device) -> list[float]:
    """Measure copies of a tensor into host memory, pinned where there is a GPU; bytes/s."""
    source = source.flatten().view(torch.uint8)[:_COPY_BYTES]
    on_gpu = device.type == "cuda"
    target = torch.empty(len(source), dtype=torch.uint8, pin_memory=on_gpu)
    rates = []
    for _ in range(_NUM_COPIES):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        rates.append(len(source) / (time.perf_counter() - began))
    return rates[1:]
