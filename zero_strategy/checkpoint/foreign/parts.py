"""Files below a folder, and parts of them: nothing outside is opened, nor read beyond the end."""

from __future__ import annotations

import io
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, final

from typing_extensions import override

from zero_strategy.checkpoint.files import read_all
from zero_strategy.checkpoint.foreign.unpickle import refuse


@final
@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file.

    Attributes:
        path: of the file, which is no link.
        start: first byte.
        length: in bytes; they were there when the part was made.
    """

    path: Path
    start: int
    length: int

    def slice(self, start: int, length: int) -> Part:
        """Return a part of it.

        Raises:
            RefusedError: it does not lie inside.
        """
        if not _is_count(start) or not _is_count(length) or start + length > self.length:
            refuse(
                f"points to {length!r} bytes at {start!r} of {self.path.name}, where "
                f"{self.length} are"
            )
        return Part(self.path, self.start + start, length)

    def whole(self) -> Part:
        """Return the file that it is of, as long as that is now."""
        return Part(self.path, 0, self.path.stat().st_size)

    def read(self) -> bytes:
        """Return the bytes."""
        data = bytearray(self.length)
        descriptor = _open(self.path)
        try:
            read_all(descriptor, self.start, memoryview(data))
        finally:
            os.close(descriptor)
        return bytes(data)

    def map(self) -> tuple[memoryview, int]:
        """Return memory that the file lies in, private and not read yet, and where the part begins.

        The length must not be 0.
        """
        begin = self.start - self.start % mmap.ALLOCATIONGRANULARITY
        descriptor = _open(self.path)
        try:
            length = self.start - begin + self.length
            # Writable, as torch wants memory to be; what were written would not reach the file.
            view = memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=begin))
        except ValueError as error:
            raise EOFError(f"{self.path} has become shorter") from error
        finally:
            os.close(descriptor)
        return view, self.start - begin

    def open(self) -> io.BufferedReader:
        """Return the part as a file of its own."""
        return io.BufferedReader(_Window(self))


def whole_file(folder: Path, name: str) -> Part:
    """Return a file below a folder.

    Args:
        folder: trusted to be the one meant.
        name: relative to it, as another program wrote it.

    Raises:
        RefusedError: the name leads out of the folder, over a link, or to no regular file.
    """
    path = below(folder, name)
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        refuse(f"names {name!r}, which must be a regular file")
    return Part(path, 0, status.st_size)


def below(folder: Path, name: str) -> Path:
    """Return a path below a folder that exists and reaches it over no link.

    Raises:
        RefusedError: the name cannot be such a path's.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\0" in name or "\\" in name:
        refuse(f"names {name!r}, must be a file inside the checkpoint")
    path = folder
    for step in pure.parts:
        path = path / step
        if path.is_symlink():
            refuse(f"names {name!r}, which is a link; links are not followed")
    if not path.exists():
        refuse(f"names {name!r}, which is missing")
    return path


def lone_file(path: Path) -> Part:
    """Return a file that the user named, who may have named a link to it."""
    whole = path.resolve()
    return whole_file(whole.parent, whole.name)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


@final
class _Window(io.RawIOBase):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part, self._at = part, 0
        self._descriptor = _open(part.path)

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._part.length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    @override
    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._part.length - self._at)]
        taken = os.preadv(self._descriptor, [view], self._part.start + self._at)
        self._at += taken
        return taken

    @override
    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
