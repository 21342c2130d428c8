"""Optimizer state that stays on the device, beside the weights that are there anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from zero_strategy.kernels import adam
from zero_strategy.kernels.adam import AdamState
from zero_strategy.offload.chunk import Hyper
from zero_strategy.offload.host import MomentName, moment_of


@final
class ResidentState:
    """Moments and the weights' lower halves on the device, 2 bytes and two moments per parameter.

    A gradient waits there for the step's scale, so its step is a plain one, and it is stepped by
    the arithmetic of the other tiers, bit for bit.

    Args:
        weights: parameter -> flat view of this rank's shard, (n,), bf16: the upper halves.
        moments: their dtype, fp32 or bf16.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, moments: torch.dtype) -> None:
        self._states = {name: _zeros(weight, moments) for name, weight in weights.items()}
        self._held: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._states

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(self._states)

    # The step.

    def hold(self, name: str, grad: Tensor) -> None:
        """Keep a parameter's gradient, (n,), until `step` or `drop`."""
        self._held[name] = grad

    def release(self) -> dict[str, Tensor]:
        """Return the gradients that were held, and hold none."""
        held, self._held = self._held, {}
        return held

    def step(self, hyper: Hyper, scale: float) -> None:
        """Step by the gradients that are held, in the current stream. No host sync."""
        for name, grad in self.release().items():
            step = hyper[name]
            if step is not None and grad.numel():
                adam.step(self._states[name], grad, step, scale)

    # What is read and written.

    def master(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights, (n,), fp32, on the device."""
        state = self._states[name]
        return adam.join(state.upper, state.lower)

    def write_master(self, name: str, master: Tensor) -> None:
        """Take a parameter's weights, (n,), fp32; the device has them at once."""
        state = self._states[name]
        adam.split(master.to(state.device).contiguous(), state.upper, state.lower)

    def take_weights(self, name: str) -> None:
        """Take a parameter's weights as the device has them for its master weights."""
        self._states[name].lower.zero_()

    def moment(self, name: str, moment: MomentName) -> Tensor:
        """Return a copy of one of a parameter's moments, (n,), fp32, on the device."""
        return moment_of(self._states[name], moment).to(torch.float32, copy=True)

    def write_moment(self, name: str, moment: MomentName, values: Tensor) -> None:
        """Take one of a parameter's moments, (n,), fp32."""
        moment_of(self._states[name], moment).copy_(values)

    def clear_moments(self) -> None:
        """Set all moments to zero."""
        for state in self._states.values():
            state.m.zero_()
            state.v.zero_()


def _zeros(weights: Tensor, moments: torch.dtype) -> AdamState:
    lower = torch.zeros_like(weights, dtype=torch.int16)
    m, v = (torch.zeros_like(weights, dtype=moments) for _ in range(2))
    return AdamState(upper=weights, lower=lower, m=m, v=v)
