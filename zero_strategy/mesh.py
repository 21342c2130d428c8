"""The device mesh of a run: one axis today, the others join as they are built."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SHARD_AXIS = "dp_shard"
"""Ranks that see different data and each hold one shard of every parameter."""


def build_mesh(device_type: str, world_size: int) -> DeviceMesh:
    """Lay all ranks along the shard axis.

    Args:
        device_type: "cpu" or "cuda".
        world_size: number of ranks.
    Cost: collective; every rank must call it together.
    """
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD_AXIS,))


def host_mesh(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> DeviceMesh:
    """Return a mesh of the same ranks for tensors in host memory.

    Args:
        mesh: one axis over all ranks.
        group: over all ranks, for messages between hosts; None for a single rank.
    """
    if mesh.device_type == "cpu":
        return mesh
    if group is None:
        return build_mesh("cpu", mesh.size())
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=mesh.mesh_dim_names)


def same_mesh(a: DeviceMesh, b: DeviceMesh) -> bool:
    """Whether two meshes lay the same ranks along the same axes on the same kind of device."""
    return (
        a.device_type == b.device_type
        and a.mesh_dim_names == b.mesh_dim_names
        and torch.equal(a.mesh, b.mesh)
    )
