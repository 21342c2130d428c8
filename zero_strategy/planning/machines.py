"""What a machine can hold and how fast it moves and steps: one GPU's view of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A host and its GPUs, which are all alike.

    Rates of the host are those of all its cores together: ranks of one host share them.
    """

    name: str
    source: str
    """Where the figures come from."""
    num_gpus: int
    """0 where ranks compute on the host's cores, whose memory then is both tiers."""
    gpu_bytes: int
    """Memory of one GPU that tensors can have."""
    host_bytes: int
    """Host memory that training can have."""
    cores: int
    matmul_flops_per_s: float
    """Sustained by whole training steps of decoders in bf16, not the peak."""
    gpu_memory_bytes_per_s: float
    down_bytes_per_s: float
    """Pinned copies from one GPU to the host, nothing else moving."""
    up_bytes_per_s: float
    """Pinned copies from the host to one GPU, nothing else moving."""
    duplex_bytes_per_s: float
    """Each way while both ways are busy."""
    copy_slowdown: float
    """Part by which products take longer while copies run both ways."""
    host_memory_bytes_per_s: float
    """Of the host's cores and all copies together."""
    step_params_per_s: float
    """Adam's plain pass on the host, bf16 gradients."""
    deferred_params_per_s: float
    """Adam's pass that commits one step and previews the next."""
    preview_params_per_s: float
    """Adam's pass that previews alone."""
    streamed_params_per_s: float
    """Adam on the GPU with its state streamed from host memory and back."""
    disk_read_bytes_per_s: float | None
    disk_write_bytes_per_s: float | None
    disk_update_bytes_per_s: float | None
    """Read, changed and written back. None where the disk was not measured."""


H200 = Machine(
    name="h200",
    source="measured on one H200 with 16 cores and 128 GiB of host memory, 2026-11-30",
    num_gpus=1,
    # Of 139.8 and 128 GiB; the rest belongs to CUDA, the system and the loaded program.
    gpu_bytes=136_000_000_000,
    host_bytes=123_000_000_000,
    cores=16,
    # `train_step_3b`: 0.925 s for 4.8e14 executed operations and a pass over 16 bytes of state.
    matmul_flops_per_s=530e12,
    gpu_memory_bytes_per_s=4.0e12,
    down_bytes_per_s=54.5e9,
    up_bytes_per_s=54.5e9,
    duplex_bytes_per_s=49e9,
    copy_slowdown=0.07,
    # In large pages. Differs by host, 105 to 165e9 were seen; it is the limit of clipped steps.
    host_memory_bytes_per_s=125e9,
    step_params_per_s=4.9e9,
    deferred_params_per_s=3.9e9,
    preview_params_per_s=5.75e9,
    streamed_params_per_s=3.2e9,
    disk_read_bytes_per_s=1.5e9,
    disk_write_bytes_per_s=2.2e9,
    disk_update_bytes_per_s=0.9e9,
)

MACHINES = {H200.name: H200}
"""Name -> machine, as `zs plan --machine` takes it."""
