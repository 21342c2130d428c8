"""A unit's gradients as FSDP2 reduced them, parameter by parameter, before it rounds them.

FSDP2 hands a unit's gradients to its all-reduce hook as one flat tensor: each parameter that has
one has its shard there, padded, in the order in which the parameters' own hooks are called next. So
torch does it, but it does not promise to; hence the first gradient of each parameter in a run is
held against the parameter's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, final

import torch
from torch import Tensor

from zero_strategy.gradient import local


@final
class ReducedGradients:
    """What the hooks of one module see of a backward."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._taken = 0
        self._unseen: set[str] = set()

    def begin_run(self, names: Iterable[str]) -> None:
        """Look at the next gradient of each of these parameters more closely."""
        self.forget()
        self._unseen = set(names)

    def forget(self) -> None:
        """After a backward that did not end."""
        self._flat, self._taken = None, 0

    def tap(self, flat: Tensor) -> None:
        """Note a unit's gradients, (n,), as its all-reduce hook is given them."""
        self._check_whole()
        self._flat, self._taken = flat, 0

    def take(self, name: str, parameter: Tensor, num_padded: int) -> Tensor:
        """Return a parameter's gradient as it was reduced, and clear its rounded one.

        Args:
            name: the parameter.
            parameter: with the gradient that FSDP2 accumulated.
            num_padded: elements of the longest shard of any rank.

        Returns: (n,), as long as this rank's shard.

        Raises:
            RuntimeError: torch does not do as is written above.

        Cost: one host sync per parameter in the first backward of a run.
        """
        assert parameter.grad is not None, "hooks run where a gradient was accumulated"
        rounded = local(parameter.grad).flatten()
        parameter.grad = None
        if self._flat is None:
            _refuse(f"the gradient of {name} came before its unit's")
        if self._taken + num_padded > self._flat.numel():
            _refuse(f"the gradient of {name} lies beyond its unit's")
        grad = self._flat.narrow(0, self._taken, rounded.numel())
        self._taken += num_padded
        if name in self._unseen:
            self._unseen.remove(name)
            if not _same_bits(grad.to(rounded.dtype), rounded):
                _refuse(f"the gradient of {name} is not where its unit's order puts it")
        return grad

    def check_taken(self, parameters: Mapping[str, Tensor]) -> None:
        """Between a step's last backward and the step: no gradient was left behind.

        Raises:
            RuntimeError: as `take`.
        """
        self._check_whole()
        for name in self._unseen:
            if parameters[name].grad is not None:
                _refuse(f"the hook of {name} was not called")

    def _check_whole(self) -> None:
        if self._flat is not None and self._taken != self._flat.numel():
            _refuse(f"{self._taken} of a unit's {self._flat.numel()} gradients were taken")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _refuse(found: str) -> NoReturn:
    raise RuntimeError(
        f"torch {torch.__version__}: {found}: must be as FSDP2 of torch 2.11 hands gradients out, "
        "on which offload relies. No weight was changed by this step. Train without offload, or "
        "with another version of torch."
    )
