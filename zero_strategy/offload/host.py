"""Host memory of the engine, known to CUDA where copies need it."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, final

import torch
from torch import Tensor

from zero_strategy.kernels.adam import AdamState, join, split
from zero_strategy.offload.layout import ChunkLayout, Layout
from zero_strategy.offload.link import DONE, Copied

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
        self._places: dict[str, list[tuple[int, int, int]]] = {}
        for chunk in layout.chunks:
            for piece in chunk.pieces:
                self._places.setdefault(piece.name, []).append(
                    (chunk.begin + piece.offset, piece.start, piece.length)
                )

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

    def write_master(self, name: str, master: Tensor) -> None:
        """Take a parameter's weights, (n,), fp32."""
        master = master.cpu()
        for begin, start, length in self._places.get(name, ()):
            part = self._state.narrow(begin, length)
            split(master.narrow(0, start, length), part.upper, part.lower)

    def master(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights, (n,), fp32."""
        return self._gather(name, torch.float32, lambda part: join(part.upper, part.lower))

    def upper(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights as the accelerator has them, (n,), bf16."""
        return self._gather(name, torch.bfloat16, lambda part: part.upper)

    def moment(self, name: str, moment: MomentName) -> Tensor:
        """Return a copy of one of a parameter's moments, (n,), fp32."""
        return self._gather(name, torch.float32, lambda part: moment_of(part, moment))

    def write_moment(self, name: str, moment: MomentName, values: Tensor) -> None:
        """Take one of a parameter's moments, (n,), fp32."""
        for begin, start, length in self._places.get(name, ()):
            part = self._state.narrow(begin, length)
            moment_of(part, moment).copy_(values.narrow(0, start, length))

    def clear_moments(self) -> None:
        """Set all moments to zero."""
        self._state.m.zero_()
        self._state.v.zero_()

    def _gather(self, name: str, dtype: torch.dtype, read: Callable[[AdamState], Tensor]) -> Tensor:
        gathered = torch.empty(self.layout.sizes[name], dtype=dtype)
        for begin, start, length in self._places.get(name, ()):
            gathered.narrow(0, start, length).copy_(read(self._state.narrow(begin, length)))
        return gathered


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
