"""Checkpoints whose files were spoilt, cut, exchanged, doubled or lost, and then loaded."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from zero_strategy.checkpoint import files
from zero_strategy.checkpoint.manifest import NAME
from zero_strategy.experiments.benchmarks.faults_versions import save, version_of
from zero_strategy.experiments.benchmarks.forks import run_ranks

VERSION, OTHER = 1, 2
LARGE_ROWS = 700_001
"""Rows of a tensor that lies under two checksums."""
_SECTOR, _PAGE = 512, 4096


def _flip(data: bytearray, at: int, draw: random.Random) -> None:
    data[at] ^= 1 << draw.randrange(8)


def _cut(data: bytearray, at: int, draw: random.Random) -> None:
    del data[at:]


def _zero(data: bytearray, at: int, draw: random.Random) -> None:
    size = draw.choice((1, 64, _SECTOR, _PAGE))
    data[at : at + size] = bytes(len(data[at : at + size]))


def _repeat(data: bytearray, at: int, draw: random.Random) -> None:
    data[at:at] = data[at : at + 8]


def _append(data: bytearray, at: int, draw: random.Random) -> None:
    data += data[:at] or b"\0"


def _swap_bytes(data: bytearray, at: int, draw: random.Random) -> None:
    other = draw.randrange(len(data))
    data[at], data[other] = data[other], data[at]


def _swap_blocks(data: bytearray, at: int, draw: random.Random) -> None:
    # As long as what lies under one checksum, where the file is as long as several.
    size = files.BLOCK_BYTES if len(data) > 2 * files.BLOCK_BYTES else 1 << draw.randrange(3, 10)
    size = min(size, len(data) // 2)
    one = draw.randrange(len(data) - 2 * size + 1)
    other = draw.randrange(one + size, len(data) - size + 1)
    first, second = bytes(data[one : one + size]), bytes(data[other : other + size])
    data[one : one + size], data[other : other + size] = second, first


SPOILS: Mapping[str, Callable[[bytearray, int, random.Random], None]] = {
    "flip": _flip,
    "cut": _cut,
    "zero": _zero,
    "repeat": _repeat,
    "append": _append,
    "swap bytes": _swap_bytes,
    "swap blocks": _swap_blocks,
}


def damages(*, each: int, each_large: int) -> dict[str, Any]:
    """Damage checkpoints of one and of two ranks, and load each.

    Args:
        each: cases for every kind of spoilt bytes and every file; those of whole files, which are
            few, come on top.
        each_large: likewise, for a file with two checksums per tensor.

    Returns: "outcomes", name -> cases: "detected" is an error that names the checkpoint, "equal"
        means that every value is as it was saved. "silent" and "unnamed" tell of each other case.
    """
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    told: dict[str, list[str]] = {"silent": [], "unnamed": []}
    with tempfile.TemporaryDirectory() as name:
        for what, path in _damaged(Path(name), each, each_large):
            found = _outcome(path)
            outcomes[found] += 1
            if found in told:
                told[found].append(what)
    return {"outcomes": dict(outcomes), **told}


def _outcome(path: Path) -> str:
    try:
        version = version_of(path)
    except ValueError as error:
        return "detected" if str(error).startswith(f"{path}: ") else "unnamed"
    except Exception:  # noqa: BLE001 - an error of another kind is a finding
        return "unnamed"
    return "equal" if version == VERSION else "silent"


def _damaged(folder: Path, each: int, each_large: int) -> Iterator[tuple[str, Path]]:
    """Yield what was done and the checkpoint to which it was done."""
    path = folder / "a.ckpt"
    for world_size in (1, 2):
        whole, other = folder / f"{world_size}.ckpt", folder / f"{world_size} other.ckpt"
        for place, version in ((whole, VERSION), (other, OTHER)):
            run_ranks(world_size, _saving(place, version, world_size))
        for file in sorted(path.name for path in whole.iterdir()):
            for what in _spoilt(path, whole, file, each):
                yield f"{what} of {world_size}", path
        for what in _mixed(path, whole, other):
            yield f"{what} of {world_size}", path
    large = folder / "large.ckpt"
    save(large, VERSION, num_rows=LARGE_ROWS)
    for what in _spoilt(path, large, "tensors-0.safetensors", each_large):
        yield f"{what} of a large one", path


def _saving(path: Path, version: int, world_size: int) -> Callable[[int], None]:
    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,)) if world_size > 1 else None
        save(path, version, mesh=mesh)

    return run


def _spoilt(path: Path, whole: Path, file: str, count: int) -> Iterator[str]:
    """Spoil bytes of one file, in each way so many times."""
    raw = (whole / file).read_bytes()
    _copy(whole, path)
    for kind, spoil in SPOILS.items():
        draw = random.Random(f"{whole.name} {file} {kind}")
        for number in range(count):
            data = bytearray(raw)
            spoil(data, draw.randrange(len(data)), draw)
            (path / file).write_bytes(data)
            yield f"{kind} {number} in {file}"


def _mixed(path: Path, whole: Path, other: Path) -> Iterator[str]:
    """Lose, exchange and double whole files."""
    names = sorted(path.name for path in whole.iterdir())
    shards = [name for name in names if name != NAME]
    for name in names:
        _copy(whole, path)
        shutil.copy(other / name, path / name)
        yield f"{name} of another step"
        (path / name).unlink()
        yield f"without {name}"
        (path / name).touch()
        yield f"{name} is empty"
        (path / name).unlink()
        (path / name).mkdir()
        yield f"{name} is a folder"
        _copy(whole, path)
        shutil.copy(path / name, path / f"{name}.copy")
        yield f"{name} twice"
        (path / name).rename(folder_file := path / f"moved {name}")
        (path / name).symlink_to(folder_file)
        yield f"a link in place of {name}"
    for one in shards:
        _copy(whole, path)
        shutil.copy(path / one, path / "tensors-9.safetensors")
        yield f"{one} also as another rank's"
        for another in (name for name in names if name != one):
            _copy(whole, path)
            shutil.copy(path / one, path / another)
            yield f"{one} also as {another}"
            _copy(whole, path)
            shutil.copy(whole / one, path / another)
            shutil.copy(whole / another, path / one)
            yield f"{one} and {another} exchanged"
    _copy(other, path)
    shutil.copy(whole / NAME, path / NAME)
    yield "all shards of another step"


def _copy(whole: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
