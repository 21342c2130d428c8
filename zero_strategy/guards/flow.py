"""Finds code that calls other modules on some ranks than on others, before it does harm.

Calling a unit gathers its parameters, which takes all ranks. If one calls another unit, either the
run hangs or, where both are of one size, each gets the other's weights. So before each call the
ranks compare which unit it is, and where a forward or a backward ends, that it ends on all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn

from zero_strategy.control import gather_alike
from zero_strategy.guards.progress import PROGRESS

_END_OF_STEP = -1
_END_OF_BACKWARD = -2
_ENDS = {_END_OF_STEP: "the end of training_step", _END_OF_BACKWARD: "the end of the backward"}


class RankFlowError(RuntimeError):
    """Ranks call different modules."""


@final
class FlowCheck:
    """Compares the calls of units in training steps.

    Args:
        units: qualified name -> unit, in the same order on every rank.
        group: the control group.
    Raises: RankFlowError: on every rank, naming what each would call.
    Cost: while training, one all-gather of 8 bytes per rank on the CPU for each call of a unit,
        for which the host waits.
    """

    def __init__(self, units: Mapping[str, nn.Module], group: dist.ProcessGroup) -> None:
        self._names = list(units)
        self._group = group
        self._calls = 0
        self._in_step = self._in_backward = False
        self._hooks = [
            # Before FSDP2's own hook, which is the one that gathers.
            unit.register_forward_pre_hook(self._hook(index), prepend=True)
            for index, unit in enumerate(units.values())
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Compare inside, and that it ends on all ranks alike; then until `after_backward`."""
        self._calls, self._in_step, self._in_backward = 0, True, True
        try:
            yield
            self._compare(_END_OF_STEP)
        finally:
            self._in_step = False

    def after_backward(self) -> None:
        """Compare that a backward, which may call units again, ends on all ranks alike."""
        self._compare(_END_OF_BACKWARD)
        self._in_backward = False

    def _hook(self, index: int) -> Callable[..., None]:
        def compare(module: nn.Module, args: object) -> None:
            # Without gradients outside a step it is an evaluation, where ranks may differ.
            if self._in_step or (self._in_backward and torch.is_grad_enabled()):
                self._compare(index)

        # Not to be traced where units are compiled.
        return cast(Any, torch.compiler.disable(compare))

    def _compare(self, place: int) -> None:
        places = [int(answer) for answer in gather_alike(torch.tensor([place]), self._group)]
        if len(set(places)) > 1:
            raise RankFlowError(self._difference(places))
        self._calls += 1

    def _difference(self, places: list[int]) -> str:
        ranks_at: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            ranks_at.setdefault(place, []).append(rank)
        told = ", ".join(
            f"{_ENDS.get(place) or self._names[place]} on ranks {ranks}"
            for place, ranks in sorted(ranks_at.items(), key=lambda item: item[1])
        )
        return (
            f"ranks call different modules: after {self._calls} equal calls in micro-batch "
            f"{PROGRESS.batch} comes {told}. It must be the same one everywhere, since a call "
            "gathers parameters from all ranks. Decide from numbers that all ranks share, or call "
            "the module everywhere and multiply its output by 0."
        )
