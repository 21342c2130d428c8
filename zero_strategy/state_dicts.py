"""What `load_state_dict` and `state_dict` of a sharded module itself do.

Trainers load and save through the strategy. A user may also call the module's own methods, with
whole tensors from elsewhere or in the belief that it holds whole ones.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def adapt_state_dicts(module: nn.Module) -> None:
    """Let a sharded module load whole tensors, and say so when it hands out shards.

    Args:
        module: the user's module, whose parameters are DTensors by now.
    """
    for sub in module.modules():
        if any(isinstance(p, DTensor) for p in sub.parameters(recurse=False)):
            sub.register_load_state_dict_pre_hook(_cut_whole_tensors)
            sub.register_state_dict_post_hook(_warn_of_shards)


def _cut_whole_tensors(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Replace each whole tensor by the shards of rank 0's. Collective."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
            continue
        # Other shapes are left to torch, which lists them all.
        if not isinstance(value, DTensor) and value.shape == parameter.shape:
            # Scattered, not cut by each rank: a rank that loads alone must not go on with weights
            # of which the other ranks know nothing.
            whole = value.detach().to(parameter.to_local().device)
            mesh, placements = parameter.device_mesh, parameter.placements
            state[prefix + name] = distribute_tensor(whole, mesh, placements)


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
