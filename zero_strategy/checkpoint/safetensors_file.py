"""Safetensors files, written by hand: the layout is known first, and a tensor at a time is held.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_strategy.checkpoint import files
from zero_strategy.checkpoint.manifest import Manifest

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What a header calls the dtypes."""


class Part(NamedTuple):
    """What a safetensors file says of a tensor."""

    key: str
    shape: Sequence[int]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def entry(self, begin: int) -> dict[str, Any]:
        """Return its entry in the header, where its bytes begin so far behind that."""
        offsets = [begin, begin + self.num_bytes]
        code = CODES[self.dtype]
        return {"dtype": code, "shape": list(self.shape), "data_offsets": offsets}


def key_of(name: str, whole: bool, offset: Sequence[int]) -> str:
    """Return a shard's key in its file: the tensor's name, with the offset unless it is whole."""
    return name if whole else f"{name}@{','.join(map(str, offset))}"


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that such a file cannot hold.

    Raises:
        ValueError: names the tensor.
    """
    if dtype not in CODES:
        raise ValueError(
            f"{name}: is of dtype {dtype}, must be one that a safetensors file holds. Store it as "
            "real numbers."
        )


def layout(parts: Iterable[Part], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """Return a safetensors file's header, and the bytes behind it."""
    tree: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for part in parts:
        begin, end = end, end + part.num_bytes
        tree[part.key] = part.entry(begin)
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[Sequence[int], torch.dtype, Callable[[], Tensor]]]
) -> None:
    """Write one file, of which a tensor at a time is in memory.

    Args:
        path: of the file, which must not exist or be empty.
        tensors: name -> shape, dtype, and what returns it, on the CPU.

    Raises:
        ValueError: a dtype that such a file cannot hold.
    """
    parts = [Part(name, shape, dtype) for name, (shape, dtype, _) in tensors.items()]
    for part in parts:
        check_dtype(part.key, part.dtype)
    parts.sort(key=lambda part: (-part.dtype.itemsize, part.key))
    header, _ = layout(parts, {"format": "pt"})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        files.write_all(descriptor, header)
        for part in parts:
            files.write_all(descriptor, bytes_of(tensors[part.key][2]().contiguous()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def header_of(manifest: Manifest, file: str) -> dict[str, Any]:
    """Return what a file's header must say, as a safetensors file says it."""
    parts = [
        (name, entry, chunk)
        for name, entry in manifest.tensors.items()
        for chunk in entry.chunks
        if chunk.file == file
    ]
    first = min((chunk.start for _, _, chunk in parts), default=0)
    tree: dict[str, Any] = {}
    for name, entry, chunk in parts:
        key = key_of(name, chunk.shape == entry.shape, chunk.offset)
        tree[key] = Part(key, chunk.shape, entry.dtype).entry(chunk.start - first)
    return tree


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, as a view."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(array)
