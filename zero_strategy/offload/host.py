"""Host memory of the engine, known to CUDA where copies need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import torch
from torch import Tensor

from zero_strategy.kernels.adam import AdamState, join, split
from zero_strategy.offload.layout import ChunkLayout, Layout
from zero_strategy.offload.link import DONE, Copied

PAGE_BYTES = 4096
REGISTER_BYTES = 1 << 30
"""At most so much is registered per call; calls for different ranges run at the same time."""
NUM_THREADS = 8


def pages(length: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed host memory, (length,), that begins with a page."""
    memory = torch.zeros(length + PAGE_BYTES // dtype.itemsize, dtype=dtype)
    return memory.narrow(0, -memory.data_ptr() % PAGE_BYTES // dtype.itemsize, length)


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
    rows = pages(count * padded, dtype).view(count, padded)
    if pinned:
        # A copy must not cross two registered ranges, nor two ranges share a page.
        register(rows.split(max(1, REGISTER_BYTES // (padded * dtype.itemsize))))
    return [row.narrow(0, 0, length) for row in rows]


def register(parts: Sequence[Tensor]) -> None:
    """Let CUDA copy to and from host memory while others run.

    Args:
        parts: contiguous, each on pages of its own.

    Raises:
        MemoryError: the system does not let this process lock so much.
    """
    cudart: Any = torch.cuda.cudart()

    def lock(part: Tensor) -> int:
        return int(cudart.cudaHostRegister(part.data_ptr(), part.nbytes, 0))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        codes = [code for code in pool.map(lock, parts) if code]
    if codes:
        total = sum(part.nbytes for part in parts) / 2**30
        raise MemoryError(
            f"{total:.1f} GiB of host memory could not be pinned (CUDA error {codes[0]}): must fit "
            "into what the system lets a process lock. Raise `ulimit -l`, or lower "
            "zero.offload.stream_share."
        )


@final
class HostState:
    """Weights and moments of all chunks in host memory, 12 bytes per parameter.

    Args:
        layout: the chunks.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._state = AdamState(
            upper=pages(layout.length, torch.bfloat16),
            lower=pages(layout.length, torch.int16),
            m=pages(layout.length, torch.float32),
            v=pages(layout.length, torch.float32),
        )
        self._places: dict[str, list[tuple[int, int, int]]] = {}
        for chunk in layout.chunks:
            for piece in chunk.pieces:
                self._places.setdefault(piece.name, []).append(
                    (chunk.begin + piece.offset, piece.start, piece.length)
                )

    def pin(self, chunks: Sequence[ChunkLayout]) -> None:
        """Register chunks that are copied to the accelerator and back."""
        states = [self.chunk(chunk) for chunk in chunks]
        register([t for s in states for t in (s.upper, s.lower, s.m, s.v)])

    def chunk(self, layout: ChunkLayout) -> AdamState:
        """Return views of one chunk's state."""
        return self._state.narrow(layout.begin, layout.length)

    def write_master(self, name: str, master: Tensor) -> None:
        """Take a parameter's weights, (n,), fp32, on the CPU."""
        for begin, start, length in self._places.get(name, ()):
            part = self._state.narrow(begin, length)
            split(master.narrow(0, start, length), part.upper, part.lower)

    def master(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights, (n,), fp32."""
        return self._gather(name, lambda part: join(part.upper, part.lower))

    def upper(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights as the accelerator has them, (n,), bf16."""
        return self._gather(name, lambda part: part.upper)

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return copies of a parameter's moments, each (n,), fp32."""
        return self._gather(name, lambda part: part.m), self._gather(name, lambda part: part.v)

    def write_moments(self, name: str, m: Tensor, v: Tensor) -> None:
        """Take a parameter's moments, each (n,), fp32, on the CPU."""
        for begin, start, length in self._places.get(name, ()):
            part = self._state.narrow(begin, length)
            part.m.copy_(m.narrow(0, start, length))
            part.v.copy_(v.narrow(0, start, length))

    def clear_moments(self) -> None:
        """Set all moments to zero."""
        self._state.m.zero_()
        self._state.v.zero_()

    def _gather(self, name: str, read: Callable[[AdamState], Tensor]) -> Tensor:
        places = self._places.get(name, ())
        parts = [read(self._state.narrow(begin, length)) for begin, _, length in places]
        return torch.cat(parts) if parts else torch.empty(0)


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
