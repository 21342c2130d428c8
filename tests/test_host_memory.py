"""Host memory: what a rank may still take, read from fake trees of control groups, and refusals."""

from pathlib import Path

import pytest

from zero_strategy.planning.host_memory import Remedy, check_host_memory, host_room

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712
V2_MOUNT = "30 24 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def machine(root: Path, *, available: int, cgroup: str, mounts: str) -> Path:
    """A file tree with the files of `/proc` that are read."""
    (root / "proc/self").mkdir(parents=True)
    meminfo = (
        f"MemTotal: 999999999 kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total: 0\n"
    )
    (root / "proc/meminfo").write_text(meminfo)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(f"24 1 8:1 / / rw - ext4 /dev/root rw\n{mounts}")
    return root


def v2_group(root: Path, path: str, *, limit: int | str, used: int = 0, **stat: int) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text("max\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


def v1_group(root: Path, path: str, *, limit: int, used: int = 0, **stat: int) -> None:
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{k} {v}\n" for k, v in stat.items()))


@pytest.fixture
def v2(tmp_path):
    return machine(
        tmp_path, available=100 * GIB, cgroup="0::/job/task\n", mounts=V2_MOUNT.format(top="/")
    )


@pytest.fixture
def v1(tmp_path):
    cgroup = "9:name=systemd:/\n4:memory,cpu:/job\n0::/\n"
    return machine(tmp_path, available=100 * GIB, cgroup=cgroup, mounts=V1_MOUNT.format(top="/"))


@pytest.mark.parametrize(("task", "job", "room"), [(9, 40, 9), (40, 9, 9), (200, 300, 100)])
def test_the_smallest_limit_on_the_way_to_the_root_counts(v2, task, job, room):
    v2_group(v2, "job/task", limit=task * GIB)
    v2_group(v2, "job", limit=job * GIB)
    assert host_room(1, root=v2).available_bytes == room * GIB


def test_the_answer_names_what_bounds_it(v2):
    v2_group(v2, "job/task", limit="max")
    v2_group(v2, "job", limit=8 * GIB)
    assert host_room(2, root=v2).bound == "/sys/fs/cgroup/job/memory.max, shared by 2 ranks"
    v2_group(v2, "job", limit="max")
    assert host_room(1, root=v2).bound == "MemAvailable"


def test_file_cache_counts_as_free_and_shared_memory_does_not(v2):
    stat = {"file": 5 * GIB, "shmem": 2 * GIB, "inactive_file": 2 * GIB, "active_file": GIB}
    v2_group(v2, "job/task", limit=10 * GIB, used=6 * GIB, **stat)
    assert host_room(1, root=v2).available_bytes == 7 * GIB


def test_a_group_that_is_held_up_before_its_limit_counts_as_limited_there(v2):
    v2_group(v2, "job/task", limit=10 * GIB)
    (v2 / "sys/fs/cgroup/job/task/memory.high").write_text(f"{3 * GIB}\n")
    assert host_room(1, root=v2).available_bytes == 3 * GIB


def test_a_group_above_its_limit_leaves_nothing(v2):
    v2_group(v2, "job/task", limit=GIB, used=2 * GIB)
    assert host_room(1, root=v2).available_bytes == 0


def test_limits_of_version_1_count_with_their_whole_subtree(v1):
    stat = {"inactive_file": 0, "total_inactive_file": GIB, "total_active_file": GIB}
    v1_group(v1, "job", limit=20 * GIB, used=5 * GIB, **stat)
    v1_group(v1, "", limit=UNLIMITED_V1)
    assert host_room(1, root=v1).available_bytes == 17 * GIB


def test_without_limits_the_machines_memory_counts(v1):
    v1_group(v1, "job", limit=UNLIMITED_V1, used=3 * GIB)
    assert host_room(1, root=v1).available_bytes == 100 * GIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../elsewhere"])
def test_a_container_finds_its_group_at_the_mount(tmp_path, path):
    root = machine(
        tmp_path,
        available=100 * GIB,
        cgroup=f"0::{path}\n",
        mounts=V2_MOUNT.format(top="/docker/abc"),
    )
    v2_group(root, "", limit=7 * GIB)
    assert host_room(1, root=root).available_bytes == 7 * GIB


def test_ranks_of_one_machine_share_what_there_is(v2):
    v2_group(v2, "job/task", limit=8 * GIB)
    assert host_room(4, root=v2).available_bytes == 2 * GIB


def test_this_machine_tells_its_memory():
    assert host_room(1).available_bytes > 0


PARTS = {"weights and moments": 72 * GIB, "gradients": 24 * GIB}
REMEDIES = (
    Remedy(action="more nodes", saves_bytes=48 * GIB, cost_s=9.0),
    Remedy(action="a smaller share", saves_bytes=17 * GIB, cost_s=0.5),
    Remedy(action="bf16 gradients", saves_bytes=12 * GIB, cost_s=0.0),
    Remedy(action="accumulate=1", saves_bytes=16 * GIB, cost_s=0.1),
    Remedy(action="the costliest", saves_bytes=90 * GIB, cost_s=90.0),
)


def test_what_fits_is_not_refused():
    check_host_memory(PARTS, 96 * GIB, REMEDIES, bound="MemAvailable")


def test_a_refusal_shows_the_sum_and_the_three_cheapest_remedies_that_are_enough():
    with pytest.raises(ValueError) as refused:
        check_host_memory(PARTS, 80 * GIB, REMEDIES, bound="MemAvailable")
    assert str(refused.value).splitlines() == [
        "zero.offload = 96.0 GiB of host memory per rank: must be at most 80.0 GiB, 16.0 GiB are "
        "missing.",
        "  weights and moments        72.0 GiB",
        "  gradients                  24.0 GiB",
        "  in all                     96.0 GiB",
        "  available (MemAvailable)   80.0 GiB",
        "Use one of these, cheapest first:",
        "  accumulate=1     saves  16.0 GiB",
        "  a smaller share  saves  17.0 GiB",
        "  more nodes       saves  48.0 GiB",
    ]


def test_remedies_that_are_not_enough_alone_are_said_to_be_so():
    with pytest.raises(ValueError) as refused:
        check_host_memory(PARTS, 60 * GIB, REMEDIES[1:4], bound="MemAvailable")
    lines = str(refused.value).splitlines()
    assert lines[-4] == "None of these is enough alone; they save most:"
    assert [line.split("  ")[1].strip() for line in lines[-3:]] == [
        "a smaller share",
        "accumulate=1",
        "bf16 gradients",
    ]


def test_a_refusal_without_remedies_says_what_is_left_to_do():
    with pytest.raises(ValueError, match="Use more nodes, or a machine with more host memory"):
        check_host_memory(PARTS, 1, (), bound="MemAvailable")
