"""Which files a DeepSpeed directory has, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.foreign import torch_file
from zero_strategy.checkpoint.foreign.parts import below, whole_file
from zero_strategy.checkpoint.foreign.unpickle import Table, record, refuse

LATEST = "latest"
_MOST_NAME_BYTES = 255
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_00_model_states\.pt")
TABLE: Table = {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): record("ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): record("LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): record("DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"): record("fragment_address"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """What the files hold, tensors not read.

    Attributes:
        optimizers: the sharded optimizer of each rank.
        models: the model states of each rank at stage 3, of the first one alone before.
    """

    optimizers: tuple[Mapping[str, Any], ...]
    models: tuple[Mapping[str, Any], ...]


def has_rank_files(folder: Path) -> bool:
    """Whether a folder is that of one tag."""
    return any(_OPTIMIZER.fullmatch(path.name) for path in folder.iterdir())


def rank_files(folder: Path, *, unsafe: bool) -> RankFiles:
    """Read the files of all ranks.

    Args:
        folder: that was given to `save_checkpoint`, or that of one tag in it.
        unsafe: run what the pickles say.

    Raises:
        RefusedError: ranks are missing, or the run was parallel in a way that is not read.
    """
    tag = folder if has_rank_files(folder) else _tag(folder)
    states = {path.name for path in tag.iterdir() if path.name.endswith("_states.pt")}
    others = {n for n in states if not (_OPTIMIZER.fullmatch(n) or _MODEL.fullmatch(n))}
    if others:
        refuse(f"has {min(others)}: tensor, pipeline and expert parallelism are not read")
    if not any(map(_OPTIMIZER.fullmatch, states)):
        refuse(f"has no *_optim_states.pt in {tag.name}, must be written under ZeRO 1, 2 or 3")
    optimizers, models = _numbered(states, _OPTIMIZER), _numbered(states, _MODEL)
    found = []
    for name in optimizers:
        content = _dict(tag, name, unsafe=unsafe).get("optimizer_state_dict")
        if not isinstance(content, dict):
            refuse(f"has no optimizer_state_dict in {name}")
        found.append(content)
    count = found[0].get("partition_count")
    counts = count if isinstance(count, list | tuple) else [count]
    if any(n != len(found) for n in counts):
        refuse(f"has the optimizer states of {len(found)} ranks, must have those of {count}")
    if not models:
        refuse("has no model states")
    contents = tuple(_dict(tag, name, unsafe=unsafe) for name in models)
    if any(contents[0].get(key) for key in ("num_experts", "ds_autoep_layers")):
        refuse("has experts, whose parallelism is not read")
    return RankFiles(optimizers=tuple(found), models=contents)


def _tag(folder: Path) -> Path:
    """Return the folder that `latest` names, or the only one there is."""
    if (folder / LATEST).exists():
        part = whole_file(folder, LATEST)
        if part.length > _MOST_NAME_BYTES:
            refuse(f"has {part.length} bytes in {LATEST}, must have a name there")
        name = part.read().decode("utf-8", "replace").strip()
        if "/" in name or not (path := below(folder, name)).is_dir():
            refuse(f"names {name!r} in {LATEST}, must name a folder in it")
        return path
    tags = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and has_rank_files(p)]
    if len(tags) != 1:
        shown = ", ".join(sorted(path.name for path in tags)) or "none"
        refuse(f"has no file {LATEST} and not one folder of ZeRO's files, but {shown}. Name one")
    return tags[0]


def _numbered(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the names that match, by rank.

    Raises:
        RefusedError: a rank is missing, or there twice.
    """
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    by_rank = sorted((int(match[1] or 0), match[0]) for match in matches)
    if [rank for rank, _ in by_rank] != list(range(len(by_rank))):
        refuse(f"has files of ranks {[rank for rank, _ in by_rank][:20]}, must have each once")
    return [name for _, name in by_rank]


def _dict(folder: Path, name: str, *, unsafe: bool) -> dict[Any, Any]:
    content = torch_file.read(whole_file(folder, name), more=TABLE, unsafe=unsafe)
    if not isinstance(content, dict):
        refuse(f"has something else than a dictionary in {name}")
    return content
