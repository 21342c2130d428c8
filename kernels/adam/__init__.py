"""Adam and AdamW over split master weights, exact and the same on every device.

Example:
    >>> state = AdamState(upper=upper, lower=lower, m=m, v=v)
    >>> preview(state, grad, adam, 1.0, wire)            # the wire goes to the accelerator now
    >>> preview(state, grad, adam, 0.5, wire)            # the norm asked for clipping
    >>> commit_and_preview(state, Pending(grad, adam, 0.5), next_grad, next_adam, 1.0, wire)
"""

from zero_strategy.kernels.adam.op import (
    AdamState,
    AdamStep,
    Pending,
    backend,
    commit_and_preview,
    describe,
    join,
    preview,
    split,
    step,
    sum_of_squares,
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
