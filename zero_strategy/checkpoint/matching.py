"""Whether a run steps as the one that was saved: optimizers, their groups, LR schedulers.

Slots and settings of one optimizer mean nothing to another, and a scheduler that takes another's
state goes on somewhere else. So a checkpoint says whose state it holds, and a run that differs is
refused before anything of it is loaded. A file that does not say so is not compared.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

KEY = "stepped_by"
"""Of the checkpoint's dictionary: class names of optimizers and LR schedulers."""

_SLOTS = ("amsgrad", "centered", "momentum")
"""Settings that decide which slots there are: whether they are 0 or False."""
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
_CYCLED = ("momentum", "betas")
"""What a scheduler changes that also cycles momentum; it leaves `max_momentum` in the groups."""
_COMPARED = (bool, int, float, str, tuple, list, type(None))

Names = Mapping[int, str]
"""id(parameter) -> its canonical name."""


def described(optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> dict[str, Any]:
    """Return what a checkpoint says of the objects whose state it holds."""
    return {"optimizers": _classes(optimizers), "lr_schedulers": _classes(schedulers)}


def check(
    checkpoint: Mapping[str, Any],
    here: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    names: Names,
    path: Path,
) -> list[str]:
    """Refuse a run that steps otherwise than the one that was saved. No collective.

    Args:
        checkpoint: the Trainer's dictionary, with `optimizer_states`.
        here: what `described` says of the run.
        optimizers: as `configure_optimizers` made them.
        names: of all parameters of the module.
        path: of the checkpoint, for the error.

    Returns: settings of groups that have another value here than in the checkpoint, where it
        counts; a line each.
    Raises: ValueError: another number of optimizers; or another class of one or of a scheduler,
        other groups, or other slots.
    """
    stored = checkpoint["optimizer_states"]
    if len(stored) != len(optimizers):
        raise ValueError(
            f"the checkpoint holds {len(stored)} optimizers, must be {len(optimizers)} as "
            f"configure_optimizers returns. Return as many, or {_anew(path)}"
        )
    if KEY not in checkpoint:
        return []
    there = checkpoint[KEY]
    problems, settings = [], []
    for index, optimizer in enumerate(optimizers):
        what = f"optimizer {index}"
        was, now = there["optimizers"][index], here["optimizers"][index]
        if was != now:
            problems.append(f"{what} is {now}, was {was} when it was saved")
            continue
        groups = _named(stored[index]["param_groups"], optimizer, names)
        regrouped = _regrouped(groups, _own(optimizer, names))
        if regrouped:
            problems.append(f"{what} ({now}) {regrouped}")
            continue
        for line, decides_slots in _other_settings(groups, optimizer, names):
            (problems if decides_slots else settings).append(f"{what} ({now}), {line}")
    was, now = (", ".join(d["lr_schedulers"]) or "none" for d in (there, here))
    if was != now:
        problems.append(f"LR scheduler is {now}, was {was} when it was saved")
    if problems:
        raise ValueError(
            "\n".join(problems) + f"\n{path}: must be resumed by what was saved, whose state it "
            f"holds. Return the same from configure_optimizers, or {_anew(path)}"
        )
    return settings


def _classes(objects: Iterable[Any]) -> list[str]:
    return [type(one).__name__ for one in objects]


def _anew(path: Path) -> str:
    weights = f'zero_strategy.load_state_dict("{path}")'
    if path.is_file():
        weights = f'torch.load("{path}", weights_only=True)["state_dict"]'
    return (
        f"start anew from the weights: module.load_state_dict({weights}), then fit without "
        "ckpt_path."
    )


def _own(optimizer: Optimizer, names: Names) -> list[list[str]]:
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _named(
    groups: Iterable[Mapping[str, Any]], optimizer: Optimizer, names: Names
) -> list[Mapping[str, Any]]:
    """Groups by parameter name, also of a file that counts parameters in group order."""
    order = [name for group in _own(optimizer, names) for name in group]
    counted = dict(enumerate(order))
    return [{**g, "params": [counted.get(n, n) for n in g["params"]]} for g in groups]


def _regrouped(there: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> str:
    """Say how the parameters that both have lie in other groups; nothing where they do not.

    A module may have gained parameters, and a run a group, so others are left out.
    """
    stored = [group["params"] for group in there]
    common = {n for group in stored for n in group} & {n for group in here for n in group}
    was, now = ([frozenset(common.intersection(g)) for g in groups] for groups in (stored, here))
    known = {*was, frozenset()}
    others = (g for g, kept in zip(here, now, strict=True) if kept not in known)
    moved = next((n for group in others for n in group if n in common), "")
    if not moved:
        return ""
    was_sizes = ", ".join(str(len(group)) for group in stored)
    now_sizes = ", ".join(str(len(group)) for group in here)
    return (
        f"has groups of {now_sizes} parameters, had {was_sizes} when it was saved; {moved} "
        "was with others"
    )


def _other_settings(
    there: Sequence[Mapping[str, Any]], optimizer: Optimizer, names: Names
) -> Iterator[tuple[str, bool]]:
    """Settings that differ between the same groups, and whether they decide on slots."""
    for index, (group, own) in enumerate(
        zip(optimizer.param_groups, _own(optimizer, names), strict=True)
    ):
        stored = next((g for g in there if not set(own).isdisjoint(g["params"])), {})
        cycled = "max_momentum" in group or "max_momentum" in stored
        left_out = {"params", *_SCHEDULED, *(_CYCLED if cycled else ())}
        for key in (k for k in group if k in stored and k not in left_out):
            now, was = group[key], stored[key]
            if _equal(now, was):
                continue
            line = f"group {index}, {key} = {now} here, {was} in the checkpoint"
            yield line, key in _SLOTS and bool(now) != bool(was)


def _equal(one: Any, other: Any) -> bool:
    one, other = (v.tolist() if isinstance(v, Tensor) else v for v in (one, other))
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return list(one) == list(other)
    # A value of another kind is stored as what stands for it.
    return not isinstance(one, _COMPARED) or one == other
