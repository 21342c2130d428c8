"""Storage under `torch.distributed.checkpoint`: its planner cuts and matches, this has the bytes.

Each rank writes its shards into one safetensors file whose layout is known before the first byte,
so that any tool reads it. What makes a directory a checkpoint is the manifest, which the
coordinator writes once it has seen that every planned shard was written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from zero_strategy.checkpoint import files
from zero_strategy.checkpoint.manifest import (
    NAME,
    ChunkEntry,
    DamagedError,
    Manifest,
    TensorEntry,
)
from zero_strategy.checkpoint.safetensors_file import Part, bytes_of, check_dtype, key_of, layout


class _Written(NamedTuple):
    """What a rank tells the coordinator of a shard."""

    file: str
    file_bytes: int
    start: int
    checksums: tuple[int, ...]


@final
class ShardWriter(StorageWriter):
    """Writes a new directory.

    Args:
        folder: exists, is empty, and the same on every rank.
        meta: what the manifest holds beside tensors; the coordinator's counts.
        commit: called by the coordinator once all is on the disk.
    """

    def __init__(self, folder: Path, meta: Any, commit: Callable[[], None]) -> None:
        self._folder, self._meta, self._commit = folder, meta, commit
        self._rank = 0

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @override
    # The name of the last parameter is what DCP looks for before it tells the rank.
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank", 0))

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            _checked(item)
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = write_order(plan.items)
        header, size = layout(map(_part, items))
        name = f"tensors-{self._rank}.safetensors"
        results = []
        if items:
            path = self._folder / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                files.write_all(descriptor, header)
                start = len(header)
                for item in items:
                    sums = _write(descriptor, planner.resolve_data(item), item)
                    written = _Written(name, len(header) + size, start, sums)
                    num_bytes = _part(item).num_bytes
                    results.append(WriteResult(item.index, num_bytes, written))
                    start += num_bytes
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {_place(r.index): r.storage_data for of_rank in results for r in of_rank}
        tensors: dict[str, TensorEntry] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "only tensors were planned"
            chunks = []
            for chunk in entry.chunks:
                shard = written.pop((name, tuple(chunk.offsets)), None)
                if shard is None:
                    raise RuntimeError(f"{name}: the part at {tuple(chunk.offsets)} is missing")
                chunks.append(
                    ChunkEntry(
                        offset=tuple(chunk.offsets),
                        shape=tuple(chunk.sizes),
                        file=shard.file,
                        start=shard.start,
                        checksums=shard.checksums,
                    )
                )
            tensors[name] = TensorEntry(
                shape=tuple(entry.size), dtype=entry.properties.dtype, chunks=tuple(chunks)
            )
        sizes = {r.storage_data.file: r.storage_data.file_bytes for rs in results for r in rs}
        manifest = Manifest(tensors=tensors, files=sizes, meta=self._meta).to_bytes()
        files.write_file(self._folder / NAME, manifest)
        files.sync_folder(self._folder)
        self._commit()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def write_order(items: Iterable[WriteItem]) -> list[WriteItem]:
    """Return planned shards as they lie in a file: aligned without padding, then by name."""
    return sorted(items, key=lambda item: (-_checked(item).itemsize, _key(item)))


def _checked(item: WriteItem) -> torch.dtype:
    """Return the dtype of a planned shard.

    Raises:
        ValueError: it is no tensor, or of a dtype that a safetensors file cannot hold.
    """
    data = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or data is None:
        raise ValueError(f"{item.index.fqn}: must be a tensor to be stored as one.")
    check_dtype(item.index.fqn, data.properties.dtype)
    return data.properties.dtype


def _key(item: WriteItem) -> str:
    """The shard's name in its file: the tensor's, with the offset unless it is whole."""
    data = item.tensor_data
    assert data is not None, "checked"
    whole = tuple(data.chunk.sizes) == tuple(data.size)
    return key_of(item.index.fqn, whole, data.chunk.offsets)


def _part(item: WriteItem) -> Part:
    data = item.tensor_data
    assert data is not None, "checked"
    return Part(_key(item), data.chunk.sizes, data.properties.dtype)


def _write(descriptor: int, data: Any, item: WriteItem) -> tuple[int, ...]:
    """Write a shard; its checksums are of the memory, before anything is written."""
    assert isinstance(data, Tensor), "only tensors were planned"
    view = bytes_of(data.detach().cpu().contiguous())
    if len(view) != _part(item).num_bytes:
        raise RuntimeError(f"{item.index.fqn}: changed its size while it was saved")
    sums = []
    for block in files.blocks(view):
        sums.append(files.checksum(block))
        files.write_all(descriptor, block)
    return tuple(sums)


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


@final
class ShardReader(StorageReader):
    """Reads a directory, and holds every byte it uses against its checksum.

    Args:
        folder: of the checkpoint.
        manifest: what it says of itself.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._chunks = {
            (name, chunk.offset): chunk
            for name, entry in manifest.tensors.items()
            for chunk in entry.chunks
        }

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(stored_tensors(self._manifest)))

    @override
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, item: ReadItem) -> Tensor:
        """Return the part of a shard that is asked for, from the blocks that hold it."""
        name, offset = _place(item.storage_index)
        entry, chunk = self._manifest.tensors[name], self._chunks[name, offset]
        dtype = entry.dtype
        starts, lengths = list(item.storage_offsets), list(item.lengths)
        row_bytes = math.prod(chunk.shape[1:]) * dtype.itemsize
        if not starts:  # 0-dim
            return (
                _read_bytes(self._folder, name, entry, chunk, 0, dtype.itemsize)
                .view(dtype)
                .view(())
            )
        first, count = starts[0], lengths[0]
        rows = _read_bytes(self._folder, name, entry, chunk, first * row_bytes, count * row_bytes)
        part = rows.view(dtype).view(count, *chunk.shape[1:])
        return narrow_tensor_by_index(part, [0, *starts[1:]], lengths)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_tensor(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """Read a whole tensor in this process alone.

    Args:
        folder: of the checkpoint.
        manifest: what it says of itself.
        name: of the tensor.

    Raises:
        DamagedError: names tensor, file and bytes.
    """
    entry = manifest.tensors[name]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for chunk in entry.chunks:
        part = _read_bytes(folder, name, entry, chunk, 0, entry.bytes_of(chunk)).view(entry.dtype)
        narrow_tensor_by_index(whole, chunk.offset, chunk.shape).copy_(part.view(chunk.shape))
    return whole


def _read_bytes(
    folder: Path, name: str, entry: TensorEntry, chunk: ChunkEntry, start: int, length: int
) -> Tensor:
    """Read bytes of a shard, (length,), uint8, and check the blocks they lie in."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    first = start // files.BLOCK_BYTES
    last = (start + length - 1) // files.BLOCK_BYTES
    begin = first * files.BLOCK_BYTES
    end = min((last + 1) * files.BLOCK_BYTES, entry.bytes_of(chunk))
    buffer = torch.empty(end - begin, dtype=torch.uint8)
    view = bytes_of(buffer)
    descriptor = os.open(folder / chunk.file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        files.read_all(descriptor, chunk.start + begin, view)
    except EOFError as error:
        raise DamagedError(f"{name}: {chunk.file} {error}") from error
    finally:
        os.close(descriptor)
    for index, block in enumerate(files.blocks(view), start=first):
        if files.checksum(block) != chunk.checksums[index]:
            place = chunk.start + index * files.BLOCK_BYTES
            raise DamagedError(
                f"{name}: {chunk.file} is not as it was written, between bytes {place} and "
                f"{place + len(block)}"
            )
    return buffer.narrow(0, start - begin, length)


def stored_tensors(manifest: Manifest) -> Mapping[str, TensorStorageMetadata]:
    """Return a manifest's tensors as DCP describes them."""
    return {
        name: TensorStorageMetadata(
            TensorProperties(dtype=entry.dtype),
            torch.Size(entry.shape),
            [ChunkStorageMetadata(torch.Size(c.offset), torch.Size(c.shape)) for c in entry.chunks],
        )
        for name, entry in manifest.tensors.items()
    }
