"""Adam's passes in C (`csrc/adam.c`), called through ctypes without torch's headers.

Every pass is one foreign call: the GIL is free while it runs, and its threads are the library's
own. Which thread computes an element never changes its bits.
"""

from __future__ import annotations

import ctypes
import math
import os
from functools import cache

import torch
from torch import Tensor

from zero_strategy.kernels import build
from zero_strategy.kernels.adam.state import AdamState, Coefficients, Pending

MAX_THREADS = 1024
# Elements per claim in the C source, each of which gives one partial sum of squares.
BLOCK = 1 << 16


class _State(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("upper", "lower", "m", "v")),
        ("length", ctypes.c_int64),
        ("moments_are_bf16", ctypes.c_int32),
    ]


class _Update(ctypes.Structure):
    _fields_ = [
        ("grad", ctypes.c_void_p),
        ("grad_is_fp32", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("is_l2", ctypes.c_int32),
        *((name, ctypes.c_float) for name in Coefficients._fields[1:]),
        ("v_reciprocal", ctypes.c_float),
    ]


def isa() -> str:
    """Return the widest instruction set of this machine that the kernels are compiled for."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, "baseline")


class CpuAdam:
    """The passes compiled for one instruction set.

    Args:
        isa: "avx512", "avx2" or "baseline"; the machine must have it.

    Raises:
        zero_strategy.kernels.build.BuildError: there is no library and none can be built.
    """

    name = "c"

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self._library = library = build.load("adam", isa)
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        state, update = ctypes.POINTER(_State), ctypes.POINTER(_Update)
        signatures = {
            "adam_pass": [state, update, update, pointer, flag],
            "adam_split": [pointer, pointer, pointer, count, flag],
            "adam_join": [pointer, pointer, pointer, count, flag],
            "adam_squares": [pointer, flag, count, pointer, flag],
        }
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None

    def run(
        self,
        state: AdamState,
        *,
        commit: Pending | None,
        preview: Pending | None,
        wire: Tensor | None,
        threads: int | None,
    ) -> None:
        """Commit one step, preview one into `wire`, or both; see `op.py`."""
        fields = _State(
            *(tensor.data_ptr() for tensor in (state.upper, state.lower, state.m, state.v)),
            state.length,
            state.m.dtype == torch.bfloat16,
        )
        self._library.adam_pass(
            fields,
            _update(commit),
            _update(preview),
            None if wire is None else wire.data_ptr(),
            _num_threads(threads),
        )

    def split(self, master: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Write the halves of fp32 weights."""
        halves = (master.data_ptr(), upper.data_ptr(), lower.data_ptr(), master.numel())
        self._library.adam_split(*halves, _num_threads(None))

    def join(self, upper: Tensor, lower: Tensor) -> Tensor:
        """Return the fp32 weights of two halves."""
        master = torch.empty_like(upper, dtype=torch.float32)
        halves = (master.data_ptr(), upper.data_ptr(), lower.data_ptr(), master.numel())
        self._library.adam_join(*halves, _num_threads(None))
        return master

    def sum_of_squares(self, grad: Tensor, *, threads: int | None) -> Tensor:
        """Return the fp64 sum of squares."""
        of_block = torch.empty(-(-grad.numel() // BLOCK), dtype=torch.float64)
        self._library.adam_squares(
            grad.data_ptr(),
            grad.dtype == torch.float32,
            grad.numel(),
            of_block.data_ptr(),
            _num_threads(threads),
        )
        # Correctly rounded, so the order of the blocks does not matter.
        return torch.tensor(math.fsum(of_block.tolist()), dtype=torch.float64)


@cache
def best() -> CpuAdam:
    """Return the passes for this machine; built at the first call."""
    return CpuAdam(isa())


def _update(pending: Pending | None) -> _Update | None:
    if pending is None:
        return None
    grad = pending.grad
    is_fp32 = grad.dtype == torch.float32
    numbers = pending.adam.coefficients
    # A quotient of two fp32 numbers has the same bits when it is rounded to fp64 first.
    reciprocal = 1 / ctypes.c_float(numbers.v_correction).value
    return _Update(grad.data_ptr(), is_fp32, pending.scale, *numbers, reciprocal)


def _num_threads(threads: int | None) -> int:
    """Return the threads of one call; by default one for each core this process may run on."""
    if threads is None:
        return len(os.sched_getaffinity(0))
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads = {threads}: must lie in [1, {MAX_THREADS}]. Leave it out.")
    return threads
