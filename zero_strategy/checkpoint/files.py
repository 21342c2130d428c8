"""Bytes that reach the disk, and stay what they were: checksums, whole writes, names that last."""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from zero_strategy.guards.progress import PROGRESS

BLOCK_BYTES = 16 << 20
"""Bytes under one checksum: what is read at least to know that a part is as it was written."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def blocks(data: memoryview) -> Iterator[memoryview]:
    """Yield data in blocks, each under its own checksum."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def num_blocks(num_bytes: int) -> int:
    """Return how many blocks so many bytes are."""
    return -(-num_bytes // BLOCK_BYTES)


def checksum(data: bytes | memoryview) -> int:
    """Return the CRC32 of data."""
    return zlib.crc32(data)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it: the system may take less than it is given.

    Raises:
        OSError: as the system says; also where it takes nothing.
    """
    left = memoryview(data)
    while len(left):
        taken = os.write(descriptor, left)
        if taken == 0:
            raise OSError(errno.EIO, "nothing was written")
        left = left[taken:]
        PROGRESS.made += 1


def read_all(descriptor: int, start: int, buffer: memoryview) -> None:
    """Fill a buffer from a place in a file.

    Raises:
        EOFError: the file ends before.
    """
    filled = 0
    while filled < len(buffer):
        taken = os.preadv(descriptor, [buffer[filled:]], start + filled)
        if taken == 0:
            raise EOFError(f"ends at byte {start + filled}, must reach {start + len(buffer)}")
        filled += taken
        PROGRESS.made += 1


def write_file(path: Path, data: bytes) -> None:
    """Create a file with its contents on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths change their contents in one step, so that neither is ever without.

    Returns: whether this file system can do so; where it cannot, nothing was changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        rename = libc.renameat2
    except AttributeError:  # not Linux
        return False
    paths = os.fsencode(one), os.fsencode(other)
    code = rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    if code == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
