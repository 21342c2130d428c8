"""How DeepSpeed lays parameters out in the flat tensors of its ranks, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_strategy.checkpoint.foreign.tensors import Built, FileTensor, from_flat
from zero_strategy.checkpoint.foreign.unpickle import refuse

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatGroup:
    """Parameters that share one flat tensor on each rank.

    Attributes:
        shapes: by name, in the order in which they lie there.
        gaps: elements behind each of them that are nobody's.
        num_ranks: over which they are cut.
        each_cut: each parameter is cut by itself, as at stage 3; otherwise all in one row.
        most_padding: elements that the row of all ranks may be longer than it must.
    """

    shapes: Shapes
    gaps: tuple[int, ...]
    num_ranks: int
    each_cut: bool
    most_padding: int

    def tensors(self, parts: Sequence[Any], what: str) -> dict[str, Built]:
        """Return the parameters, or a slot of theirs, from the flat tensors of all ranks.

        Raises:
            RefusedError: the flat tensors are not as long as the parameters say, or missing.
        """
        flat = [part for part in parts if isinstance(part, FileTensor) and len(part.shape) == 1]
        if len(flat) != self.num_ranks or len({part.dtype for part in flat}) != 1:
            refuse(f"has {what} on {len(flat)} of {self.num_ranks} ranks")
        return self._each_cut(flat, what) if self.each_cut else self._in_a_row(flat, what)

    def _in_a_row(self, flat: Sequence[FileTensor], what: str) -> dict[str, Built]:
        num_wanted = sum(map(math.prod, self.shapes.values())) + sum(self.gaps)
        num_there = sum(part.numel for part in flat)
        if not num_wanted <= num_there <= num_wanted + self.most_padding:
            refuse(f"has {num_there} elements of {what}, must have {num_wanted}")
        found, start = {}, 0
        for (name, shape), gap in zip(self.shapes.items(), self.gaps, strict=True):
            end = start + math.prod(shape)
            pieces, begin = [], 0
            for part in flat:
                first, last = max(start, begin), min(end, begin + part.numel)
                if first < last:
                    pieces.append(part.narrow(first - begin, last - first))
                begin += part.numel
            found[name] = from_flat(shape, flat[0].dtype, pieces)
            start = end + gap
        return found

    def _each_cut(self, flat: Sequence[FileTensor], what: str) -> dict[str, Built]:
        lengths = [-(-math.prod(shape) // self.num_ranks) for shape in self.shapes.values()]
        for rank, part in enumerate(flat):
            if part.numel != sum(lengths):
                refuse(
                    f"has {part.numel} elements of {what} on rank {rank}, must have "
                    f"{sum(lengths)}; state that lay on NVMe is not in these files"
                )
        found, start = {}, 0
        for (name, shape), length in zip(self.shapes.items(), lengths, strict=True):
            pieces, left = [], math.prod(shape)
            for part in flat:
                pieces.append(part.narrow(start, min(left, length)))
                left -= pieces[-1].numel
            found[name] = from_flat(shape, flat[0].dtype, pieces)
            start += length
        return found


def checked_shapes(value: Any, what: str) -> Shapes:
    """Return names and shapes as a file has them.

    Raises:
        RefusedError: they are none.
    """
    if not isinstance(value, dict):
        refuse(f"has no {what}")
    for name, shape in value.items():
        counts = isinstance(shape, tuple) and all(
            type(n) is int and 0 <= n < 1 << 63 for n in shape
        )
        if not isinstance(name, str) or not counts:
            refuse(f"has {name!r:.60} of shape {shape!r:.60} in {what}")
    return value
