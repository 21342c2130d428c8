"""Directories of DeepSpeed's ZeRO stages 1, 2 and 3, read without DeepSpeed.

latest                                       name of the folder below
global_step3/
  mp_rank_00_model_states.pt                 stages 1 and 2: the module, and what is not sharded
  zero_pp_rank_0_mp_rank_00_model_states.pt  stage 3: the same, of each rank
  zero_pp_rank_0_mp_rank_00_optim_states.pt  a rank's part of fp32 weights and moments, flat
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint import state
from zero_strategy.checkpoint.foreign.found import (
    Found,
    by_canonical_name,
    module_state,
    trainer_keys,
)
from zero_strategy.checkpoint.foreign.optimizers import named_slots
from zero_strategy.checkpoint.foreign.settle import canonical, settled
from zero_strategy.checkpoint.foreign.tensors import FileTensor
from zero_strategy.checkpoint.foreign.unpickle import Record, refuse
from zero_strategy.checkpoint.foreign.zero_files import RankFiles, rank_files
from zero_strategy.checkpoint.foreign.zero_flat import FlatGroup, Shapes, checked_shapes

_OF_DEEPSPEED = frozenset(
    (
        *("module", "buffer_names", "param_shapes", "shared_params", "optimizer", "lr_scheduler"),
        *("frozen_param_shapes", "frozen_param_fragments", "sparse_tensor_module_names"),
        *("data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "num_experts"),
        *("ds_config", "ds_version", "universal_checkpoint_info"),
    )
)
_KEPT = ("ds_version", "global_steps", "global_samples", "skipped_steps", "lr_scheduler")


def read(folder: Path, *, weights_only: bool, stored_dtypes: bool, unsafe: bool) -> Found:
    """Read a directory.

    Args:
        folder: that was given to `save_checkpoint`, or the folder of one tag in it.
        weights_only: leave optimizer states out.
        stored_dtypes: keep what DeepSpeed cast to 16 bits as it is; otherwise it becomes float32,
            which changes no value.
        unsafe: run what its pickles say.

    Raises:
        RefusedError: a part of it is not what ZeRO writes, or of a kind that is not read.
    """
    files = rank_files(folder, unsafe=unsafe)
    groups = _groups(files)
    weights = by_canonical_name(_weights(files, groups))
    optimizers = [] if weights_only else [_optimizer(files, groups)]
    model = files.models[0]
    client = {key: value for key, value in model.items() if key not in _OF_DEEPSPEED}
    client.pop("hparams_type", None)
    foreign = settled({key: model.get(key) for key in _KEPT}, "checkpoint")
    notes = ["left out: optimizer states"] if weights_only else []
    if "pytorch-lightning_version" in client:
        checkpoint = settled(client, "checkpoint")
    else:
        notes.append("no Trainer wrote it: its counters start at 0")
        foreign["client_state"] = settled(client, "client_state")
        checkpoint = trainer_keys(optimizers)
        schedule = foreign["lr_scheduler"]
        if optimizers and isinstance(schedule, dict) and "last_epoch" in schedule:
            checkpoint["lr_schedulers"] = [schedule]
        elif schedule:
            notes.append("its schedule is not one of torch's: yours starts at 0")
    checkpoint |= {"foreign": foreign, "state_dict": module_state(weights, widen=not stored_dtypes)}
    if optimizers:
        checkpoint |= {"optimizer_states": optimizers, **_loss_scale(files)}
    return Found(checkpoint=checkpoint, notes=tuple(notes))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The flat tensors: what lies in each, and where each rank's is found."""

    flat: tuple[FlatGroup, ...]
    weights_key: str
    optimizer_key: str


def _groups(files: RankFiles) -> _Groups:
    optimizer, num_ranks = files.optimizers[0], len(files.optimizers)
    by_itself = "fp32_flat_groups" in optimizer
    weights_key = "fp32_flat_groups" if by_itself else "single_partition_of_fp32_groups"
    optimizer_key = "optimizer_state_dict" if by_itself else "base_optimizer_state"
    num_models = num_ranks if by_itself else 1
    if len(files.models) != num_models:
        refuse(f"has the model states of {len(files.models)} ranks, must have {num_models}")
    shapes = files.models[0].get("param_shapes")
    # Releases before groups had one dictionary.
    listed = [shapes] if isinstance(shapes, dict) else shapes
    for rank in files.optimizers:
        there = rank.get(weights_key)
        if not isinstance(listed, list) or not isinstance(there, list | tuple):
            refuse("has no param_shapes or no flat weights, must be written under ZeRO")
        if len(there) != len(listed):
            refuse(f"has {len(there)} flat weights for {len(listed)} groups of parameters")
    assert isinstance(listed, list), "looked at on each rank"
    paddings = [_listed(rank.get("group_paddings"), len(listed)) for rank in files.optimizers]
    gaps = optimizer.get("param_alignment_paddings")
    flat = []
    for index, of in enumerate(listed):
        checked = checked_shapes(of, "param_shapes")
        group = FlatGroup(
            shapes=checked,
            gaps=tuple(_listed(gaps[index] if gaps else None, len(checked))),
            num_ranks=num_ranks,
            each_cut=by_itself,
            most_padding=sum(padding[index] for padding in paddings),
        )
        flat.append(group)
    return _Groups(tuple(flat), weights_key, optimizer_key)


def _listed(counts: Any, length: int) -> list[int]:
    if counts is None:
        return [0] * length
    fits = isinstance(counts, list | tuple) and len(counts) == length
    if not fits or not all(type(n) is int and n >= 0 for n in counts):
        refuse(f"has {counts!r:.60} in place of {length} paddings")
    return list(counts)


def _weights(files: RankFiles, groups: _Groups) -> dict[str, Any]:
    """Return the module's state dict, with fp32 weights where parameters are trained."""
    model = files.models[0]
    module = model.get("module")
    if not isinstance(module, dict):
        refuse("has no module in its model states; pipeline parallelism is not read")
    found: dict[str, Any] = {}
    for index, group in enumerate(groups.flat):
        parts = [rank[groups.weights_key][index] for rank in files.optimizers]
        found |= group.tensors(parts, f"weights of group {index}")
    by_itself = groups.flat[0].each_cut
    if by_itself:
        found |= _frozen(files.models)
    buffers = _names_in(model.get("buffer_names"))
    shared = model.get("shared_params") or {}
    for name, value in module.items():
        source = shared.get(name)
        if name in found:
            continue
        if source in found:
            found[name] = found[source]
        elif state.is_extra_state(name) or _has_data(value, name in buffers or not by_itself):
            found[name] = value
        else:
            refuse(f"has no data of {name!r:.60}")
    return {name: found[name] for name in (*module, *(n for n in found if n not in module))}


def _has_data(value: Any, may_be_empty: bool) -> bool:
    """Whether it is more than what a sharded parameter leaves in its place."""
    return isinstance(value, FileTensor) and (may_be_empty or value.numel > 0)


def _frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of stage 3, where each rank has a part of each parameter that is not trained."""
    shapes: Shapes = checked_shapes(
        models[0].get("frozen_param_shapes") or {}, "frozen_param_shapes"
    )
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        alone = FlatGroup(
            shapes={name: shape}, gaps=(0,), num_ranks=len(models), each_cut=True, most_padding=0
        )
        parts = [of.get(name) if isinstance(of, dict) else None for of in fragments]
        found |= alone.tensors(parts, f"{name!r:.60}")
    return found


def _names_in(value: Any) -> frozenset[str]:
    return frozenset(name for name in value or () if isinstance(name, str))


def _optimizer(files: RankFiles, groups: _Groups) -> dict[str, Any]:
    """Return the optimizer as the strategy saves it: slots and settings by parameter."""
    ranks = [rank.get(groups.optimizer_key) for rank in files.optimizers]
    states = [rank.get("state") if isinstance(rank, dict) else None for rank in ranks]
    settings = ranks[0].get("param_groups") if isinstance(ranks[0], dict) else None
    if not all(isinstance(of, dict) for of in states) or not isinstance(settings, list):
        refuse("has no optimizer state as ZeRO writes it (elastic_checkpoint?). Use --weights-only")
    slots: dict[str, Any] = {}
    for index, group in enumerate(groups.flat):
        of_ranks = [of.get(index, {}) for of in states if isinstance(of, dict)]
        if not all(isinstance(of, dict) for of in of_ranks):
            refuse(f"has no slots of group {index}")
        for name, of in _slots(group, of_ranks, f"group {index}").items():
            slots[canonical(name)] = named_slots(of, name)
    return {"state": slots, "param_groups": _settings(settings, groups.flat)}


def _slots(group: FlatGroup, ranks: Sequence[Any], what: str) -> dict[str, dict[str, Any]]:
    """Return each parameter's slots: parts of flat ones, and what is one number for the group."""
    found: dict[str, dict[str, Any]] = {name: {} for name in group.shapes}
    for slot, value in ranks[0].items():
        if isinstance(value, FileTensor) and value.shape:
            parts = [rank.get(slot) for rank in ranks]
            for name, tensor in group.tensors(parts, f"{slot!r:.60} of {what}").items():
                found[name][slot] = tensor
        else:
            for of in found.values():
                of[slot] = value
    return found


def _settings(param_groups: Sequence[Any], flat: Sequence[FlatGroup]) -> list[dict[str, Any]]:
    groups, numbers = [], []
    for index, group in enumerate(param_groups):
        path = f"param_groups[{index}]"
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list):
            refuse(f"has no parameters in {path}")
        kept = settled({k: v for k, v in group.items() if k != "params"}, path)
        # Of DeepSpeed's own Adam, which counts in the state since.
        kept.pop("step", None)
        if kept.pop("bias_correction", True) is not True:
            refuse(
                "has an Adam without bias correction, which torch does not have. Use --weights-only"
            )
        numbers += params
        names = [
            canonical(name) for n in params if n in range(len(flat)) for name in flat[n].shapes
        ]
        groups.append({**kept, "params": names})
    if numbers != list(range(len(flat))):
        refuse(f"has {numbers[:9]} in its groups, must count {len(flat)} flat weights")
    return groups


def _loss_scale(files: RankFiles) -> dict[str, Any]:
    """Return the state of the strategy's precision, under which a Trainer looks for it."""
    optimizer = files.optimizers[0]
    scaler, skipped = optimizer.get("loss_scaler"), files.models[0].get("skipped_steps", 0)
    scale = scaler.field("cur_scale") if isinstance(scaler, Record) else None
    if optimizer.get("dynamic_loss_scale") is not True or type(scale) not in (int, float):
        return {}
    return {"ZeroPrecision": {"scale": scale, "finite_steps": 0, "skipped_steps": skipped}}
