"""What the parts tell one another, by structure alone: nothing here is ever inherited."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_strategy.offload.figures import OffloadFigures
from zero_strategy.planning.estimate import MemoryPlan


@runtime_checkable
class TellsPlan(Protocol):
    """A strategy that can say what it planned, what it checked and what it waited for."""

    plan: MemoryPlan
    """Bytes each rank was planned to hold."""

    checks: dict[str, str]
    """Outcome of each check made at set-up, for example `{"dtype": "ok"}`."""

    grad_norm: Tensor | None
    """Last global fp32 gradient norm before clipping, 0-dim, on the device.

    Cost: reading its value syncs the host; read it on log steps only.
    """

    def take_exposed_comm_ms(self) -> float | None:
        """Communication that compute had to wait for since the last call.

        Returns: milliseconds on this rank, or None where it is not measured.
        """
        ...


@runtime_checkable
class TellsOffload(Protocol):
    """A strategy that may keep optimizer state in host memory."""

    def take_offload_figures(self) -> OffloadFigures | None:
        """What offload did on this rank since the last call, or None where there is none.

        Cost: may sync the host; read it on log steps only.
        """
        ...


@runtime_checkable
class HoldsMasters(Protocol):
    """A strategy whose trained weights may be more exact than what the module holds."""

    def masters(self) -> dict[str, Tensor]:
        """Copies of the weights that the module holds rounded, by parameter name; may be none."""
        ...

    def write_masters(self, masters: dict[str, Tensor]) -> None:
        """Replace such weights, and what the module holds of them."""
        ...


class LoadsExactly(Protocol):
    """Takes weights that are loaded, where they are kept more exactly than the module holds."""

    def load(self, parameter: DTensor, values: DTensor) -> Tensor:
        """Take values that are cut like a parameter; returns what the parameter is to hold."""
        ...


class FillsShards(Protocol):
    """Knows the values of a module that was built on the meta device."""

    def fills(self, module: nn.Module, name: str) -> bool:
        """Whether it gives the values of the parameter or buffer that a module has by a name."""
        ...

    def fill(self, write: Callable[[Tensor, Tensor], None]) -> None:
        """Give them, after sharding; every rank is asked.

        Args:
            write: called with a parameter or buffer and this rank's elements of it, of any float
                dtype and on any device.
        """
        ...


@runtime_checkable
class TellsSteps(Protocol):
    """A strategy that may not take an optimizer step, or undo it."""

    step_taken: bool
    """Whether the last one changed the weights, and was not undone since."""


@runtime_checkable
class TellsSaves(Protocol):
    """A strategy that knows what its last save wrote and how long it took."""

    last_save: tuple[str, float] | None
    """Name of the checkpoint and seconds that training stood still for it."""


@runtime_checkable
class KeepsPosition(Protocol):
    """A loader that knows how far it was read, and can go on from there."""

    def state_dict(self) -> dict[str, Any]:
        """How far, as plain data; Lightning stores rank 0's."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        ...


@runtime_checkable
class AddsUp(Protocol):
    """A metric that adds up over batches, as torchmetrics' do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take a batch."""
        ...

    def compute(self) -> Any:
        """The value over all batches since the last reset."""
        ...

    def reset(self) -> None:
        """Begin anew."""
        ...


@runtime_checkable
class SchedulesAccumulation(Protocol):
    """A callback that sets the number of micro-batches at the start of an epoch, as Lightning's."""

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """How many micro-batches an optimizer step takes in an epoch."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """A LightningModule that knows how much work a batch is."""

    def num_tokens(self, batch: Any) -> int:
        """Tokens in this rank's batch; must not sync the host."""
        ...

    def flops_per_token(self) -> float:
        """Model FLOPs per trained token, forward + backward, without recompute."""
        ...
