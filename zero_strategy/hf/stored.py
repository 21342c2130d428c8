"""How a model's tensors are stored: which of them make which in a file, in what order and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_strategy.checkpoint.safetensors_file import Part

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Tensors by their names in the model -> by those in files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """A tensor of a file, and which tensors of the model it is made of."""

    part: Part
    sources: tuple[str, ...]


def stored_parts(held: Mapping[str, Tensor], convert: Convert) -> list[StoredPart]:
    """Find the smallest groups of tensors that can be converted by themselves.

    Args:
        held: on the meta device, of the dtypes to be stored.
        convert: the model's rules; a stack of experts becomes a tensor for each, for example.
    Returns: what is stored, larger dtypes first and what is made together in a row.
    Cost: a tensor by itself where that gives what all together give; the rest is one group.
    """
    whole = {name: _described(t) for name, t in convert(dict(held)).items()}
    alone: dict[str, tuple[str, ...]] = {}
    for name, tensor in held.items():
        made = {n: _described(t) for n, t in _converted_alone(convert, name, tensor).items()}
        if made.items() <= whole.items():
            alone |= dict.fromkeys(made, (name,))
    used = {source for sources in alone.values() for source in sources}
    rest = tuple(name for name in held if name not in used)
    parts = [
        StoredPart(part=Part(name, *described), sources=alone.get(name, rest))
        for name, described in whole.items()
    ]
    order = {name: i for i, name in enumerate(held)}
    # A file's tensors must be aligned to their own dtype.
    return sorted(parts, key=lambda p: (-p.part.dtype.itemsize, order[p.sources[0]], p.part.key))


def _converted_alone(convert: Convert, name: str, tensor: Tensor) -> dict[str, Tensor]:
    try:
        return convert({name: tensor})
    except (RuntimeError, ValueError, KeyError, IndexError):
        # One of several that only together make a tensor.
        return {"": tensor}


def _described(tensor: Tensor) -> tuple[Sequence[int], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def split_into_files(
    parts: Sequence[StoredPart], max_file_bytes: int
) -> dict[str, list[StoredPart]]:
    """Deal tensors out to files, under the names that transformers looks for.

    Args:
        parts: in the order in which they are written.
        max_file_bytes: of a file, unless one tensor is larger.
    """
    files: list[list[StoredPart]] = [[]]
    room = max_file_bytes
    for stored in parts:
        if files[-1] and stored.part.num_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(stored)
        room -= stored.part.num_bytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    count = len(files)
    return {f"model-{i:05}-of-{count:05}.safetensors": f for i, f in enumerate(files, start=1)}
