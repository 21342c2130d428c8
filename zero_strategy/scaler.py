"""Dynamic loss scale for fp16 training on sharded gradients.

The overflow decision comes from the global gradient norm, which is one value on all ranks, so
either every rank skips the step or none does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_strategy.gradient import local

_LOWEST = 1.0


@dataclass(kw_only=True, slots=True)
class LossScaler:
    """Scale of the loss, halved on overflow and doubled after a run of finite steps.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; constants as in
    torch.amp.GradScaler.
    """

    scale: float = 65536.0
    """Factor on the loss; a power of two, so scaling is exact."""
    growth_interval: int = 2000
    """Finite steps in a row before the scale doubles."""
    finite_steps: int = 0
    """Finite steps since the last change of scale."""
    skipped_steps: int = 0
    """Steps skipped since the start of the run."""

    @property
    def is_lowest(self) -> bool:
        """Whether an overflow lowers the scale no further."""
        return self.scale <= _LOWEST

    def unscale_(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, in place."""
        tensors = [local(p.grad) for p in parameters if p.grad is not None]
        if tensors:
            torch._foreach_mul_(tensors, 1.0 / self.scale)

    def update(self, *, finite: bool) -> None:
        """Account for one step and adapt the scale."""
        if not finite:
            self.scale = max(self.scale / 2, _LOWEST)
            self.finite_steps = 0
            self.skipped_steps += 1
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.scale *= 2
            self.finite_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        """The fields, as plain numbers."""
        return {
            "scale": self.scale,
            "finite_steps": self.finite_steps,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Take over what `state_dict` gave."""
        self.scale = float(state["scale"])
        self.finite_steps = int(state["finite_steps"])
        self.skipped_steps = int(state["skipped_steps"])
