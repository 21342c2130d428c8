"""Canonical names for a run's tensors: what is stored never depends on how it was sharded.

    model.<qualified name>                      parameters and persistent buffers
    optim.<index>.<qualified name>.<slot>       optimizer state, by the parameter's name

Each name stands for one global logical tensor. Scalars of the optimizers' groups go to the
metadata, so a resumed run may hold keys the saved one lacked.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.casts import Casts, Pair
from zero_strategy.checkpoint.late import Late, entries, stand_in
from zero_strategy.gradient import local

_EXTRA_STATE = "_extra_state"


def model_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a module's state dict into tensors and the rest (`get_extra_state`)."""
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if is_extra_state(name):
            extra[name] = value
        else:
            tensors[name] = value.detach()
    return tensors, extra


def is_extra_state(name: str) -> bool:
    """Whether a state-dict entry is what a module's `get_extra_state` gave, tensor or not."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def check_names(there: Iterable[str], here: Iterable[str], *, strict: bool) -> set[str]:
    """Compare names both ways.

    Returns: the names on both sides.
    Raises: ValueError: `strict` and the sides differ; lists missing and unexpected names.
    """
    there, here = set(there), set(here)
    missing, unexpected = sorted(here - there), sorted(there - here)
    if strict and (missing or unexpected):
        lines = [f"model.{n}: missing in the checkpoint{_nearest(n, unexpected)}" for n in missing]
        lines += [f"model.{n}: in the checkpoint, not in the module" for n in unexpected]
        shown = "\n".join(lines[:20]) + ("\n..." if len(lines) > 20 else "")
        raise ValueError(f"{shown}\nSet strict_loading = False on the module to load the rest.")
    return there & here


def _nearest(name: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(name, candidates, n=1)
    return f" (nearest there: {near[0]})" if near else ""


def load_model(
    path: Path, module: nn.Module, *, strict: bool, masters: Mapping[str, Late], casts: Casts
) -> None:
    """Fill a sharded module, or the masters of its weights, from a directory. Collective."""
    here = {**model_state(module)[0], **masters}
    there = {n.removeprefix("model.") for n in storage.stored(path) if n.startswith("model.")}
    names = check_names(there, here, strict=strict)
    storage.load(path, {f"model.{n}": here[n] for n in sorted(names)}, casts)


def load_model_from_full(
    full: Mapping[str, Any],
    module: nn.Module,
    *,
    strict: bool,
    masters: Mapping[str, Late],
    casts: Casts,
) -> None:
    """Fill the same from whole tensors that every rank can read. No collective."""
    here = {**model_state(module)[0], **masters}
    tensors = {n: v for n, v in full.items() if not is_extra_state(n)}
    names = sorted(check_names(tensors, here, strict=strict))
    casts.check(_pair(f"model.{n}", tensors[n], here[n]) for n in names)
    for name in names:
        copy_whole(here[name], tensors[name], f"model.{name}")


def _pair(name: str, whole: Tensor, target: Tensor | Late) -> Pair:
    here = stand_in(target)
    return Pair(name, tuple(whole.shape), whole.dtype, tuple(here.shape), here.dtype)


def copy_whole(target: Tensor | Late, whole: Tensor, name: str) -> None:
    """Fill a tensor, sharded or not, from a whole one that this rank holds. No collective.

    Raises: ValueError: the shapes differ.
    """
    if isinstance(target, Late):
        made = target.read()
        copy_whole(made, whole, name)
        target.write(made)
        return
    if target.shape != whole.shape:
        raise ValueError(
            f"{name}: stored as {tuple(whole.shape)}, must be {tuple(target.shape)}. Load a "
            "checkpoint of the same model."
        )
    if isinstance(target, DTensor):
        # Without a source rank each rank cuts its own part, and nothing is sent.
        whole = whole.to(target.to_local().device)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    with torch.no_grad():
        local(target).copy_(local(whole))


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state by parameter name.

    Args:
        optimizer: any torch optimizer.
        names: id(parameter) -> qualified name.
    Returns: {"state": {name: {slot: value}}, "param_groups": [{..., "params": [name]}]}.
    """
    state = {names[id(p)]: dict(slots) for p, slots in optimizer.state.items()}
    groups = [
        {
            **{k: v for k, v in g.items() if k != "params"},
            "params": [names[id(p)] for p in g["params"]],
        }
        for g in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def split_optimizer_state(
    index: int, state: Mapping[str, Any]
) -> tuple[dict[str, Tensor | Late], dict]:
    """Split what `optimizer_state` gave into named tensors and metadata."""
    tensors: dict[str, Tensor | Late] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for name, slots in state["state"].items():
        scalars[name] = {}
        for slot, value in entries(slots).items():
            if isinstance(value, Late) or (isinstance(value, Tensor) and value.ndim > 0):
                tensors[f"optim.{index}.{name}.{slot}"] = value
            else:
                scalars[name][slot] = value
    return tensors, {"param_groups": state["param_groups"], "scalars": scalars}


LateSlots = Mapping[str, Mapping[str, Late]]
"""Parameter -> slot -> what takes it in place of the optimizer."""


def load_optimizer(
    path: Path,
    index: int,
    meta: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[int, str],
    late: LateSlots,
    casts: Casts,
) -> None:
    """Fill an optimizer from a checkpoint directory. Collective.

    Raises: ValueError: the optimizer steps other parameters than the stored one.
    """
    by_name = _parameters_by_name(optimizer, names)
    _check_same_parameters(index, meta["scalars"], by_name)
    prefix = f"optim.{index}."
    state: dict[str, dict[str, Any]] = {n: dict(s) for n, s in meta["scalars"].items()}
    wanted: dict[str, Tensor | Late] = {}
    there = storage.stored(path)
    for key, entry in there.items():
        if not key.startswith(prefix):
            continue
        name, slot = key.removeprefix(prefix).rsplit(".", 1)
        taker = late.get(name, {}).get(slot)
        if taker is None:
            weight = there.get(f"model.{name}")
            weight_dtype = None if weight is None else weight.properties.dtype
            # What is offloaded shows its rounded weights alone.
            here = entry.properties.dtype if name in late else by_name[name].dtype
            dtype = _slot_dtype(entry.properties.dtype, weight_dtype, here)
            taker = _slot_like(by_name[name], tuple(entry.size), dtype)
            state[name][slot] = taker
        wanted[key] = taker
    storage.load(path, wanted, casts)
    _set_state(optimizer, state, meta["param_groups"], names)


def load_optimizer_from_full(
    index: int,
    full: Mapping[str, Any],
    weights: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[int, str],
    late: LateSlots,
    casts: Casts,
) -> None:
    """Fill an optimizer from a plain state dict with whole tensors. No collective.

    Integer keys, as `Optimizer.state_dict` writes them, count parameters in group order.
    """
    by_name = _parameters_by_name(optimizer, names)
    order = [n for group in optimizer.param_groups for n in (names[id(p)] for p in group["params"])]
    rename: dict[Any, str] = dict(enumerate(order)) | {n: n for n in order}
    unknown = [k for k in full["state"] if k not in rename]
    if unknown:
        raise ValueError(
            f"optim.{index}: the checkpoint holds state for parameters {unknown[:5]} that the "
            "optimizer does not step. Build it over the same parameters in the same groups."
        )
    state: dict[str, dict[str, Any]] = {}
    wholes: list[tuple[str, Tensor, Tensor | Late]] = []
    for key, slots in full["state"].items():
        name = rename[key]
        state[name] = {}
        for slot, value in slots.items():
            path = f"optim.{index}.{name}.{slot}"
            if (taker := late.get(name, {}).get(slot)) is not None:
                wholes.append((path, value, taker))
                continue
            if isinstance(value, Tensor) and value.ndim > 0:
                weight = weights.get(name)
                weight_dtype = None if weight is None else weight.dtype
                here = value.dtype if name in late else by_name[name].dtype
                dtype = _slot_dtype(value.dtype, weight_dtype, here)
                target = _slot_like(by_name[name], tuple(value.shape), dtype)
                wholes.append((path, value, target))
                value = target
            state[name][slot] = value
    casts.check(_pair(path, whole, target) for path, whole, target in wholes)
    for path, whole, target in wholes:
        copy_whole(target, whole, path)
    groups = [
        {**group, "params": [rename[p] for p in group["params"]]} for group in full["param_groups"]
    ]
    _set_state(optimizer, state, groups, names)


def _parameters_by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    return {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}


def _check_same_parameters(index: int, there: Iterable[str], here: Mapping[str, Tensor]) -> None:
    lost = [n for n in there if n not in here]
    if lost:
        raise ValueError(
            f"optim.{index}: the checkpoint holds state for {lost[:5]} that the optimizer does not "
            "step. Build it over the same parameters, or load the weights only."
        )


def _slot_dtype(stored: torch.dtype, weight: torch.dtype | None, here: torch.dtype) -> torch.dtype:
    """Return what a slot is to be here: one that had its weight's dtype has this weight's.

    Args:
        stored: of the slot.
        weight: of the stored weight, where there is one.
        here: of the parameter.
    """
    follows = stored == weight and stored.is_floating_point
    return here if follows else stored


def _slot_like(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty slot: cut like its parameter if it has the same shape, else whole."""
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=local(parameter).device)


def _set_state(
    optimizer: Optimizer,
    state: Mapping[str, Mapping[str, Any]],
    groups: Iterable[Mapping[str, Any]],
    names: Mapping[int, str],
) -> None:
    """Install slots, and the stored scalars of each group that still has its parameters."""
    by_name = _parameters_by_name(optimizer, names)
    optimizer.state.clear()
    for name, slots in state.items():
        if slots:
            optimizer.state[by_name[name]] = {
                k: _step_device(v, by_name[name], optimizer) for k, v in slots.items()
            }
    stored_groups = list(groups)
    for group in optimizer.param_groups:
        here = {names[id(p)] for p in group["params"]}
        # A group may have gained or lost parameters since.
        nearest = max(stored_groups, key=lambda g: len(here.intersection(g["params"])), default={})
        if here.intersection(nearest.get("params", ())):
            group.update(_scalars(nearest))


def add_missing_groups(
    optimizer: Optimizer,
    groups: Iterable[Mapping[str, Any]],
    parameters: Mapping[str, Tensor],
    names: Mapping[int, str],
) -> None:
    """Add the groups that the stored optimizer had gained during its run.

    Args:
        optimizer: as `configure_optimizers` made it.
        groups: the stored groups.
        parameters: the module's parameters by name.
        names: id(parameter) -> qualified name.
    """
    held = _parameters_by_name(optimizer, names).keys()
    for group in groups:
        if held.isdisjoint(group["params"]) and parameters.keys() >= set(group["params"]):
            late = [parameters[n] for n in group["params"]]
            optimizer.add_param_group({**_scalars(group), "params": late})


def _scalars(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}


def _step_device(value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """Where a 0-dim slot belongs: fused and capturable optimizers keep `step` on the device."""
    if not isinstance(value, Tensor) or value.ndim > 0:
        return value
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = bool(group.get("fused") or group.get("capturable"))
    return value.to(local(parameter).device if on_device else "cpu")
