"""Directories of `torch.distributed.checkpoint`, written by itself or by Lightning's strategies.

.metadata          a pickle: names, shapes, and in which file each shard lies
__0_0.distcp, ...  shards one after the other, each a file of torch.save; or one safetensors file
meta.pt            Lightning's: what a Trainer keeps beside weights and optimizers
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from zero_strategy.checkpoint.foreign import torch_file
from zero_strategy.checkpoint.foreign.found import (
    Found,
    by_canonical_name,
    module_state,
    trainer_keys,
)
from zero_strategy.checkpoint.foreign.optimizers import COUNTED, is_counted, named_optimizer
from zero_strategy.checkpoint.foreign.parts import Part, whole_file
from zero_strategy.checkpoint.foreign.safetensors_header import Header, is_safetensors, read_header
from zero_strategy.checkpoint.foreign.settle import settled
from zero_strategy.checkpoint.foreign.tensors import Box, Built, FileTensor, from_boxes, late
from zero_strategy.checkpoint.foreign.unpickle import Maker, Record, load, record, refuse

METADATA = ".metadata"
LIGHTNING_META = "meta.pt"
_MOST_METADATA_BYTES = 4 << 30

_Index, _Info, _Tensor, _Bytes, _Chunk, _Properties, _Whole = (
    record(name)
    for name in (
        *("MetadataIndex", "_StorageInfo", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "Metadata"),
    )
)
TABLE = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): _Whole,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _Tensor,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): _Chunk,
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"): _Bytes,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): record("StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): record("MemoryFormat"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): record("_StoragePrefix"),
    ("torch.serialization", "_get_layout"): Maker(str),
}


def read(folder: Path, *, weights_only: bool, unsafe: bool) -> Found:
    """Read a directory.

    Args:
        folder: of the checkpoint.
        weights_only: leave optimizer states out.
        unsafe: run what its pickles say.

    Raises:
        RefusedError: a part of it is not what such a directory holds.
    """
    tree = _Directory(folder, unsafe=unsafe).tree()
    of_trainer: dict[str, Any] = {}
    if (folder / LIGHTNING_META).exists():
        of_trainer = torch_file.read(whole_file(folder, LIGHTNING_META), unsafe=unsafe)
        if not isinstance(of_trainer, dict) or "pytorch-lightning_version" not in of_trainer:
            refuse(f"has a {LIGHTNING_META} that Lightning did not write")
        of_trainer.pop("hparams_type", None)
    weights = by_canonical_name(_take_weights(tree))
    found = _take_optimizers(tree)
    optimizers = [] if weights_only else [named_optimizer(o, weights, n) for n, o in found.items()]
    notes = [f"left out: optimizer states of {', '.join(found)}"] if found and weights_only else []
    if any(map(is_counted, found.values())) and not weights_only:
        notes.append(COUNTED)
    if not of_trainer:
        notes.append("no Trainer wrote it: counters and schedules start at 0")
    checkpoint = settled(of_trainer, "meta") | {"state_dict": module_state(weights)}
    checkpoint = (trainer_keys(optimizers) if not of_trainer else {}) | checkpoint
    if optimizers:
        checkpoint["optimizer_states"] = optimizers
    if tree:
        checkpoint |= _rest(tree)
        notes.append(f"kept beside the weights, as 'foreign': {', '.join(map(str, tree))}")
    return Found(checkpoint=checkpoint, notes=tuple(notes))


def _take_weights(tree: dict[Any, Any]) -> dict[str, Any]:
    """Remove the module's state dict from what was saved, and return it."""
    if len(tree) == 1:
        (inner,) = tree.values()
        if isinstance(inner, dict) and isinstance(inner.get("model"), dict):
            # An application's state under one name.
            tree.clear()
            tree.update(inner)
    for key in ("state_dict", "model"):
        if isinstance(tree.get(key), dict):
            return tree.pop(key)
    weights = {key: value for key, value in tree.items() if isinstance(value, FileTensor | Built)}
    if not weights or any(isinstance(value, dict) for value in tree.values()):
        refuse(f"has no 'model' or 'state_dict' in it, but {', '.join(map(str, tree))[:200]}")
    for key in weights:
        del tree[key]
    return weights


def _take_optimizers(tree: dict[Any, Any]) -> dict[str, Any]:
    numbered = sorted(
        (key for key in tree if re.fullmatch(r"optimizer_\d+", str(key))),
        key=lambda key: int(key.rpartition("_")[2]),
    )
    names = numbered or [key for key in ("optimizer", "optim") if isinstance(tree.get(key), dict)]
    return {name: tree.pop(name) for name in names}


def _rest(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Keep what else was saved: large tensors are not held in memory, so they are apart."""
    tensors: dict[str, Any] = {}

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, FileTensor | Built) and value.shape:
            tensors[path] = late(value)
            return None
        if isinstance(value, dict):
            return {k: plain(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
        return settled(value, path)

    kept = plain(tree, "")
    return {"foreign": kept, "sharded_state": {"foreign": tensors}}


@final
class _Directory:
    def __init__(self, folder: Path, *, unsafe: bool) -> None:
        self._folder, self._unsafe = folder, unsafe
        self._files: dict[str, Part] = {}
        self._headers: dict[Path, Header | None] = {}
        part = whole_file(folder, METADATA)
        if part.length > _MOST_METADATA_BYTES:
            refuse(f"has a {METADATA} of {part.length} bytes")
        whole = load(part.read(), {**torch_file.TABLE, **TABLE}, unsafe=unsafe)
        self._entries = _dict(whole, "state_dict_metadata")
        self._paths = _dict(whole, "planner_data", empty=True)
        self._places = {
            (_field(index, _Index, "fqn"), _size(_field(index, _Index, "offset") or ())): info
            for index, info in _dict(whole, "storage_data").items()
        }

    def tree(self) -> dict[Any, Any]:
        """Everything as it was handed to `save`, tensors not read."""
        tree: dict[Any, Any] = {}
        for name, entry in self._entries.items():
            path = self._paths.get(name, (name,))
            if not isinstance(path, tuple) or not path:
                refuse(f"has no path for {name!r:.60}")
            value = self._tensor(name, entry) if isinstance(entry, _Tensor) else self._object(name)
            _set(tree, path, value)
        return _with_lists(tree)

    def _object(self, name: str) -> Any:
        return torch_file.read(self._part(name, ()), unsafe=self._unsafe)

    def _tensor(self, name: str, entry: Record) -> Built:
        shape, dtype = entry.field("size"), _dtype_of(entry.field("properties"))
        if not isinstance(shape, tuple) or not isinstance(dtype, torch.dtype):
            refuse(f"has {name!r:.60} without shape or dtype")
        boxes: list[tuple[Box, Callable[[], FileTensor]]] = []
        there = 0
        for chunk in _list(entry.field("chunks")):
            offset, size = (_size(_field(chunk, _Chunk, key)) for key in ("offsets", "sizes"))
            part = self._part(name, offset)
            there += part.length
            boxes.append(((offset, size), partial(self._shard, name, part)))
        tensor = from_boxes(shape, dtype, boxes)
        if math.prod(shape) * dtype.itemsize > there:
            refuse(f"has {name!r:.60} of shape {shape} in {there} bytes")
        return tensor

    def _part(self, name: str, offset: tuple[int, ...]) -> Part:
        info = self._places.get((name, offset))
        if not isinstance(info, _Info) or info.field("transform_descriptors"):
            refuse(f"has {name!r:.60} at {offset} nowhere, or compressed")
        file = info.field("relative_path")
        if not isinstance(file, str):
            refuse(f"has {name!r:.60} in no file")
        if file not in self._files:
            self._files[file] = whole_file(self._folder, file)
        return self._files[file].slice(info.field("offset"), info.field("length"))

    def _shard(self, name: str, part: Part) -> FileTensor:
        header = self._header(part)
        tensor = header.tensor(name) if header else torch_file.read(part)
        if not isinstance(tensor, FileTensor):
            refuse(f"has something else where {name!r:.60} should lie")
        return tensor

    def _header(self, part: Part) -> Header | None:
        """Of a file that is one safetensors file, in which shards go by their tensor's name."""
        if part.path not in self._headers:
            file = part.whole()
            self._headers[part.path] = read_header(file) if is_safetensors(file) else None
        return self._headers[part.path]


def _dict(whole: Any, name: str, *, empty: bool = False) -> dict[Any, Any]:
    value = _field(whole, _Whole, name)
    if value is None and empty:
        return {}
    if not isinstance(value, dict):
        refuse(f"has a {METADATA} without {name}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        refuse(f"has a {METADATA} with something else in place of a list")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int for n in value):
        refuse(f"has a {METADATA} with something else in place of a size")
    return value


def _field(value: Any, kind: type[Record], name: str) -> Any:
    if not isinstance(value, kind):
        refuse(f"has a {METADATA} with something else in place of {kind.__name__}")
    return value.field(name)


def _dtype_of(properties: Any) -> Any:
    state = properties.state if isinstance(properties, _Properties) else None
    if isinstance(state, dict):
        return state.get("dtype")
    return state[0] if isinstance(state, tuple) and state else None


def _set(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
        if not isinstance(tree, dict):
            refuse(f"has something below {step!r:.60}, which is no container")
    if path[-1] in tree:
        refuse(f"has {path[-1]!r:.60} twice")
    tree[path[-1]] = value


def _with_lists(tree: dict[Any, Any]) -> Any:
    """Make those dictionaries lists whose keys are numbers; others were keyed by words."""
    filled = {k: _with_lists(v) if type(v) is dict else v for k, v in tree.items()}
    if filled and all(type(key) is int for key in filled):
        return [filled[key] for key in sorted(filled)]
    return filled
