"""Random weights drawn into shards: a model from its configuration, of which no rank holds all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from zero_strategy.hf.loading import draw_own, forget_drawn
from zero_strategy.hf.places import Places


@final
class DrawnValues:
    """First values of one model by its own rules, the same on any number of ranks.

    Args:
        model: as it was built, on the meta device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._places = Places(model)
        self._plan = copy.deepcopy(model)
        forget_drawn(self._plan)

    def fills(self, module: nn.Module, name: str) -> bool:
        """Whether a tensor is one of those the model was built with."""
        return self._places.holds(module, name)

    def fill(self, write: Callable[[Tensor, Tensor], None]) -> None:
        """Draw a block at a time, whole on the CPU of each rank, and write this rank's part.

        Cost: one small message; every rank draws every number, from rank 0's random state on.
        """
        state = [torch.random.get_rng_state()]
        if dist.is_initialized():
            dist.broadcast_object_list(state, src=0)
        written: set[int] = set()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
            torch.random.set_rng_state(state[0])
            for name, whole in self._drawn():
                tensor = self._places.by_name[name].tensor
                # Of tied tensors the first counts, as where transformers ties them.
                if not tensor.is_meta and id(tensor) not in written:
                    written.add(id(tensor))
                    write(tensor, _own_part(whole, tensor))

    def _drawn(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values; those of a block are let go before the next block's."""
        names: dict[int, list[str]] = {}
        for name, place in Places(self._plan).by_name.items():
            names.setdefault(id(place.module), []).append(name)
        for modules, owner in _parts(self._plan, self._plan):
            meta = [(module, *found) for module in modules for found in _lay_out(module)]
            for module in modules:
                draw_own(owner, module)
            for module in modules:
                for name in names.get(id(module), ()):
                    yield name, getattr(module, name.rpartition(".")[2])
            for module, name, tensor in meta:
                setattr(module, name, tensor)


def _parts(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[list[nn.Module], Any]]:
    """Yield modules that are drawn together, children first, with the model whose rules hold.

    A member of a list is drawn whole: rules for a block may change what its children drew.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield _children_first(child), owner
        else:
            yield from _parts(child, owner)
    yield [module], owner


def _children_first(module: nn.Module) -> list[nn.Module]:
    return [*(m for child in module.children() for m in _children_first(child)), module]


def _lay_out(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Take memory for a module's own tensors on meta; returns these."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    meta = [(name, tensor) for name, tensor in own if tensor.is_meta]
    for name, tensor in meta:
        empty = torch.empty_like(tensor, device="cpu")
        setattr(module, name, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)
    return meta


def _own_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's elements of a whole tensor."""
    if not isinstance(tensor, DTensor):
        return whole.detach()
    mesh, placements = tensor.device_mesh, tensor.placements
    whole = whole.detach().to(tensor.to_local().device)
    # Every rank has drawn it: nothing is sent.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
