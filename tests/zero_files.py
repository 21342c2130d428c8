"""Files as DeepSpeed's ZeRO writes them, made from whole tensors: layout and class names alone.

What lies between parameters and behind the last is NaN here, so that none of it goes unseen.
"""

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CLASSES = (
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run has, as whole fp32 tensors.

    Attributes:
        weights: of all parameters by name, also frozen ones.
        slots: per-element state of each trained one, such as {"exp_avg": ...}.
        groups: names of the trained ones, and their settings.
        buffers: by name.
        shared: second name -> first, of one parameter.
        step: that was taken last.
    """

    weights: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]
    groups: Sequence[Mapping[str, Any]]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    step: int = 3

    @property
    def frozen(self) -> dict[str, Tensor]:
        return {n: w for n, w in self.weights.items() if n not in self.slots}


def write_zero_files(
    folder: Path,
    run: Trained,
    *,
    zero_stage: int,
    num_ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    per_sub_group: int = 99,
    counts_step_in_state: bool = True,
    client: Mapping[str, Any] | None = None,
    tag: str = "global_step3",
    latest: bool = True,
    dynamic_scale: float | None = None,
) -> Path:
    """Write the files of all ranks.

    Args:
        folder: to write to.
        run: what is saved.
        zero_stage: 1, 2 or 3.
        num_ranks: over which it is sharded.
        dtype: of the module.
        alignment: elements to a multiple of which each parameter begins, at stages 1 and 2.
        per_sub_group: parameters in one flat tensor, at stage 3.
        counts_step_in_state: as torch does; otherwise as a number, like DeepSpeed's own Adam.
        client: what the caller keeps beside.
        tag: name of the folder below.
        latest: whether a file says so.
        dynamic_scale: the loss scale, of fp16.
    """
    (folder / tag).mkdir(parents=True)
    if latest:
        (folder / "latest").write_text(tag)
    flat = _flat_groups(run, zero_stage, per_sub_group)
    prefix = "bf16_" if dtype == torch.bfloat16 else ""
    with _classes() as made:
        for rank in range(num_ranks):
            optimizer = _optimizer(run, flat, rank, num_ranks, zero_stage, alignment)
            if not counts_step_in_state:
                _as_own_adam(optimizer)
            name = "DynamicLossScaler" if dynamic_scale else "LossScaler"
            optimizer["loss_scaler"] = made[name](cur_scale=dynamic_scale or 1.0)
            optimizer["dynamic_loss_scale"] = dynamic_scale is not None
            optimizer["zero_stage"] = made["ZeroStageEnum"](zero_stage)
            optimizer["param_slice_mappings"] = [{"w": made["fragment_address"](numel=3, start=0)}]
            file = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            saved = {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}
            torch.save(saved, folder / tag / file)
        for rank in range(num_ranks if zero_stage == 3 else 1):
            model = _model(run, flat, rank, num_ranks, zero_stage, dtype) | dict(client or {})
            start = f"zero_pp_rank_{rank}_" if zero_stage == 3 else ""
            torch.save(model, folder / tag / f"{start}mp_rank_00_model_states.pt")
    return folder


def _flat_groups(run: Trained, zero_stage: int, per_sub_group: int) -> list[list[str]]:
    """Names that share a flat tensor."""
    if zero_stage < 3:
        return [list(group["params"]) for group in run.groups]
    return [
        list(group["params"][start : start + per_sub_group])
        for group in run.groups
        for start in range(0, len(group["params"]), per_sub_group)
    ]


def _nan(count: int) -> Tensor:
    return torch.full((count,), float("nan"))


def _row(tensors: Sequence[Tensor], alignment: int, num_ranks: int) -> tuple[Tensor, list[int]]:
    """All tensors one after the other, padded for each rank to get as much; and the gaps."""
    row, gaps = torch.empty(0), []
    for number, tensor in enumerate(tensors):
        row = torch.cat([row, tensor.flatten()])
        gaps.append(-len(row) % alignment if number < len(tensors) - 1 else 0)
        row = torch.cat([row, _nan(gaps[-1])])
    return row, gaps


def _parts(tensors: Sequence[Tensor], num_ranks: int, rank: int) -> Tensor:
    """Of each tensor this rank's part, one after the other."""
    parts = []
    for tensor in tensors:
        length = -(-tensor.numel() // num_ranks)
        padded = torch.cat([tensor.flatten(), _nan(length * num_ranks - tensor.numel())])
        parts.append(padded[rank * length : (rank + 1) * length])
    return torch.cat(parts)


def _optimizer(
    run: Trained,
    flat: Sequence[Sequence[str]],
    rank: int,
    num_ranks: int,
    zero_stage: int,
    alignment: int,
) -> dict[str, Any]:
    weights, states, paddings, all_gaps = [], {}, [], []
    for index, names in enumerate(flat):
        slot_names = list(run.slots[names[0]])
        state: dict[str, Any] = {"step": torch.tensor(float(run.step))}
        sources = {"": run.weights} | {
            slot: {n: run.slots[n][slot] for n in names} for slot in slot_names
        }
        for slot, source in sources.items():
            tensors = [source[n] for n in names]
            if zero_stage == 3:
                part, padding, gaps = _parts(tensors, num_ranks, rank), 0, []
            else:
                row, gaps = _row(tensors, alignment, num_ranks)
                length = -(-len(row) // (2 * num_ranks)) * 2
                whole = torch.cat([row, _nan(length * num_ranks - len(row))])
                part = whole[rank * length : (rank + 1) * length]
                padding = min(max(0, (rank + 1) * length - len(row)), length)
            if slot:
                state[slot] = part.clone()
            else:
                weights.append(part[: len(part) - padding].clone())
                paddings.append(padding)
                all_gaps.append(gaps)
        states[index] = state
    of_group = [[i for i, names in enumerate(flat) if names[0] in g["params"]] for g in run.groups]
    groups = [{**g, "params": of} for g, of in zip(run.groups, of_group, strict=True)]
    base = {"state": states, "param_groups": groups}
    if zero_stage == 3:
        attributed = [_with_attribute(w) for w in weights]
        return {
            "partition_count": num_ranks,
            "optimizer_state_dict": base,
            "fp32_flat_groups": attributed,
        }
    return {
        "partition_count": [num_ranks] * len(flat),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": weights,
        "group_paddings": paddings,
        "param_alignment_paddings": all_gaps,
        "clip_grad": 1.0,
    }


def _with_attribute(tensor: Tensor) -> Tensor:
    """DeepSpeed numbers its flat tensors by an attribute, which torch saves in another way."""
    tensor.ds_id = "0"  # type: ignore[attr-defined]
    return tensor


def _as_own_adam(optimizer: dict[str, Any]) -> None:
    base = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    for state in base["state"].values():
        state["step"] = int(state["step"])
    for group in base["param_groups"]:
        group.update(step=0, bias_correction=True)


def _model(
    run: Trained,
    flat: Sequence[Sequence[str]],
    rank: int,
    num_ranks: int,
    zero_stage: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    cast = {n: w.to(dtype) for n, w in run.weights.items()}
    cast |= {n: cast[source] for n, source in run.shared.items()}
    module = {n: torch.empty(0, dtype=dtype) for n in cast} if zero_stage == 3 else cast
    frozen = run.frozen
    model: dict[str, Any] = {
        "module": {**module, **run.buffers},
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": [{n: run.weights[n].shape for n in names} for names in flat],
        "shared_params": dict(run.shared),
        "frozen_param_shapes": {n: w.shape for n, w in frozen.items()} if zero_stage > 1 else None,
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_epoch": run.step, "_step_count": run.step + 1},
        "skipped_steps": 1,
        "global_steps": run.step,
        "dp_world_size": num_ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": zero_stage}},
        "ds_version": "0.19.8",
    }
    if zero_stage == 3:
        model["frozen_param_fragments"] = {
            n: _parts([w], num_ranks, rank).to(dtype) for n, w in frozen.items()
        }
    elif zero_stage == 2:
        model["frozen_param_fragments"] = {n: cast[n] for n in frozen}
    return model


@contextmanager
def _classes() -> Iterator[dict[str, Any]]:
    """Classes under DeepSpeed's names, which is all that a pickle has of them."""
    made: dict[str, Any] = {}
    modules: dict[str, types.ModuleType] = {}
    for module, name in _CLASSES:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            modules.setdefault(parent, types.ModuleType(parent))
        made[name] = type(name, (_Stand,), {"__module__": module})
        setattr(modules[module], name, made[name])
    # Only while pickles are written, and not where the real ones are there.
    new = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(new)
    try:
        yield made
    finally:
        for name in new:
            del sys.modules[name]


class _Stand:
    def __init__(self, *values: Any, **attributes: Any) -> None:
        self.values = values
        vars(self).update(attributes)

    def __reduce__(self) -> Any:
        # As an enumeration does, or any object.
        return (type(self), self.values) if self.values else (type(self), (), vars(self))
