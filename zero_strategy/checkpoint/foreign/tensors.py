"""Tensors that still lie in files of another program, and those put together from several."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from zero_strategy.checkpoint.foreign.parts import Part
from zero_strategy.checkpoint.foreign.unpickle import refuse
from zero_strategy.checkpoint.late import Late

_MOST_DIMS = 64


@final
@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor whose elements are in a file.

    Attributes:
        storage: the bytes that it is a view of.
        dtype: of its elements.
        shape: of it.
        offset: of its first element in the storage, in elements.
        stride: elements from one to the next, one number per dim.
    """

    storage: Part
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (*self.shape, self.offset, *self.stride)
        sized = len(self.shape) == len(self.stride) <= _MOST_DIMS
        if not sized or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            refuse(f"has a tensor of shape {self.shape}, stride {self.stride}, at {self.offset}")
        there = self.storage.length // self.dtype.itemsize
        # What is repeated takes memory that the file does not back.
        if self.offset + self._reach > there or self.numel > there:
            refuse(f"has a tensor of shape {self.shape} in a storage of {there} elements")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def _reach(self) -> int:
        """Elements of the storage from the first to the last of the tensor."""
        if not self.numel:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def place(self) -> tuple[Any, ...]:
        """The same for tensors that are the same memory."""
        return self.storage, self.dtype, self.shape, self.offset, self.stride

    def narrow(self, start: int, length: int) -> FileTensor:
        """Return a part of a tensor of one dim."""
        (step,) = self.stride
        at = self.offset + start * step
        return FileTensor(self.storage, self.dtype, (length,), at, self.stride)

    def read(self) -> Tensor:
        """Return the tensor on the CPU, where possible as the file's own pages."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype)
        itemsize = self.dtype.itemsize
        part = self.storage.slice(self.offset * itemsize, self._reach * itemsize)
        buffer, begin = part.map()
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=part.length, offset=begin)
        if raw.data_ptr() % itemsize:
            raw = _fresh((part.length,), torch.uint8).copy_(raw)
        return raw.view(self.dtype).as_strided(self.shape, self.stride).contiguous()


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory that goes back to the system when it is let go.

    That of malloc would not: small objects come to lie in what a tensor left.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


@final
@dataclass(frozen=True, slots=True)
class Built:
    """A tensor that is made from others when it is needed.

    Attributes:
        shape: of it.
        dtype: of its elements.
        read: makes it, on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


Lazy = FileTensor | Built
"""What is not in memory yet."""


def late(tensor: Lazy, *, dtype: torch.dtype | None = None) -> Late:
    """Return a tensor as a checkpoint is saved from.

    Args:
        tensor: not read yet.
        dtype: of what is saved; by default its own.
    """
    kept = tensor.dtype if dtype is None else dtype
    like = torch.empty(tensor.shape, dtype=kept, device="meta")
    return Late(like, partial(_read_as, tensor, kept), _never_written)


def _read_as(tensor: Lazy, dtype: torch.dtype) -> Tensor:
    return tensor.read().to(dtype)


def _never_written(_: Tensor) -> NoReturn:
    raise AssertionError("a file of another program is never written to")


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


def from_boxes(
    shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[tuple[Box, Callable[[], FileTensor]]]
) -> Built:
    """Put a tensor together from boxes of it.

    Args:
        shape: of the whole.
        dtype: of its elements.
        boxes: which part, and what returns it.

    Raises:
        RefusedError: they do not hold each element once.
    """
    whole = tuple(shape)
    if not _cover(whole, [box for box, _ in boxes]):
        refuse(f"has a tensor of shape {whole} whose parts do not hold each element once")

    def read() -> Tensor:
        parts = [_checked(part(), size, dtype) for (_, size), part in boxes]
        _check_backed(math.prod(whole) * dtype.itemsize, parts)
        if len(parts) == 1:
            return parts[0].read()
        target = _fresh(whole, dtype)
        for ((offset, size), _), part in zip(boxes, parts, strict=True):
            place = target
            for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
                place = place.narrow(dim, start, length)
            place.copy_(part.read())
        return target

    return Built(whole, dtype, read)


def _checked(part: FileTensor, shape: tuple[int, ...], dtype: torch.dtype) -> FileTensor:
    if part.shape != shape or part.dtype != dtype:
        refuse(f"has {part.shape} {part.dtype} where {shape} {dtype} should be")
    return part


def _check_backed(num_bytes: int, parts: Sequence[FileTensor]) -> None:
    """Refuse many parts that are the same few bytes, before memory is taken for them."""
    there = sum(path.stat().st_size for path in {part.storage.path for part in parts})
    if num_bytes > there:
        refuse(f"has a tensor of {num_bytes} bytes in files of {there}")


def _cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    if not all(_inside(box, shape) for box in boxes):
        return False
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    filled = [box for box in boxes if math.prod(box[1])]
    if all(size[1:] == shape[1:] for _, size in filled):
        rows = sorted((offset[0], size[0]) for offset, size in filled) if shape else []
        return all(start + length <= then for (start, length), (then, _) in pairwise(rows))
    return not any(_overlap(one, other) for one, other in combinations(filled, 2))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    offset, size = box
    numbers = (*offset, *size, *shape)
    if len(offset) != len(size) or len(size) != len(shape):
        return False
    return all(type(n) is int and n >= 0 for n in numbers) and all(
        o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(*one, *other, strict=True))


def from_flat(shape: Sequence[int], dtype: torch.dtype, pieces: Iterable[FileTensor]) -> Built:
    """Put a tensor together from pieces that follow one another in its elements' order.

    Args:
        shape: of the whole.
        dtype: of its elements.
        pieces: tensors of one dim.
    """
    whole, parts = tuple(shape), tuple(pieces)
    assert sum(part.numel for part in parts) == math.prod(whole), "cut to fit"

    def read() -> Tensor:
        target, at = _fresh((math.prod(whole),), dtype), 0
        for part in parts:
            target.narrow(0, at, part.numel).copy_(part.read())
            at += part.numel
        return target.view(whole)

    return Built(whole, dtype, read)
