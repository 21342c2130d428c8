"""How much host memory a rank may still take, and what to do where that is too little.

The system does not refuse host memory when it is asked for: it ends a process later, when pages are
touched. So what is needed is held against what there is before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.telemetry import text

SHOWN_REMEDIES = 3
_RECLAIMABLE_V2 = ("inactive_file", "active_file")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRoom:
    """Host memory that can still be taken."""

    available_bytes: int
    """By each rank of this machine, if all take the same."""
    bound: str
    """What sets the limit, for an error's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change that needs less host memory."""

    action: str
    """What to do, as a user would write it."""
    saves_bytes: int
    """Host memory of one rank."""
    cost_s: float
    """GPU seconds that it adds to a step, to sort by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGroup:
    """A control group's folder and the names of its files."""

    folder: Path
    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]
    """Entries of `memory.stat`: file cache, which the system gives up before it refuses."""


def host_room(num_local_ranks: int, *, root: Path = Path("/")) -> HostRoom:
    """Return the smallest of what the control groups and the machine leave to this process.

    Ranks that ask at different times get different answers. Take the minimum over all ranks before
    the first of them allocates.

    Args:
        num_local_ranks: processes of this machine that will take the same.
        root: where `proc` and `sys` are mounted.

    Cost: reads about ten small files.
    """
    proc = root / "proc"
    rooms: list[tuple[str, float]] = [("MemAvailable", mem_available(read(proc / "meminfo")))]
    groups = memory_groups(read(proc / "self/cgroup"), read(proc / "self/mountinfo"))
    for group in groups:
        folder = root / group.folder.relative_to("/")
        for name in group.limits:
            if (folder / name).is_file():
                left = group_room(
                    read(folder / name),
                    read(folder / group.usage),
                    read(folder / "memory.stat"),
                    group.reclaimable,
                )
                rooms.append((str(group.folder / name), left))
    bound, room = min(rooms, key=lambda named: named[1])
    shared = f", shared by {num_local_ranks} ranks" if num_local_ranks > 1 else ""
    return HostRoom(available_bytes=int(room) // num_local_ranks, bound=f"{bound}{shared}")


def read(path: Path) -> str:
    """Return a file's text."""
    return path.read_text(encoding="utf-8", errors="replace")


def mem_available(meminfo: str) -> int:
    """Return the machine's memory that can be taken without swapping, in bytes.

    Args:
        meminfo: text of `/proc/meminfo`.
    """
    lines = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024


def memory_groups(cgroup: str, mountinfo: str) -> Iterator[MemoryGroup]:
    """Yield the process's memory control groups, each followed by those that contain it.

    Args:
        cgroup: text of `/proc/self/cgroup`.
        mountinfo: text of `/proc/self/mountinfo`.
    """
    paths = dict(_paths(cgroup))
    for kind, top, mount in _mounts(mountinfo):
        if kind not in paths:
            continue
        inside = Path(paths[kind])
        # A container may see its group as the mount's root, while its path is told from outside.
        below = inside.relative_to(top) if inside.is_relative_to(top) else Path()
        for folder in (mount / below, *(mount / below).parents):
            if folder.is_relative_to(mount):
                yield _group(kind, folder)


def _group(kind: str, folder: Path) -> MemoryGroup:
    if kind == "v2":
        # Above memory.high a process is not ended but held up, which trains no better.
        limits = ("memory.max", "memory.high")
        usage, reclaimable = "memory.current", _RECLAIMABLE_V2
    else:
        limits, usage = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
        reclaimable = _RECLAIMABLE_V1
    return MemoryGroup(folder=folder, limits=limits, usage=usage, reclaimable=reclaimable)


def _paths(cgroup: str) -> Iterator[tuple[str, str]]:
    """Hierarchy ("v1", "v2") -> the process's path in it."""
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield "v1", path
        elif number == "0" and not controllers:
            yield "v2", path


def _mounts(mountinfo: str) -> Iterator[tuple[str, Path, Path]]:
    """Hierarchy, its part that is mounted, and where."""
    for line in mountinfo.splitlines():
        fields = line.split()
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        top, mount = Path(fields[3]), Path(fields[4])
        if kind == "cgroup2":
            yield "v2", top, mount
        elif kind == "cgroup" and "memory" in options.split(","):
            yield "v1", top, mount


def group_room(limit: str, usage: str, stat: str, reclaimable: Sequence[str]) -> float:
    """Return what a control group still allows, in bytes; infinity without a limit.

    Args:
        limit: text of the limit's file.
        usage: text of the usage's file; it counts file cache.
        stat: text of `memory.stat`.
        reclaimable: its entries that the system gives up when memory is asked for.
    """
    if limit.strip() == "max":
        return float("inf")
    entries = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    cache = sum(int(entries.get(name, 0)) for name in reclaimable)
    return max(0, int(limit) - max(0, int(usage) - cache))


def check_host_memory(
    parts: Mapping[str, int], available_bytes: int, remedies: Sequence[Remedy], *, bound: str
) -> None:
    """Refuse what does not fit, before anything is allocated.

    Args:
        parts: purpose -> bytes that one rank is about to take.
        available_bytes: what it may take, the same on every rank.
        remedies: what would need less.
        bound: what sets the limit, as `HostRoom` says it.

    Raises:
        ValueError: shows the sum, and the three cheapest remedies that are enough by themselves;
            or, where none is, the three that save most.
    """
    needed = sum(parts.values())
    missing = needed - available_bytes
    if missing <= 0:
        return
    sums = {**parts, "in all": needed, f"available ({bound})": available_bytes}
    width = max(map(len, sums))
    lines = [f"  {name:<{width}}  {text.gib(size):>9}" for name, size in sums.items()]
    raise ValueError(
        "\n".join(
            [
                f"zero.offload = {text.gib(needed)} of host memory per rank: must be at most "
                f"{text.gib(available_bytes)}, {text.gib(missing)} are missing.",
                *lines,
                *_advice(missing, remedies),
            ]
        )
    )


def _advice(missing: int, remedies: Sequence[Remedy]) -> list[str]:
    useful = [remedy for remedy in remedies if remedy.saves_bytes > 0]
    enough = sorted((r for r in useful if r.saves_bytes >= missing), key=lambda r: r.cost_s)
    if enough:
        title, shown = "Use one of these, cheapest first:", enough
    elif useful:
        title = "None of these is enough alone; they save most:"
        shown = sorted(useful, key=lambda r: -r.saves_bytes)
    else:
        return ["Use more nodes, or a machine with more host memory."]
    shown = shown[:SHOWN_REMEDIES]
    width = max(len(remedy.action) for remedy in shown)
    return [
        title,
        *(f"  {r.action:<{width}}  saves {text.gib(r.saves_bytes):>9}" for r in shown),
    ]
