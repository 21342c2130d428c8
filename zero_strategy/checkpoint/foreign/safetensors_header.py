"""The header of a safetensors file of another program.

Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from zero_strategy.checkpoint.foreign.parts import Part
from zero_strategy.checkpoint.foreign.tensors import FileTensor
from zero_strategy.checkpoint.foreign.unpickle import refuse
from zero_strategy.checkpoint.safetensors_file import CODES

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_MOST_BYTES = 1 << 30
_LENGTH_BYTES = 8


@final
@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        file: of which it is.
        data: the bytes behind it.
        entries: name -> dtype, shape and place.
    """

    file: Part
    data: Part
    entries: Mapping[str, Any]

    def tensor(self, name: str) -> FileTensor:
        """Return a tensor of the file.

        Raises:
            RefusedError: there is none, or its entry cannot be.
        """
        entry = self.entries.get(name)
        keys = ("dtype", "shape", "data_offsets")
        if not isinstance(entry, dict) or not all(key in entry for key in keys):
            refuse(f"has no {name!r:.60} in {self.file.path.name}")
        dtype, shape, place = (entry[key] for key in keys)
        if dtype not in _DTYPES or not _are_counts(shape) or not _are_counts(place):
            refuse(f"has {name!r:.60} of {dtype!r:.20} {shape!r:.60}")
        if len(place) != 2 or place[0] > place[1]:
            refuse(f"has {name!r:.60} at {place!r:.60}")
        storage = self.data.slice(place[0], place[1] - place[0])
        return FileTensor(storage, _DTYPES[dtype], tuple(shape), 0, _contiguous(shape))


def is_safetensors(file: Part) -> bool:
    """Whether a file begins as such a file does, and a zip file does not."""
    return file.length > _LENGTH_BYTES and file.slice(_LENGTH_BYTES, 1).read() == b"{"


def read_header(file: Part) -> Header:
    """Read it.

    Raises:
        RefusedError: it is no header, or longer than the file.
    """
    length = int.from_bytes(file.slice(0, _LENGTH_BYTES).read(), "little")
    if length > _MOST_BYTES:
        refuse(f"has a header of {length} bytes in {file.path.name}")
    raw = file.slice(_LENGTH_BYTES, length).read()
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError) as error:
        refuse(f"has no JSON in the header of {file.path.name} ({type(error).__name__})")
    if not isinstance(tree, dict):
        refuse(f"has no object in the header of {file.path.name}")
    begin = _LENGTH_BYTES + length
    return Header(file, file.slice(begin, file.length - begin), tree)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _contiguous(shape: list[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
