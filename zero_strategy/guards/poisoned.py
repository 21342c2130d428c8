"""Refuses to save a state that no run could go on with: weights, moments or buffers not finite.

A step with a finite gradient can still leave such a state: a learning rate so high that weights
overflow, a square of a gradient beyond fp32, a forward that spoils a running mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.checkpoint.late import Late, entries
from zero_strategy.gradient import local

_JUDGED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Of smaller floats torch takes no norm."""


class NonFiniteStateError(ValueError):
    """Something that was to be saved holds an inf or a NaN."""


def non_finite(named: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors whose part on this rank holds an inf or a NaN.

    Cost: one pass over the tensors; one host sync.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in named.items():
        part = local(tensor.detach())
        if part.dtype in _JUDGED and part.numel():
            by_device[part.device][name] = part
    bad: set[str] = set()
    for parts in by_device.values():
        # A maximum passes NaN on, and reads each element once.
        largest = torch._foreach_norm([*parts.values()], math.inf)
        fine = torch.stack([value.double() for value in largest]).isfinite().tolist()
        bad |= {name for name, is_fine in zip(parts, fine, strict=True) if not is_fine}
    return [name for name in named if name in bad]


@final
class PoisonCheck:
    """Looks at what a run is about to save.

    Args:
        module: the sharded module.
        group: the control group, or None for a single process.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        # A mask of -inf, or a value that nothing was measured for yet.
        self._never_finite = frozenset(non_finite(dict(module.named_buffers())))

    def refuse(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a Trainer's checkpoint dictionary that is spoilt. Every rank must call it.

        Moments that offload holds are looked at when they are written, which then fails.

        Raises: NonFiniteStateError: names the first tensor and its rank, alike on all ranks.
        Cost: one pass over this rank's shards; one host sync; one all-reduce of 8 bytes.
        """
        stored = entries(checkpoint["state_dict"])
        named: dict[str, Tensor] = {f"model.{n}": p for n, p in self._module.named_parameters()}
        named |= {
            f"model.{name}": buffer
            for name, buffer in self._module.named_buffers()
            if name in stored and name not in self._never_finite
        }
        for index, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
            for name, slots in optimizer["state"].items():
                named |= _looked_at(f"optim.{index}.{name}", slots)
        names = list(named)
        if (found := self._first(names, non_finite(named))) is not None:
            raise NonFiniteStateError(_refusal(names[found[0]], f"on rank {found[1]}"))

    def _first(self, names: list[str], bad: list[str]) -> tuple[int, int] | None:
        """Return the index of the first bad name of any rank, and that rank."""
        nobody = torch.iinfo(torch.int64).max
        rank, world = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        code = torch.tensor(names.index(bad[0]) * world + rank if bad else nobody)
        if self._group is not None:
            dist.all_reduce(code, dist.ReduceOp.MIN, group=self._group)
        return None if int(code) == nobody else divmod(int(code), world)


def _looked_at(prefix: str, slots: MutableMapping[str, Any]) -> dict[str, Tensor]:
    """Return an optimizer's tensors of one parameter; late ones are looked at when made."""
    there: dict[str, Tensor] = {}
    for slot, value in list(entries(slots).items()):
        name = f"{prefix}.{slot}"
        if isinstance(value, Late):
            slots[slot] = dataclasses.replace(value, read=_checked(name, value.read))
        elif isinstance(value, Tensor):
            there[name] = value
    return there


def _checked(name: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def made() -> Tensor:
        tensor = read()
        if non_finite({name: tensor}):
            raise NonFiniteStateError(_refusal(name, "on this rank"))
        return tensor

    return made


def _refusal(name: str, where: str) -> str:
    return (
        f"{name} holds an inf or a NaN {where}: must be finite to be saved. Resume from the last "
        "checkpoint with a lower learning rate. A buffer that is meant to be so is stored if it is "
        "from the start of the run, or left out with register_buffer(..., persistent=False)."
    )
