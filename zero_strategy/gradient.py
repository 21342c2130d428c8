"""Global gradient norm and clipping over sharded gradients.

Every rank holds a shard of each gradient. The norm is taken in fp64 over the local shards, the
squares are summed over the mesh axes on which the gradient is sharded, and every rank scales by
the same coefficient. In fp64 the order of the sum does not show in the fp32 result, so that the
coefficient is the same however the gradients are cut. Gradients on different meshes, and plain
tensors among them, may be mixed.
"""

from collections.abc import Iterable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _sharded_axes(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh and those of its axes over which local squares must be summed."""
    if not isinstance(gradient, DTensor):
        return None, ()
    axes = []
    for axis, placement in enumerate(gradient.placements):
        assert not isinstance(placement, Partial), "gradients must be reduced before their norm"
        if placement.is_shard():
            axes.append(axis)
    return gradient.device_mesh, tuple(axes)


@final
class ShardNorms:
    """L2 norms of this rank's shards of some gradients, and what follows from them.

    Args:
        parameters: parameters whose `.grad` counts; those without one are passed over.

    Cost: one pass over the gradients; no collective, no host sync.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        with_gradient = [p for p in parameters if p.grad is not None]
        self._groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
        for parameter, gradient in zip(with_gradient, _gradients(with_gradient), strict=True):
            self._groups.setdefault(_sharded_axes(gradient), []).append(parameter)
        self._norms = {
            key: torch.stack(
                torch._foreach_norm([local(g) for g in _gradients(same)], 2, dtype=torch.float64)
            )
            for key, same in self._groups.items()
        }

    def total(self) -> Tensor:
        """Return the norm of all gradients as if they lay on one device.

        Returns: 0-dim, fp32, on the gradients' device; the same value on every rank.
        Cost: one all-reduce of 8 bytes per mesh axis in use; no host sync.
        """
        if not self._norms:
            return torch.zeros((), dtype=torch.float32)
        squares = []
        for (mesh, axes), norms in self._norms.items():
            square = norms.square().sum()
            for axis in axes:
                if mesh is not None and mesh.size(axis) > 1:
                    dist.all_reduce(square, group=mesh.get_group(axis))
            squares.append(square)
        return torch.stack(squares).sum().sqrt().float()

    def bad(self) -> list[Tensor]:
        """Return the parameters whose shard here holds an inf or a NaN.

        Cost: one host sync per group; for error messages only.
        """
        return [
            parameter
            for key, same in self._groups.items()
            for parameter, fine in zip(same, self._norms[key].isfinite().tolist(), strict=True)
            if not fine
        ]


def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of all gradients as if they lay on one device; as `ShardNorms.total`."""
    return ShardNorms(parameters).total()


def clip_by_norm_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`.

    Args:
        parameters: parameters whose `.grad` is scaled.
        max_norm: the bound, > 0.
        norm: the value of `global_norm` for the same parameters.
    Cost: no collective; no host sync.
    """
    tensors = [local(g) for g in _gradients(parameters)]
    if tensors:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_, so that a plain process clips alike.
        torch._foreach_mul_(tensors, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def clip_by_value_(parameters: Iterable[Tensor], bound: float) -> None:
    """Clamp every gradient element to [-bound, bound] in place. No collective."""
    tensors = [local(g) for g in _gradients(parameters)]
    if tensors:
        torch._foreach_clamp_min_(tensors, -bound)
        torch._foreach_clamp_max_(tensors, bound)
