"""Optimizer states of other programs, by the names of the parameters.

torch's own state dicts count parameters; the distributed ones name them, nested or flat. A number
becomes a name only where the shapes leave no choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zero_strategy.checkpoint.foreign.settle import canonical, settled
from zero_strategy.checkpoint.foreign.tensors import Built, FileTensor, Lazy, late
from zero_strategy.checkpoint.foreign.unpickle import refuse
from zero_strategy.checkpoint.late import LateDict

COUNTED = "the optimizer's parameters are counted: named in the module's order, by their shapes"
_NO_PARAMETERS = ("running_mean", "running_var")


def named_optimizer(
    state_dict: Mapping[str, Any], weights: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """Return an optimizer's state as the strategy saves it.

    Args:
        state_dict: {"state": ..., "param_groups": ...} in any of torch's forms, tensors not read.
        weights: the module's state dict, by canonical name, tensors not read.
        path: dotted, for the error.

    Returns: {"state": {name: slots}, "param_groups": [...]}.

    Raises:
        RefusedError: it has none of these forms, or a number may be one of several parameters.
    """
    nested = state_dict if "param_groups" in state_dict else _nested(state_dict)
    state, groups = nested.get("state"), nested.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        refuse(f"has no state and param_groups at {path}")
    if not all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        refuse(f"has a group without a list of parameters at {path}.param_groups")
    slots = {_key(key): of for key, of in state.items()}
    members = [[_key(key) for key in group["params"]] for group in groups]
    names = _names(members, groups, slots, weights, path)
    stray = [key for key in slots if key not in names]
    if stray:
        refuse(f"has state at {path} for {stray[:5]}, which are in no group")
    return {
        "state": {names[key]: named_slots(of, f"{path}.{key}") for key, of in slots.items()},
        "param_groups": [
            {**_settings(group, path), "params": [names[key] for key in keys]}
            for group, keys in zip(groups, members, strict=True)
        ],
    }


def is_counted(state_dict: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state has numbers in place of names."""
    groups = state_dict.get("param_groups")
    return isinstance(groups, list) and any(
        type(key) is int and "param_names" not in group
        for group in groups
        for key in group["params"]
    )


def named_slots(slots: Mapping[str, Any], path: str) -> LateDict:
    """Return a parameter's slots: those of a dim or more are read when they are written."""
    if not isinstance(slots, dict):
        refuse(f"has no slots at {path}")
    return LateDict(
        {
            slot: late(value)
            if isinstance(value, FileTensor | Built) and value.shape
            else _scalar(slot, settled(value, f"{path}.{slot}"))
            for slot, value in slots.items()
        }
    )


def _scalar(slot: str, value: Any) -> Any:
    """Steps are tensors in torch's optimizers, and numbers in others."""
    if slot == "step" and type(value) in (int, float):
        return torch.tensor(float(value))
    return value


def _settings(group: Mapping[str, Any], path: str) -> dict[str, Any]:
    left_out = ("params", "param_names")
    return {
        key: settled(value, f"{path}.param_groups.{key}")
        for key, value in group.items()
        if key not in left_out
    }


def _key(key: Any) -> int | str:
    """A number, also where it is written in letters, or a canonical name."""
    if type(key) is int or (isinstance(key, str) and key.isdecimal()):
        return int(key)
    return canonical(str(key))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten_optimizer_state_dict`: keys such as "state.layer.weight.exp_avg"."""
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        kind, _, rest = str(key).partition(".")
        name, _, slot = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            refuse(f"has {key!r:.60} in an optimizer's state")
        (state if kind == "state" else settings)[name][slot] = value
    groups: list[dict[str, Any]] = []
    for name, of in settings.items():
        alike = (group for group in groups if {**group, "params": None} == {**of, "params": None})
        group = next(alike, None)
        if group is None:
            group = {**of, "params": []}
            groups.append(group)
        group["params"].append(name)
    return {"state": dict(state), "param_groups": groups}


Members = Sequence[Sequence[int | str]]


def _names(
    members: Members,
    groups: Sequence[Mapping[str, Any]],
    slots: Mapping[int | str, Any],
    weights: Mapping[str, Any],
    path: str,
) -> dict[int | str, str]:
    keys = [key for group in members for key in group]
    if not all(isinstance(key, int) for key in keys):
        return {key: str(key) for key in keys}
    given: dict[int | str, str] = {}
    for group, of in zip(groups, members, strict=True):
        named = group.get("param_names")
        if isinstance(named, list) and len(named) == len(of):
            given.update(zip(of, map(canonical, map(str, named)), strict=True))
    if len(given) == len(keys):
        return given
    shapes = {key: _shape(slots.get(key, {})) for key in keys}
    tensors = {n: t for n, t in weights.items() if _may_be_parameter(n, t)}
    for candidates in (tensors, _without_ties(tensors)):
        found = _by_shape(members, shapes, candidates)
        if found is not None:
            return found
    return refuse(
        f"counts the parameters of an optimizer at {path}, and its {len(keys)} may be several of "
        f"the {len(tensors)} weights. Use --weights-only; or resume from the file itself under "
        "the strategy, which knows the optimizer, and save"
    )


def _may_be_parameter(name: str, tensor: Any) -> bool:
    lazy = isinstance(tensor, FileTensor | Built)
    return lazy and tensor.dtype.is_floating_point and name.split(".")[-1] not in _NO_PARAMETERS


def _shape(slots: Any) -> tuple[int, ...] | None:
    """Of the parameter, as its slots have it."""
    values = slots.values() if isinstance(slots, dict) else ()
    tensors = (v for v in values if isinstance(v, FileTensor | Built))
    return max((t.shape for t in tensors), key=len, default=None)


def _by_shape(
    members: Members,
    shapes: Mapping[int | str, tuple[int, ...] | None],
    tensors: Mapping[str, Lazy],
) -> dict[int | str, str] | None:
    """Number -> name where each group counts in the module's order and only one way fits."""
    keys = [key for group in members for key in group]
    if len(members) == 1 and len(keys) == len(tensors):
        fits = all(
            shapes[key] in (None, tensor.shape)
            for key, tensor in zip(keys, tensors.values(), strict=True)
        )
        return dict(zip(keys, tensors, strict=True)) if fits else None
    found: dict[int | str, str] = {}
    for shape in set(shapes.values()):
        groups = [[key for key in group if shapes[key] == shape] for group in members]
        holders = [group for group in groups if group]
        names = [name for name, tensor in tensors.items() if tensor.shape == shape]
        if shape is None or len(holders) != 1 or len(names) != len(holders[0]):
            return None
        found.update(zip(holders[0], names, strict=True))
    return found


def _without_ties(tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Leave out weights that are an earlier one under another name."""
    kept: dict[str, Lazy] = {}
    for name, tensor in tensors.items():
        if not any(_tied(tensor, other) for other in kept.values()):
            kept[name] = tensor
    return kept


def _tied(one: Lazy, other: Lazy) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if isinstance(one, FileTensor) and isinstance(other, FileTensor):
        return one.place == other.place
    # Saved twice; what was never trained may well be equal, as zeros are.
    a = one.read()
    return a.unique().numel() > 1 and torch.equal(a, other.read())
