"""Adam's passes on CUDA tensors, with the operations of `csrc/adam.c` in the same order.

Division and root round to nearest and every fused multiply-add is written out, so that the bits are
those of the C kernel. Only the pattern of a NaN in `m` and `v` may differ.
"""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_strategy.kernels.adam.reference import ReferenceAdam
from zero_strategy.kernels.adam.state import AdamState, Pending

BLOCK = 1024
# Without fusion no product and sum become one operation that the source does not name.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
# Elements whose squares are summed at a time: 128 MiB as fp64.
PART = 1 << 24


@triton.jit
def _is_nan(bits: tl.tensor) -> tl.tensor:
    return (bits & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def _round_to_bf16(bits: tl.tensor) -> tl.tensor:
    """Bits of fp32 to bits of bf16, half away from zero; every NaN becomes one."""
    return tl.where(_is_nan(bits), 0x7FC0, (bits + 0x8000) >> 16).to(tl.int16)


@triton.jit
def _as_fp32(loaded: tl.tensor) -> tl.tensor:
    """fp32 values as they are, bits of bf16 widened."""
    if loaded.dtype == tl.int16:
        values = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = loaded
    return values


@triton.jit
def _stepped(
    p: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    grad: tl.tensor,
    k: tl.tuple,
    IS_L2: tl.constexpr,
    WEIGHT_IS_SMALL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The bits of the weights, and the moments, after one step."""
    scale, m_weight, v_decay, v_weight, eps, weight_scale, l2, step_size, v_correction = k
    g = grad * scale
    if IS_L2:
        g = tl.fma(p, l2, g)
    m = tl.fma(m_weight, g - m, m) if WEIGHT_IS_SMALL else tl.fma(m_weight - 1.0, g - m, g)
    v = tl.fma(v_weight * g, g, v * v_decay)
    denominator = tl.div_rn(tl.sqrt_rn(v), v_correction) + eps
    if not IS_L2:
        p = p * weight_scale
    p = p + tl.div_rn(step_size * m, denominator)
    return p.to(tl.int32, bitcast=True), m, v


@triton.jit
def adam_pass(
    upper: tl.tensor,
    lower: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    n: tl.tensor,
    commit_grad: tl.tensor,
    commit_k: tl.tuple,
    preview_grad: tl.tensor,
    preview_k: tl.tuple,
    wire: tl.tensor,
    COMMITS: tl.constexpr,
    COMMIT_IS_L2: tl.constexpr,
    COMMIT_WEIGHT_IS_SMALL: tl.constexpr,
    PREVIEWS: tl.constexpr,
    PREVIEW_IS_L2: tl.constexpr,
    PREVIEW_WEIGHT_IS_SMALL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Commit one step, preview one into `wire`, or both; `k` holds a step's scalars.

    bf16 tensors come as int16. Arguments of a step that is not taken are not read.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    upper_bits = tl.load(upper + index, mask=mask).to(tl.int32)
    bits = (upper_bits << 16) + tl.load(lower + index, mask=mask).to(tl.int32)
    m_loaded, v_loaded = tl.load(m + index, mask=mask), tl.load(v + index, mask=mask)
    m_now, v_now = _as_fp32(m_loaded), _as_fp32(v_loaded)
    if COMMITS:
        grad = _as_fp32(tl.load(commit_grad + index, mask=mask))
        p = bits.to(tl.float32, bitcast=True)
        bits, m_now, v_now = _stepped(
            p, m_now, v_now, grad, commit_k, COMMIT_IS_L2, COMMIT_WEIGHT_IS_SMALL
        )
        tl.store(upper + index, _round_to_bf16(bits), mask=mask)
        remainder = tl.where(_is_nan(bits), 0, bits).to(tl.int16)
        tl.store(lower + index, remainder, mask=mask)
        if m_loaded.dtype == tl.int16:
            m_bits = _round_to_bf16(m_now.to(tl.int32, bitcast=True))
            v_bits = _round_to_bf16(v_now.to(tl.int32, bitcast=True))
            tl.store(m + index, m_bits, mask=mask)
            tl.store(v + index, v_bits, mask=mask)
            # The next step starts from what is stored.
            m_now, v_now = _as_fp32(m_bits), _as_fp32(v_bits)
        else:
            tl.store(m + index, m_now, mask=mask)
            tl.store(v + index, v_now, mask=mask)
    if PREVIEWS:
        grad = _as_fp32(tl.load(preview_grad + index, mask=mask))
        p = bits.to(tl.float32, bitcast=True)
        bits, m_now, v_now = _stepped(
            p, m_now, v_now, grad, preview_k, PREVIEW_IS_L2, PREVIEW_WEIGHT_IS_SMALL
        )
        tl.store(wire + index, _round_to_bf16(bits), mask=mask)


class TritonAdam:
    """The passes on CUDA tensors; a launch on the current stream, without a host sync."""

    name = "triton"

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
        if state.length == 0:
            return
        upper = state.upper.view(torch.int16)
        commit_grad, commit_k, commit_flags = _arguments(commit, upper)
        preview_grad, preview_k, preview_flags = _arguments(preview, upper)
        # Any: a launch takes tensors and numbers where the kernel's text names Triton's types.
        launch: Any = adam_pass[(triton.cdiv(state.length, BLOCK),)]
        with torch.cuda.device_of(state.upper):
            launch(
                upper,
                state.lower,
                _integers(state.m),
                _integers(state.v),
                state.length,
                commit_grad,
                commit_k,
                preview_grad,
                preview_k,
                upper if wire is None else wire.view(torch.int16),
                *commit_flags,
                *preview_flags,
                BLOCK=BLOCK,
                **OPTIONS,
            )

    def split(self, master: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Write the halves of fp32 weights; a few passes over memory, which set-up affords."""
        ReferenceAdam().split(master, upper, lower)

    def join(self, upper: Tensor, lower: Tensor) -> Tensor:
        """Return the fp32 weights of two halves."""
        return ReferenceAdam().join(upper, lower)

    def sum_of_squares(self, grad: Tensor, *, threads: int | None) -> Tensor:
        """Return the fp64 sum of squares, in torch's order on this device."""
        # torch widens before it reduces: parts bound that temporary.
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in grad.split(PART)]
        return torch.stack(norms).square().sum()


def _integers(tensor: Tensor) -> Tensor:
    """View bf16 as int16: kernels round and widen by bits, the same on a GPU and interpreted."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _arguments(
    pending: Pending | None, unused: Tensor
) -> tuple[Tensor, tuple[float, ...], tuple[bool, bool, bool]]:
    """Gradient, scalars and flags of a step; of one that is not taken, what compiles once."""
    if pending is None:
        return unused, (0.0,) * 9, (False, False, False)
    k = pending.adam.coefficients
    # The fp32 weight decides, as in the C kernel.
    weight_is_small = c_float(k.m_weight).value < 0.5
    # A whole number would be compiled in, and as an integer.
    scalars = tuple(float(value) for value in (pending.scale, *k[1:]))
    return _integers(pending.grad), scalars, (True, k.is_l2, weight_is_small)
