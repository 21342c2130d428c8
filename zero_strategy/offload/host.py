"""Host memory of the engine, known to CUDA where copies need it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from zero_strategy.kernels.adam import AdamState, join, split
from zero_strategy.offload.layout import ChunkLayout, Layout

PAGE_BYTES = 4096
REGISTER_BYTES = 1 << 30
"""At most so much is registered per call; calls for different ranges run at the same time."""


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
    memory = torch.zeros(count * padded + per_page, dtype=dtype)
    # A copy must not cross two registered ranges, nor two ranges share a page.
    start = -memory.data_ptr() % PAGE_BYTES // dtype.itemsize
    rows = memory.narrow(0, start, count * padded).view(count, padded)
    if pinned:
        _register(rows)
    return [row.narrow(0, 0, length) for row in rows]


def _register(rows: Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    per_call = max(1, REGISTER_BYTES // (rows.shape[1] * rows.element_size()))
    failures: list[int] = []

    def register(part: Tensor) -> None:
        code = cudart.cudaHostRegister(part.data_ptr(), part.numel() * part.element_size(), 0)
        if int(code):
            failures.append(int(code))

    threads = [threading.Thread(target=register, args=(part,)) for part in rows.split(per_call)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        num_bytes = rows.numel() * rows.element_size()
        raise MemoryError(
            f"{num_bytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error "
            f"{failures[0]}): must fit into what the system lets a process lock. Raise "
            "`ulimit -l`, or lower zero.offload.chunk_elements."
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
            upper=torch.zeros(layout.length, dtype=torch.bfloat16),
            lower=torch.zeros(layout.length, dtype=torch.int16),
            m=torch.zeros(layout.length),
            v=torch.zeros(layout.length),
        )
        self._places: dict[str, list[tuple[int, int, int]]] = {}
        for chunk in layout.chunks:
            for piece in chunk.pieces:
                self._places.setdefault(piece.name, []).append(
                    (chunk.begin + piece.offset, piece.start, piece.length)
                )

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
        self._free = buffers(count, length, dtype, pinned=pinned)

    @property
    def num_free(self) -> int:
        """Buffers that can be taken."""
        return len(self._free)

    def take(self) -> Tensor:
        """Return a free buffer, (length,)."""
        return self._free.pop()

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)
