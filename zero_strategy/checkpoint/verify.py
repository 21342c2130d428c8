"""Whether a checkpoint directory is what was written, without loading it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint import files, storage
from zero_strategy.checkpoint.manifest import NAME, ChunkEntry, DamagedError, Manifest
from zero_strategy.checkpoint.safetensors_file import header_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found."""

    num_tensors: int
    num_bytes: int
    """Of all tensors."""
    read_bytes: int
    """Of these, read and held against their checksums."""
    problems: tuple[str, ...]
    """One line each; none where the checkpoint is whole."""


def verify(path: str | Path, *, deep: bool) -> Verdict:
    """Look at a checkpoint directory.

    Args:
        path: the directory.
        deep: read every byte; otherwise the manifest and the files' sizes alone.

    Raises:
        ValueError: there is no checkpoint to look at.

    Cost: no collective, no GPU; memory of one block, 16 MiB, beside the manifest.

    Example:
        >>> verify("step-100.ckpt", deep=True).problems
        ()
    """
    folder = Path(path)
    storage.check_exists(folder)
    if not storage.is_checkpoint(folder):
        raise ValueError(storage.why_not_a_checkpoint(folder))
    try:
        manifest = Manifest.read_alone(folder)
    except (DamagedError, RecursionError) as error:
        problem = str(error) or f"{NAME} is nested too deeply"
        return Verdict(num_tensors=0, num_bytes=0, read_bytes=0, problems=(problem,))
    problems = list(manifest.file_problems(folder))
    num_bytes = sum(entry.num_bytes for entry in manifest.tensors.values())
    if deep:
        for name in manifest.files:
            if (folder / name).is_file() and not (folder / name).is_symlink():
                problems += _file_problems(folder, manifest, name)
    return Verdict(
        num_tensors=len(manifest.tensors),
        num_bytes=num_bytes,
        read_bytes=num_bytes if deep else 0,
        problems=tuple(problems),
    )


def _file_problems(folder: Path, manifest: Manifest, name: str) -> Iterator[str]:
    chunks = sorted(
        (
            (tensor, chunk, entry.bytes_of(chunk))
            for tensor, entry in manifest.tensors.items()
            for chunk in entry.chunks
            if chunk.file == name
        ),
        key=lambda named: named[1].start,
    )
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        begin = min((chunk.start for _, chunk, _ in chunks), default=0)
        yield from _header_problems(descriptor, begin, manifest, name)
        for tensor, chunk, num_bytes in chunks:
            yield from _chunk_problems(descriptor, tensor, chunk, num_bytes)
    finally:
        os.close(descriptor)


def _header_problems(descriptor: int, length: int, manifest: Manifest, name: str) -> Iterator[str]:
    """The file's own header is for other programs; we read by the manifest."""
    buffer = bytearray(length)
    try:
        files.read_all(descriptor, 0, memoryview(buffer))
        there = json.loads(bytes(buffer[8:]))
    except (EOFError, ValueError):
        there = None
    if there != header_of(manifest, name) or int.from_bytes(buffer[:8], "little") != length - 8:
        yield f"{name}: its header, bytes 0 to {length}, is not as it was written"


def _chunk_problems(
    descriptor: int, tensor: str, chunk: ChunkEntry, num_bytes: int
) -> Iterator[str]:
    for index, wanted in enumerate(chunk.checksums):
        start = index * files.BLOCK_BYTES
        block = memoryview(bytearray(min(files.BLOCK_BYTES, num_bytes - start)))
        begin = chunk.start + start
        try:
            files.read_all(descriptor, begin, block)
        except EOFError as error:
            yield f"{tensor}: {chunk.file} {error}"
            return
        if files.checksum(block) != wanted:
            end = begin + len(block)
            yield f"{tensor}: {chunk.file} is not as it was written, in bytes {begin} to {end}"
