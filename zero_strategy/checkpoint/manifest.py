"""What a checkpoint directory says of itself: one JSON file, written last, under its own checksum.

Nothing else is believed: a tensor's place, shape, dtype and checksums come from here, and a
directory without it is no checkpoint. Reading it runs no code and allocates nothing it names.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch

from zero_strategy.checkpoint.files import checksum, num_blocks

NAME = "manifest.json"
VERSION = 1
_FILE_NAME = re.compile(r"tensors-\d{1,9}\.safetensors")
# Larger than any real one, and small enough to be read at once.
_MOST_BYTES = 4 << 30
_HEAD, _TAIL = b'{"crc32":"%08x","content":', b"}\n"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


class DamagedError(ValueError):
    """A checkpoint is not as it was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEntry:
    """A box of a tensor, as one rank wrote it.

    Attributes:
        offset: of its first element, one number per dim.
        shape: of the box.
        file: name in the directory.
        start: first byte in the file.
        checksums: of its bytes, block by block.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A global tensor.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        chunks: boxes that hold each element once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_of(self, chunk: ChunkEntry) -> int:
        """Return the bytes of one of its chunks."""
        return math.prod(chunk.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        tensors: by canonical name.
        files: name -> bytes.
        meta: everything beside tensors, as JSON holds it.
    """

    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, int]
    meta: Any

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        content = {
            "format": "zero-strategy checkpoint",
            "version": VERSION,
            "files": dict(self.files),
            "tensors": {
                name: {
                    "shape": entry.shape,
                    "dtype": str(entry.dtype).removeprefix("torch."),
                    "chunks": [dataclasses.asdict(chunk) for chunk in entry.chunks],
                }
                for name, entry in self.tensors.items()
            },
            "meta": self.meta,
        }
        body = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        return _HEAD % checksum(body) + body + _TAIL

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a directory's manifest and hold it against the sizes of the files it names.

        Raises:
            DamagedError: something is not as it was written, or cannot be; says what.
            OSError: the file cannot be read.
        """
        manifest = cls.read_alone(folder)
        for problem in manifest.file_problems(folder):
            _refuse(problem)
        return manifest

    @classmethod
    def read_alone(cls, folder: Path) -> Manifest:
        """As `read`, whatever the files are."""
        path = folder / NAME
        if path.stat().st_size > _MOST_BYTES:
            _refuse(f"{NAME} has {path.stat().st_size} bytes")
        return cls.from_bytes(path.read_bytes())

    def file_problems(self, folder: Path) -> Iterator[str]:
        """Yield each file that is not there in its size."""
        for name, size in self.files.items():
            file = folder / name
            if file.is_symlink():
                yield f"{name} is a link, must be the file itself: copy it here"
            elif not file.is_file():
                yield f"{name} is missing"
            elif file.stat().st_size != size:
                yield f"{name} has {file.stat().st_size} bytes, must have {size}"

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Read a file's contents.

        Raises:
            DamagedError: the checksum differs, or an entry cannot be.
        """
        length = len(_HEAD % 0)
        body = raw[length : -len(_TAIL)]
        if raw != _HEAD % checksum(body) + body + _TAIL:
            _refuse(f"{NAME} does not match its checksum")
        content = json.loads(body)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            version = content.get("version") if isinstance(content, dict) else None
            _refuse(f"{NAME} is of version {version!r}, this release reads {VERSION}")
        files = _files(content.get("files"))
        tensors = content.get("tensors")
        if not isinstance(tensors, dict):
            _refuse("tensors must be an object")
        entries = {name: _tensor(name, entry, files) for name, entry in tensors.items()}
        return cls(tensors=entries, files=files, meta=content.get("meta"))


def _refuse(what: str) -> NoReturn:
    raise DamagedError(what)


def _files(tree: Any) -> dict[str, int]:
    if not isinstance(tree, dict):
        _refuse("files must be an object")
    for name, size in tree.items():
        if not _FILE_NAME.fullmatch(name):
            _refuse(f"{name!r} is no name of a file in a checkpoint")
        if not _is_count(size):
            _refuse(f"{name} cannot have {size!r} bytes")
    return tree


def _tensor(name: str, tree: Any, files: Mapping[str, int]) -> TensorEntry:
    if not isinstance(tree, dict) or set(tree) != {"shape", "dtype", "chunks"}:
        _refuse(f"{name}: must have shape, dtype and chunks")
    dtype = _DTYPES.get(tree["dtype"]) if isinstance(tree["dtype"], str) else None
    if dtype is None or not _are_counts(tree["shape"]) or not isinstance(tree["chunks"], list):
        _refuse(f"{name}: no such shape, dtype or chunks")
    shape = tuple(tree["shape"])
    chunks = tuple(_chunk(name, entry, shape, dtype, files) for entry in tree["chunks"])
    if not _cover(shape, chunks):
        _refuse(f"{name}: its parts do not hold each element once")
    return TensorEntry(shape=shape, dtype=dtype, chunks=chunks)


def _chunk(
    name: str, tree: Any, shape: tuple[int, ...], dtype: torch.dtype, files: Mapping[str, int]
) -> ChunkEntry:
    keys = {field.name for field in dataclasses.fields(ChunkEntry)}
    if not isinstance(tree, dict) or set(tree) != keys:
        _refuse(f"{name}: a part must have {', '.join(sorted(keys))}")
    if not all(map(_are_counts, (tree["offset"], tree["shape"], tree["checksums"]))):
        _refuse(f"{name}: a part has no such offset, shape or checksums")
    offset, size, sums = (tuple(tree[k]) for k in ("offset", "shape", "checksums"))
    inside = len(offset) == len(size) == len(shape) and all(
        o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True)
    )
    num_bytes = math.prod(size) * dtype.itemsize
    start, file = tree["start"], tree["file"]
    if not inside or file not in files or not _is_count(start):
        _refuse(f"{name}: a part lies outside the tensor or its file")
    if start + num_bytes > files[file] or len(sums) != num_blocks(num_bytes):
        _refuse(f"{name}: a part lies outside its file")
    return ChunkEntry(offset=offset, shape=size, file=file, start=start, checksums=sums)


def _cover(shape: tuple[int, ...], chunks: Sequence[ChunkEntry]) -> bool:
    """Whether boxes, all inside, hold each element once."""
    if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
        return False
    filled = [chunk for chunk in chunks if math.prod(chunk.shape)]
    if all(chunk.shape[1:] == shape[1:] for chunk in filled):
        # Cut along the first dim, as all of ours are: as many as they like, in one pass.
        rows = sorted((chunk.offset[0], chunk.shape[0]) for chunk in filled) if shape else []
        return len(filled) <= 1 or all(
            start + length <= following for (start, length), (following, _) in pairwise(rows)
        )
    return not any(_overlap(one, other) for one, other in combinations(filled, 2))


def _overlap(one: ChunkEntry, other: ChunkEntry) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))
