"""What `load_state_dict` and `state_dict` of a sharded module itself do.

Trainers load and save through the strategy. A user may also call the module's own methods, with
whole tensors from elsewhere or in the belief that it holds whole ones.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Load = Callable[[DTensor, DTensor], Tensor]
"""(a parameter, values sharded like it) -> what the parameter is to hold of them."""


def adapt_state_dicts(module: nn.Module, load: Load | None) -> None:
    """Let a sharded module load whole tensors, and say so when it hands out shards.

    Args:
        module: the user's module, whose parameters are DTensors by now.
        load: takes the values, where they are kept more exactly than the module holds them.
    """

    # A function and no method of an object, so that copies of the module do not copy that.
    def cut(sub: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        _cut_whole_tensors(sub, state, prefix, load)

    for sub in module.modules():
        if any(isinstance(p, DTensor) for p in sub.parameters(recurse=False)):
            sub.register_load_state_dict_pre_hook(cut)
            sub.register_state_dict_post_hook(_warn_of_shards)


def _cut_whole_tensors(
    module: nn.Module, state: dict[str, Any], prefix: str, load: Load | None
) -> None:
    """Replace each whole tensor by the shards of rank 0's. Collective."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        # Other shapes are left to torch, which lists them all.
        if (
            not isinstance(parameter, DTensor)
            or not isinstance(value, Tensor)
            or value.shape != parameter.shape
        ):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        if not isinstance(value, DTensor):
            # Scattered, not cut by each rank: a rank that loads alone must not go on with weights
            # of which the other ranks know nothing.
            whole = value.detach().to(parameter.to_local().device)
            value = distribute_tensor(whole, mesh, placements)
        if load is not None and _cut_alike(value, parameter):
            value = load(parameter, value)
        state[prefix + name] = value


def _cut_alike(one: DTensor, other: DTensor) -> bool:
    """Whether shards hold the same elements, also where they lie on different devices."""
    return one.placements == other.placements and one.device_mesh.shape == other.device_mesh.shape


def _warn_of_shards(module: nn.Module, state: Mapping[str, Any], prefix: str, _: object) -> None:
    # The strategy reads parameters (`keep_vars=True`), which no one saves.
    names = (prefix + name for name, _ in module.named_parameters(recurse=False))
    values = [state.get(name) for name in names]
    if any(isinstance(v, DTensor) and not isinstance(v, nn.Parameter) for v in values):
        warnings.warn(
            "module.state_dict() of a sharded module holds this rank's shards, as DTensors: "
            "torch.save would write those alone. For whole weights call trainer.save_checkpoint "
            "and then zero_strategy.load_state_dict(path) or `zs checkpoint export`.",
            stacklevel=2,
        )
