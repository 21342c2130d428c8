"""Adam over split master weights: plain steps, and previews with deferred commit.

A preview writes only what the weights would become, so nothing must be undone when the gradient's
scale turns out to be another one: the preview is repeated, and the next pass commits the step with
the scale that was decided. Every pass is elementwise: its bits depend neither on how a state is cut
into chunks, nor on threads, nor on the implementation (C, Triton, torch).

No pass looks for NaN or infinity. Whoever decides the scale skips a step that has none that is
finite, by not committing it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_strategy.kernels.adam.dispatch import backend, backend_for, describe
from zero_strategy.kernels.adam.state import (
    GRAD_DTYPES,
    AdamState,
    AdamStep,
    Pending,
    check,
)

__all__ = [
    "AdamState",
    "AdamStep",
    "Pending",
    "backend",
    "commit_and_preview",
    "describe",
    "join",
    "preview",
    "split",
    "step",
    "sum_of_squares",
]


def step(
    state: AdamState, grad: Tensor, adam: AdamStep, scale: float, *, threads: int | None = None
) -> None:
    """Update the master weights and moments in place; `state.upper` is the new wire.

    Args:
        state: n parameters.
        grad: (n,), bf16 or fp32, contiguous, on the state's device.
        adam: hyperparameters of this step.
        scale: finite factor of the gradient, rounded to fp32.
        threads: of the C kernel; by default one for each core this process may run on.

    Raises:
        ValueError: the gradient does not fit the state.

    Cost: 26 bytes of memory traffic per parameter with a bf16 gradient.

    Source: Kingma and Ba 2015, arXiv:1412.6980; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    pending = _fitting(state, Pending(grad, adam, scale))
    backend_for(state.device).run(state, commit=pending, preview=None, wire=None, threads=threads)


def preview(
    state: AdamState,
    grad: Tensor,
    adam: AdamStep,
    scale: float,
    wire: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Write into `wire` what `state.upper` would become; the state is kept.

    Args:
        state: n parameters.
        grad: (n,), bf16 or fp32, contiguous, on the state's device.
        adam: hyperparameters of the previewed step.
        scale: finite factor of the gradient, rounded to fp32.
        wire: (n,), bf16, memory of its own.
        threads: as in `step`.

    Raises:
        ValueError: the gradient or the wire does not fit the state.

    Cost: 16 bytes of memory traffic per parameter with a bf16 gradient.
    """
    pending = _fitting(state, Pending(grad, adam, scale))
    check("adam.wire", wire, like=state.upper, dtypes=(torch.bfloat16,))
    backend_for(state.device).run(state, commit=None, preview=pending, wire=wire, threads=threads)


def commit_and_preview(
    state: AdamState,
    pending: Pending,
    grad: Tensor,
    adam: AdamStep,
    scale: float,
    wire: Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Commit the pending step exactly, then preview the next one, in one pass over memory.

    Args:
        state: n parameters; afterwards as `step` with the pending gradient leaves it.
        pending: the earlier gradient with its step and the scale that was decided.
        grad: (n,), bf16 or fp32, contiguous, on the state's device; the new gradient.
        adam: hyperparameters of the previewed step.
        scale: finite factor of the new gradient, rounded to fp32.
        wire: (n,), bf16, memory of its own.
        threads: as in `step`.

    Raises:
        ValueError: a gradient or the wire does not fit the state.

    Cost: 30 bytes of memory traffic per parameter with bf16 gradients.
    """
    current = _fitting(state, Pending(grad, adam, scale))
    check("adam.wire", wire, like=state.upper, dtypes=(torch.bfloat16,))
    backend_for(state.device).run(
        state, commit=_fitting(state, pending), preview=current, wire=wire, threads=threads
    )


def split(master: Tensor, upper: Tensor, lower: Tensor) -> None:
    """Write the halves of fp32 weights; every value but NaN's payload can be joined again.

    Args:
        master: (n,), fp32, contiguous.
        upper: (n,), bf16; receives the weights rounded half away from zero.
        lower: (n,), int16; receives the remainder.

    Raises:
        ValueError: the tensors do not fit one another.
    """
    check("adam.master", master, like=master, dtypes=(torch.float32,))
    check("adam.upper", upper, like=master, dtypes=(torch.bfloat16,))
    check("adam.lower", lower, like=master, dtypes=(torch.int16,))
    backend_for(master.device).split(master, upper, lower)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the exact fp32 weights, (n,), of two halves.

    Args:
        upper: (n,), bf16, contiguous.
        lower: (n,), int16, contiguous.

    Raises:
        ValueError: the tensors do not fit one another.
    """
    check("adam.upper", upper, like=upper, dtypes=(torch.bfloat16,))
    check("adam.lower", lower, like=upper, dtypes=(torch.int16,))
    return backend_for(upper.device).join(upper, lower)


def sum_of_squares(grad: Tensor, *, threads: int | None = None) -> Tensor:
    """Return the sum of squares of a gradient, 0-dim, fp64, on its device.

    On the CPU its bits depend neither on threads nor on the implementation. A value that is not
    finite makes the sum so.

    Args:
        grad: (n,), bf16 or fp32, contiguous.
        threads: as in `step`.

    Raises:
        ValueError: the gradient is not flat or of another dtype.
    """
    check("adam.grad", grad, like=grad, dtypes=GRAD_DTYPES)
    return backend_for(grad.device).sum_of_squares(grad, threads=threads)


def _fitting(state: AdamState, pending: Pending) -> Pending:
    check("adam.grad", pending.grad, like=state.upper, dtypes=GRAD_DTYPES)
    return pending
