"""Evaluation in which ranks may do different amounts of work.

Gathering a unit is a collective: every rank must join, in the same order. In evaluation ranks
often differ: 9 samples over 2 ranks make 5 and 4 batches, generation ends at different lengths,
a branch depends on the data. Left alone, one rank's gather meets another rank's, or nobody's,
and the run hangs or, worse, mixes up weights.

Here ranks take turns. Before a unit is gathered, all ranks say on a CPU group which unit they
need next, or that they have nothing left to do. One of the named units is gathered by all;
a rank that did not ask for it lets it go and asks again. Ranks in step agree at the first try.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zero_strategy.control import gather_alike

_DONE = -1


class Turns:
    """Makes gathers in evaluation independent of what other ranks do.

    Args:
        units: the sharded modules, in the same order on every rank, the root last.
        stays: whether a unit stays gathered after its forward, until `end_step`.
        group: the control group.
    Cost: one all-gather of 8 bytes per rank on the CPU for each gather of a unit.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        stays: Callable[[int], bool],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._units = units
        self._root = len(units) - 1
        self._stays = stays
        self._group = group
        self._gathered: set[int] = set()
        self._active = False
        self._stepped = False
        self._hooks = (
            [
                # Before FSDP2's own hook, which is the one that gathers.
                unit.register_forward_pre_hook(self._asking_hook(i), prepend=True)
                for i, unit in enumerate(units)
            ]
            if group is not None
            else []
        )

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Take turns inside, and let every unit go at the end.

        Code outside a step therefore finds sharded parameters.
        """
        self._active, self._stepped = True, True
        # FSDP2 notes every forward, and a backward gathers ahead what came before: also what an
        # evaluation called last, on each rank something else.
        forwards = _forwards(self._units[self._root])
        num_forwards = len(forwards)
        try:
            yield
        finally:
            del forwards[num_forwards:]
            self._active = False
            self._gathered.clear()
            for unit in self._units:
                _sharded(unit).reshard()

    def take_stepped(self) -> bool:
        """Whether a step ran since this was last asked."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def gather(self, index: int) -> None:
        """Gather one unit in turn and keep it until `end_step`."""
        if self._group is not None and index not in self._gathered:
            self._wait_for_turn(index)
        _sharded(self._units[index]).unshard()

    def finish(self) -> None:
        """Serve the other ranks until none has work left. Every rank calls it after its steps."""
        if self._group is None:
            return
        while (unit := self._agree(_DONE)) != _DONE:
            self._serve(unit)

    def _asking_hook(self, index: int) -> Callable[..., None]:
        def ask(module: nn.Module, args: object) -> None:
            if self._active and index not in self._gathered:
                self._wait_for_turn(index)

        return ask

    def _wait_for_turn(self, index: int) -> None:
        while (unit := self._agree(index)) != index:
            self._serve(unit)
        if self._stays(index):
            self._gathered.add(index)

    def _serve(self, index: int) -> None:
        """Join a gather this rank did not ask for."""
        unit = _sharded(self._units[index])
        if index in self._gathered:
            unit.reshard()
            unit.unshard()
        else:
            unit.unshard()
            unit.reshard()

    def _agree(self, wanted: int) -> int:
        """The unit all ranks gather next, or `_DONE`.

        The root's turn comes when nobody needs another unit: then every rank is between two
        steps, and none is inside the root's forward, where FSDP2 would not let it go.
        """
        answers = gather_alike(torch.tensor([wanted]), self._group)
        working = [unit for unit in map(int, answers) if unit != _DONE]
        inner = [unit for unit in working if unit != self._root]
        return next(iter(inner or working), _DONE)


def _forwards(root: Any) -> list[Any]:
    """Return what FSDP2 holds of the forwards since the last backward; shared by all units."""
    return root._get_fsdp_state()._comm_ctx.post_forward_order


def _sharded(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), "only sharded modules take turns"
    return module
