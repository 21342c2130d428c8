"""Weights and moments by parameter, on whichever tier they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from zero_strategy.offload.host import MOMENTS, HostState, MomentName
from zero_strategy.offload.resident import ResidentState


@final
@dataclass(frozen=True, slots=True)
class TieredState:
    """The state of all offloaded parameters: of each, on one of two tiers."""

    host: HostState
    resident: ResidentState

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return (*self.host.layout.sizes, *self.resident.names)

    def master(self, name: str) -> Tensor:
        """Return a copy of a parameter's weights, (n,), fp32, on its tier."""
        return self._of(name).master(name)

    def write_master(self, name: str, master: Tensor) -> None:
        """Take a parameter's weights, (n,), fp32."""
        self._of(name).write_master(name, master)

    def moment(self, name: str, moment: MomentName) -> Tensor:
        """Return a copy of one of a parameter's moments, (n,), fp32, on its tier."""
        return self._of(name).moment(name, moment)

    def write_moment(self, name: str, moment: MomentName, values: Tensor) -> None:
        """Take one of a parameter's moments, (n,), fp32."""
        self._of(name).write_moment(name, moment, values)

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """Return copies of a parameter's moments, each (n,), fp32, on its tier."""
        return self.moment(name, "m"), self.moment(name, "v")

    def clear_moments(self) -> None:
        """Set all moments to zero."""
        self.host.clear_moments()
        self.resident.clear_moments()

    def take_over(self, other: TieredState, *, with_moments: bool) -> None:
        """Copy another state of the same parameters, however it is spread over the tiers.

        Args:
            other: the state, with every step committed.
            with_moments: copy these too; otherwise they stay as they are here.
        """
        for name in self.names:
            self.write_master(name, other.master(name))
            for moment in MOMENTS if with_moments else ():
                self.write_moment(name, moment, other.moment(name, moment))

    def _of(self, name: str) -> HostState | ResidentState:
        return self.resident if name in self.resident else self.host
