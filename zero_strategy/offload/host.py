"""Host memory of the engine, known to CUDA where copies need it."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from zero_strategy.kernels.adam import AdamState, join, split
from zero_strategy.offload.layout import ChunkLayout, Layout
from zero_strategy.offload.link import DONE, Copied
from zero_strategy.offload.snapshot import Snapshot

PAGE_BYTES = 4096
REGISTER_BYTES = 1 << 30
"""At most so much is registered per call; calls for different ranges run at the same time."""
NUM_THREADS = 8

MomentName = Literal["m", "v"]
"""Adam's first and second moment."""
MOMENTS: tuple[MomentName, ...] = ("m", "v")


def moment_of(state: AdamState, moment: MomentName) -> Tensor:
    """Return one of a state's moments."""
    return state.m if moment == "m" else state.v


class _Slab(mmap.mmap):
    """Zeroed memory of this process alone, which the system provides page by page on first use.

    A forked child does not get it: while one lives, the system would copy what a pass writes to.
    """

    registered: dict[int, int]
    """Address -> process that registered memory there."""

    @classmethod
    def of(cls, num_bytes: int) -> _Slab:
        slab = cls(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        slab.registered = {}
        # Large pages: fewer to provide, to register and to look up. Absent on other systems.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if advice in dir(mmap):
                with contextlib.suppress(OSError):
                    slab.madvise(getattr(mmap, advice))
        return slab

    def __del__(self) -> None:
        if self.registered and not sys.is_finalizing():
            cudart: Any = torch.cuda.cudart()
            for address, process in self.registered.items():
                if process == os.getpid():
                    cudart.cudaHostUnregister(address)


class Memory:
    """Zeroed host memory that begins with a page.

    Args:
        length: elements.
        dtype: of the elements.
    """

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self._slab = _Slab.of(max(1, length) * dtype.itemsize)
        self.values = torch.frombuffer(self._slab, dtype=dtype, count=max(1, length))[:length]
        """(length,)."""

    def register(self, parts: Sequence[Tensor]) -> None:
        """Let CUDA copy to and from parts of it while others run, for as long as it lives.

        Args:
            parts: of `values`, contiguous, each on pages of its own.

        Raises:
            MemoryError: the system does not let this process lock so much.
        """
        cudart: Any = torch.cuda.cudart()

        def lock(part: Tensor) -> int:
            return int(cudart.cudaHostRegister(part.data_ptr(), part.nbytes, 0))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            codes = list(pool.map(lock, parts))
        for part, code in zip(parts, codes, strict=True):
            if not code:
                self._slab.registered[part.data_ptr()] = os.getpid()
        failures = [code for code in codes if code]
        if failures:
            total = sum(part.nbytes for part in parts) / 2**30
            raise MemoryError(
                f"{total:.1f} GiB of host memory could not be pinned (CUDA error {failures[0]}): "
                "must fit into what the system lets a process lock. Raise `ulimit -l`, or set "
                "zero.offload.lanes = 'cpu'."
            )


def buffers(count: int, length: int, dtype: torch.dtype, *, pinned: bool) -> list[Tensor]:
    """Return zeroed buffers in host memory, which together take what is asked for and no more.

    Args:
        count: buffers.
        length: elements of each.
        dtype: of the elements.
        pinned: register them with CUDA. `pin_memory=True` would round up to a power of two.
    """
    per_page = PAGE_BYTES // dtype.itemsize
    padded = -(-length // per_page) * per_page
    memory = Memory(count * padded, dtype)
    rows = memory.values.view(count, padded)
    if pinned and rows.numel():
        # A copy must not cross two registered ranges, nor two ranges share a page.
        memory.register(rows.split(max(1, REGISTER_BYTES // (padded * dtype.itemsize))))
    return [row.narrow(0, 0, length) for row in rows]


@final
class HostState:
    """Weights and moments of all chunks in host memory, 4 bytes and two moments per parameter.

    Args:
        layout: the chunks.
        moments: their dtype, fp32 or bf16.
    """

    def __init__(self, layout: Layout, *, moments: torch.dtype) -> None:
        self.layout = layout
        self.moments = moments
        """Dtype of the moments."""
        upper, lower = (Memory(layout.length, t) for t in (torch.bfloat16, torch.int16))
        m, v = (Memory(layout.length, moments) for _ in range(2))
        self._memories = (upper, lower, m, v)
        self._state = AdamState(upper=upper.values, lower=lower.values, m=m.values, v=v.values)
        self.pinned: frozenset[int] = frozenset()
        """Indices of the chunks that are registered with CUDA."""
        self._snapshot: Snapshot | None = None
        self._places: dict[str, list[_Place]] = {}
        for index, chunk in enumerate(layout.chunks):
            for piece in chunk.pieces:
                place = _Place(index, piece.offset, piece.start, piece.length)
                self._places.setdefault(piece.name, []).append(place)

    @property
    def parameter_bytes(self) -> int:
        """Of a parameter's state."""
        return sum(memory.values.itemsize for memory in self._memories)

    def pin(self, indices: Iterable[int]) -> None:
        """Register chunks that are copied to the accelerator and back."""
        self.pinned = frozenset(indices)
        chunks = [self.layout.chunks[index] for index in sorted(self.pinned)]
        for memory in self._memories:
            memory.register([memory.values.narrow(0, c.begin, c.length) for c in chunks])

    def chunk(self, layout: ChunkLayout) -> AdamState:
        """Return views of one chunk's state."""
        return self._state.narrow(layout.begin, layout.length)

    def hold(self, reads: Mapping[str, int], budget_bytes: int) -> HeldState:
        """Have the state as it is now for reading, whatever is written to it from now on.

        Args:
            reads: parameter -> how often each of its weights or moments is going to be read.
            budget_bytes: as in `Snapshot`.
        """
        of_chunk: Counter[int] = Counter()
        for name, count in reads.items():
            for place in self._places.get(name, ()):
                of_chunk[place.chunk] += count
        self._snapshot = Snapshot(self._at, of_chunk, budget_bytes)
        return HeldState(self, self._snapshot)

    def keep(self, index: int) -> None:
        """Call before a chunk is written to: what is held of it and was not read is copied."""
        if self._snapshot is not None:
            self._snapshot.keep(index)

    def _at(self, index: int) -> AdamState:
        return self.chunk(self.layout.chunks[index])

    def _to_write(self, place: _Place) -> AdamState:
        self.keep(place.chunk)
        return self._at(place.chunk).narrow(place.offset, place.length)

    def write_master(self, name: str, master: Tensor) -> None:
        """Take a parameter's weights, (n,), fp32."""
        master = master.cpu()
        for place in self._places.get(name, ()):
            part = self._to_write(place)
            split(master.narrow(0, place.start, place.length), part.upper, part.lower)

    def master(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights, (n,), fp32."""
        return self.gather(name, torch.float32, lambda part: join(part.upper, part.lower))

    def upper(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights as the accelerator has them, (n,), bf16."""
        return self.gather(name, torch.bfloat16, lambda part: part.upper)

    def moment(self, name: str, moment: MomentName) -> Tensor:
        """Return a copy of one of a parameter's moments, (n,), fp32."""
        return self.gather(name, torch.float32, lambda part: moment_of(part, moment))

    def write_moment(self, name: str, moment: MomentName, values: Tensor) -> None:
        """Take one of a parameter's moments, (n,), fp32."""
        for place in self._places.get(name, ()):
            part = self._to_write(place)
            moment_of(part, moment).copy_(values.narrow(0, place.start, place.length))

    def clear_moments(self) -> None:
        """Set all moments to zero."""
        for index in range(len(self.layout.chunks)):
            self.keep(index)
        self._state.m.zero_()
        self._state.v.zero_()

    def gather(
        self,
        name: str,
        dtype: torch.dtype,
        read: Callable[[AdamState], Tensor],
        reading: Callable[[int], AbstractContextManager[AdamState]] | None = None,
    ) -> Tensor:
        """Return a copy of something of a parameter, (n,).

        Args:
            name: the parameter.
            dtype: of the copy.
            read: takes it from a part of a chunk.
            reading: gives the chunks; without it they are as they are now.
        """
        gathered = torch.empty(self.layout.sizes[name], dtype=dtype)
        for place in self._places.get(name, ()):
            chunk = reading(place.chunk) if reading else nullcontext(self._at(place.chunk))
            with chunk as state:
                values = read(state.narrow(place.offset, place.length))
                gathered.narrow(0, place.start, place.length).copy_(values)
        return gathered


class _Place(NamedTuple):
    """Where some of a parameter's elements lie."""

    chunk: int
    """Its index."""
    offset: int
    """In the chunk."""
    start: int
    """In the parameter."""
    length: int


@final
@dataclass(frozen=True, slots=True)
class HeldState:
    """The state as it was when it was held."""

    state: HostState
    snapshot: Snapshot

    def master(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights, (n,), fp32."""
        return self._gather(name, lambda part: join(part.upper, part.lower))

    def moment(self, name: str, moment: MomentName) -> Tensor:
        """Return a copy of one of a parameter's moments, (n,), fp32."""
        return self._gather(name, lambda part: moment_of(part, moment))

    def _gather(self, name: str, read: Callable[[AdamState], Tensor]) -> Tensor:
        return self.state.gather(name, torch.float32, read, self.snapshot.reading)


@final
class SlotPool:
    """Host buffers for one chunk each, handed out and taken back.

    Args:
        count: buffers.
        length: elements of each.
        dtype: of the elements.
        pinned: as in `buffers`.
    """

    def __init__(self, count: int, length: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._free = [(b, DONE) for b in buffers(count, length, dtype, pinned=pinned)]

    @property
    def num_free(self) -> int:
        """Buffers that can be taken."""
        return len(self._free)

    def take(self) -> tuple[Tensor, Copied]:
        """Return a free buffer, (length,), and the end of what still reads it."""
        return self._free.pop()

    def give(self, buffer: Tensor, read: Copied) -> None:
        """Take a buffer back, with the end of what reads it."""
        self._free.append((buffer, read))
