"""How a unit's parameters are cut into chunks of bounded, equal size.

A chunk is what moves between tiers and what a lane steps at a time: small enough that copies and
passes of neighbours overlap, large enough that a copy runs at the link's speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements; chunks have multiples but for a unit's last, so that views are aligned for vectors."""
PAGE = 2048
"""Elements; chunks start at multiples, so that no two share a page of memory in any dtype."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one parameter's shard that lies in a chunk.

    Attributes:
        name: the parameter.
        start: first element in the shard.
        offset: first element in the chunk.
        length: elements.
    """

    name: str
    start: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """A run of elements of one unit.

    Attributes:
        unit: name of the unit.
        begin: first element among those of all units.
        length: elements.
        pieces: the parts of shards it holds, in order.
    """

    unit: str
    begin: int
    length: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All chunks, unit by unit in forward order.

    Attributes:
        chunks: in order of `begin`.
        length: elements of all chunks with the gaps between them.
        slot_length: elements of the longest chunk.
        sizes: parameter -> elements of its shard.
    """

    chunks: tuple[ChunkLayout, ...]
    length: int
    slot_length: int
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, units: Mapping[str, Mapping[str, int]], max_length: int) -> Layout:
        """Cut units into chunks.

        Args:
            units: unit -> parameter -> elements of its shard, in forward order.
            max_length: largest chunk, in elements; a multiple of `ALIGNMENT`.
        """
        assert max_length % ALIGNMENT == 0, "chunks are aligned"
        chunks: list[ChunkLayout] = []
        begin = 0
        for unit, sizes in units.items():
            for pieces in _cut(list(sizes.items()), max_length):
                length = sum(piece.length for piece in pieces)
                chunks.append(ChunkLayout(unit, begin, length, tuple(pieces)))
                begin += _rounded_up(length, PAGE)
        return cls(
            chunks=tuple(chunks),
            length=begin,
            slot_length=max((chunk.length for chunk in chunks), default=0),
            sizes={name: n for sizes in units.values() for name, n in sizes.items()},
        )

    def within(self, bytes_per_element: int, budget_gib: float | None) -> range:
        """Return the first chunks that fit a budget; all without one."""
        if budget_gib is None:
            return range(len(self.chunks))
        sizes = (bytes_per_element * chunk.length for chunk in self.chunks)
        sums = itertools.accumulate(sizes)
        return range(sum(held <= budget_gib * 2**30 for held in sums))


def longest_chunk(total: int, max_length: int) -> int:
    """Return the elements of the longest chunk of a unit.

    Args:
        total: elements of the unit.
        max_length: as in `Layout.of`.
    """
    if not total:
        return 0
    length = _rounded_up(math.ceil(total / math.ceil(total / max_length)), ALIGNMENT)
    return min(length, total)


def _cut(sizes: Sequence[tuple[str, int]], max_length: int) -> list[list[Piece]]:
    """Cut a unit into as few chunks as can be, all but the last of one size."""
    length = longest_chunk(sum(n for _, n in sizes), max_length)
    if not length:
        return []
    chunks: list[list[Piece]] = [[]]
    room = length
    for name, n in sizes:
        start = 0
        while start < n:
            if not room:
                chunks.append([])
                room = length
            taken = min(room, n - start)
            chunks[-1].append(Piece(name, start, length - room, taken))
            start += taken
            room -= taken
    return chunks


def _rounded_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
