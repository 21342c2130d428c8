"""Bytes one rank holds for a model's states."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Planned bytes per rank, activations not counted."""

    params_bytes: int
    """Sharded parameters."""
    grads_bytes: int
    """Sharded gradients."""
    optimizer_bytes: int
    """Sharded optimizer state."""
    unsharded_bytes: int
    """Largest unit (or units) gathered at one time."""
    num_params: int
    """Parameters of the whole model, over all ranks."""
    num_trainable: int
    """Those of them that are trained."""
    num_units: int
    """Modules that are gathered and released together."""
    unit_class: str
    """Class name of such a module."""
    world_size: int
    strategy: str
    """Name a user would type, for example `zero3`."""
    precision: str
    """Lightning's name of it, for example `bf16-mixed`."""
    host_bytes: int = 0
    """Offloaded optimizer state, and gradients that wait there."""

    @property
    def total_bytes(self) -> int:
        """Planned peak of one rank in bytes, activations not counted."""
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes + self.unsharded_bytes
