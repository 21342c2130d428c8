"""What a measurement was taken on: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

import torch
from torch.cuda import nccl

PACKAGES = ("torch", "lightning", "triton", "deepspeed")
# Words of a device name that tell no two devices apart.
_MAKERS = frozenset({"nvidia", "amd", "intel", "geforce", "instinct"})


class Machine(TypedDict):
    """Plain data, as it travels from a worker to the result file."""

    slug: str
    hardware: str
    device_name: str
    versions: dict[str, str]


def describe_machine(num_ranks: int) -> Machine:
    """Describe what this many ranks run on. Cost: starts CUDA where there is a GPU."""
    cores = f"{os.cpu_count()} CPU cores"
    if not torch.cuda.is_available():
        name = platform.machine() or "cpu"
        return Machine(slug="cpu", hardware=cores, device_name=name, versions=versions())
    properties = torch.cuda.get_device_properties(0)
    gpus = f"{num_ranks} x {properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    return Machine(
        slug=slug(properties.name, num_ranks),
        hardware=f"{gpus}, {cores}",
        device_name=properties.name,
        versions=versions(),
    )


def slug(device_name: str, num_devices: int) -> str:
    """Return a name for files.

    Example:
        >>> slug("NVIDIA A100-SXM4-80GB", 2)
        'a100_sxm4_80gb_x2'
    """
    words = [w for w in re.split(r"[^a-z0-9]+", device_name.lower()) if w and w not in _MAKERS]
    return "_".join([*words, f"x{num_devices}"] if num_devices > 1 else words)


def versions() -> dict[str, str]:
    """Return the versions that decide speed; a package that is missing is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def commit_here() -> str:
    """Return the commit of this source tree, marked where files differ; "unknown" without git."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        head = git("rev-parse", "HEAD")
        if head.returncode:
            return "unknown"
        return head.stdout.strip() + ("" if git("diff", "--quiet", "HEAD").returncode == 0 else "+")
    except FileNotFoundError:
        return "unknown"
