"""Modules that are built without values, and get them once they are cut into shards.

Under the strategy a model may be built on the meta device by someone who knows where its values
lie, such as in files. Nothing whole is then ever read: units are cut empty, and each rank is given
its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zero_strategy.gradient import local
from zero_strategy.protocols import FillsShards, LoadsExactly

_ATTRIBUTE = "_zero_strategy_values"
_allowed: ContextVar[bool] = ContextVar("zero_strategy_deferring", default=False)


@contextmanager
def deferring() -> Generator[None, None, None]:
    """Allow modules to be built without values: what is built inside is sharded later."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def is_deferring() -> bool:
    """Whether what is built now is sharded before it is used."""
    return _allowed.get()


def defer(module: nn.Module, values: FillsShards) -> None:
    """Let something else give a module on the meta device its values, once it is sharded."""
    vars(module)[_ATTRIBUTE] = values


def deferred_in(module: nn.Module) -> dict[nn.Module, FillsShards]:
    """Return the parts of a module that were built without values, and what gives them those."""
    return {s: vars(s)[_ATTRIBUTE] for s in module.modules() if _ATTRIBUTE in vars(s)}


def fill(module: nn.Module, writes: LoadsExactly | None, mesh: DeviceMesh) -> None:
    """Give a sharded module the values that it was built without.

    Args:
        module: the user's, whose parameters are DTensors by now.
        writes: takes weights where they are kept more exactly than the module holds them.
        mesh: one axis, over which they are cut.
    Raises: ValueError: on every rank, what was wrong with the values on any.
    Cost: every rank must call it; how much is read and sent is up to who gives the values. One
        small message.
    """
    for model, values in deferred_in(module).items():
        problem = None
        try:
            values.fill(_writer(writes))
        except (ValueError, OSError) as error:
            problem = str(error)
        problems = [problem]
        if mesh.size() > 1:
            # A rank may be the only one to meet what is wrong, in its part.
            problems = [problem] * mesh.size()
            dist.all_gather_object(problems, problem, group=mesh.get_group())
        if told := next(filter(None, problems), None):
            raise ValueError(told)
        del vars(model)[_ATTRIBUTE]


def _writer(writes: LoadsExactly | None) -> Callable[[Tensor, Tensor], None]:
    @torch.no_grad()
    def write(tensor: Tensor, own: Tensor) -> None:
        if isinstance(tensor, DTensor) and writes is not None:
            # As fp32, since of rounded values only those that differ would be taken.
            own = local(writes.load(tensor, _alike(own.float(), tensor)))
        held = local(tensor)
        held.copy_(own.view_as(held))

    return write


def _alike(own: Tensor, other: DTensor) -> DTensor:
    """Return this rank's elements as a tensor that is cut like another."""
    return DTensor.from_local(
        own,
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=other.shape,
        stride=other.stride(),
    )
