"""What offload holds of a module's parameters, as tensors that are sharded like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_strategy.checkpoint.late import Late
from zero_strategy.gradient import local
from zero_strategy.offload.host import HeldState, MomentName
from zero_strategy.offload.tiers import TieredState

_MOMENTS: Mapping[str, MomentName] = {"exp_avg": "m", "exp_avg_sq": "v"}
"""As torch's Adam names them."""


@final
@dataclass(slots=True)
class Period:
    """The time between two steps, in which state is read and written."""

    is_over: bool = False
    held: HeldState | None = None
    """What can be read of the host's state also when it is over."""


@final
class Offloaded:
    """Weights and moments between two steps, made one by one where their state lies.

    Args:
        state: with every step committed.
        parameters: name -> sharded parameter.
        host_mesh: the ranks of their mesh, for tensors in host memory.
        period: the time until the next step begins.
    """

    def __init__(
        self,
        state: TieredState,
        parameters: Mapping[str, Tensor],
        host_mesh: DeviceMesh,
        period: Period,
    ) -> None:
        self._state, self._parameters, self._host_mesh = state, parameters, host_mesh
        self._period = period

    def master(self, name: str) -> Late:
        """Return a parameter's fp32 weights."""
        return self._late(
            name,
            lambda: self._as_of_now(name).master(name),
            lambda values: self._now(name).write_master(name, values),
        )

    def moments(self, name: str) -> dict[str, Late]:
        """Return a parameter's moments in fp32, by the name of their slot in torch's Adam."""
        return {slot: self._moment(name, moment) for slot, moment in _MOMENTS.items()}

    def _moment(self, name: str, moment: MomentName) -> Late:
        return self._late(
            name,
            lambda: self._as_of_now(name).moment(name, moment),
            lambda values: self._now(name).write_moment(name, moment, values),
        )

    def _mesh_of(self, name: str) -> DeviceMesh:
        parameter = self._parameters[name]
        assert isinstance(parameter, DTensor), "fully_shard makes every parameter one"
        return parameter.device_mesh if name in self._state.resident else self._host_mesh

    def _as_of_now(self, name: str) -> TieredState | HeldState:
        if self._period.held is not None and name not in self._state.resident:
            return self._period.held
        return self._now(name)

    def _now(self, name: str) -> TieredState:
        if self._period.is_over:
            raise RuntimeError(
                f"{name}: its fp32 state was asked for before a step and read after it began: must "
                "be read before the next forward. Ask for it again, or keep a copy."
            )
        return self._state

    def _late(self, name: str, read: Callable[[], Tensor], write: Callable[[Tensor], None]) -> Late:
        parameter = self._parameters[name]
        own = torch.empty_like(local(parameter), dtype=torch.float32, device="meta")
        return Late(
            like=as_shard(own, parameter, self._host_mesh),
            read=lambda: as_shard(read(), parameter, self._mesh_of(name)),
            write=lambda tensor: write(local(tensor).flatten()),
            stays=name not in self._state.resident,
        )


@final
class ArrivedNorms:
    """Norms of the gradients of one step, which have left their parameters.

    Args:
        total: gives the global norm, 0-dim; collective.
        squares: parameter -> square of its shard's norm.
        parameters: name -> sharded parameter.
    """

    def __init__(
        self,
        total: Callable[[], Tensor],
        squares: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._total, self._squares, self._parameters = total, squares, parameters

    def total(self) -> Tensor:
        """Return the global norm, 0-dim, fp32, on the CPU. Collective; one host sync."""
        return self._total().cpu()

    def bad(self) -> list[Tensor]:
        """Return the parameters whose gradient's shard here holds an inf or a NaN.

        Cost: one host sync per parameter; for error messages only.
        """
        return [self._parameters[n] for n, s in self._squares.items() if not bool(s.isfinite())]


@torch.no_grad()
def as_shard(own: Tensor, parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this rank's values as a tensor that is cut like a parameter, without a copy.

    Args:
        own: (n,), contiguous.
        parameter: the sharded parameter.
        mesh: of its ranks and of the values' device, to which they would be sent otherwise.
    """
    assert isinstance(parameter, DTensor), "fully_shard makes every parameter one"
    return DTensor.from_local(
        own.view(local(parameter).shape),
        mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
        run_check=False,
    )
