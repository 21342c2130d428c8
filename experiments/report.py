"""What a bug report needs: versions, devices, links, strategy names, kernels."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from zero_strategy.autoload import explain

PACKAGES = ("zero-strategy", "torch", "lightning", "triton", "omegaconf", "numpy", "tensorboard")
KERNELS = Path(__file__).resolve().parent.parent / "kernels"


def report() -> str:
    """Return the whole report, one fact a line."""
    parts = (_versions(), _devices(), _links(), _names(), _kernels())
    return "\n".join(f"{label:<9}{text}" for lines in parts for label, text in lines)


def _versions() -> Iterator[tuple[str, str]]:
    yield "system", f"Python {platform.python_version()} on {platform.platform()}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used by torch"
    yield "cpu", f"{platform.machine()}, {threads}"
    if not torch.cuda.device_count():
        built = torch.version.cuda or torch.version.hip
        yield "gpu", "none visible" if built else "none: this torch is built for the CPU alone"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        yield f"gpu {index}", f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}"


def _links() -> Iterator[tuple[str, str]]:
    """Yield the driver's table of GPU links where its tool is there, else what torch can tell."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        return
    if shutil.which("nvidia-smi"):
        shown = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
        )
        if shown.returncode == 0:
            yield from (("links", line.rstrip()) for line in shown.stdout.splitlines() if line)
            return
    for index in range(num_gpus):
        peers = [
            str(other)
            for other in range(num_gpus)
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        yield "links", f"gpu {index} reaches {', '.join(peers) or 'no other GPU'} directly"


def _names() -> Iterator[tuple[str, str]]:
    for name, state in explain().items():
        yield "strategy", f"{name}: {state}"


def _kernels() -> Iterator[tuple[str, str]]:
    cuda = torch.backends.cuda
    attention = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    allowed = [name for name, on in attention.items() if on]
    yield "kernels", f"attention on GPUs: torch's {', '.join(allowed) or 'plain one'}"
    own = sorted(path.parent.name for path in KERNELS.glob("*/op.py"))
    yield "kernels", f"of this package: {', '.join(own) or 'none in this release'}"
