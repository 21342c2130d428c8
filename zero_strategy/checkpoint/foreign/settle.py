"""What was read from another program's file, as plain data that a checkpoint stores."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from omegaconf import OmegaConf

from zero_strategy.checkpoint.foreign.tensors import Built, FileTensor
from zero_strategy.checkpoint.foreign.unpickle import Record, refuse

_MOST_DEPTH = 100
_MOST_VALUES = 5_000_000
"""Far more than a run keeps beside its tensors; a few bytes of pickle can say more than exists."""
_CONTENT, _VALUE = "_content", "_val"
"""Where OmegaConf's containers and nodes keep what they hold."""

_WRAPPERS = re.compile(
    r"(?<![^.])(_forward_module|_orig_mod|_fsdp_wrapped_module|"
    r"_checkpoint_wrapped_module)\."
)


def settled(value: Any, path: str) -> Any:
    """Return a value with its tensors in memory, as the file's own pages, and no records.

    Args:
        value: as it was read.
        path: dotted, for the error.

    Raises:
        RefusedError: a part of it is no plain data, or it is nested too deeply.
    """
    num_values, _ = _extent(value, 0, {})
    if num_values > _MOST_VALUES:
        refuse(f"holds {num_values:.1e} values at {path}, which is too large")
    return _settled(value, path)


def _extent(value: Any, depth: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values it is, each as often as it is referred to, and how deep they lie.

    A value that many refer to is looked at once.
    """
    children = _children(value)
    if not children:
        return 1, 1
    if id(value) not in known:
        if depth > _MOST_DEPTH:
            refuse("is nested too deeply")
        extents = [_extent(child, depth + 1, known) for child in children]
        known[id(value)] = 1 + sum(n for n, _ in extents), 1 + max(below for _, below in extents)
    num_values, height = known[id(value)]
    if depth + height > _MOST_DEPTH:
        refuse("is nested too deeply")
    return num_values, height


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Record):
        return [value.field(_CONTENT), value.field(_VALUE)]
    return []


def _settled(value: Any, path: str) -> Any:
    if isinstance(value, FileTensor | Built):
        return value.read()
    if isinstance(value, dict):
        return {_key(k, path): _settled(v, f"{path}.{k}") for k, v in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(_settled(item, f"{path}[{i}]") for i, item in enumerate(value))
    if isinstance(value, Record):
        return _of_record(value, path)
    if isinstance(value, type) and issubclass(value, Record):
        refuse(f"holds the class {value.__name__} at {path}, must be plain data")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Of the user's own, with --unsafe-pickle; its fields may be tensors.
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _settled(fields, path)
    return value


def _key(key: Any, path: str) -> Any:
    return key if isinstance(key, str) else _settled(key, f"{path}, a key")


def _of_record(record: Record, path: str) -> Any:
    kind = type(record).__name__
    if kind in ("DictConfig", "ListConfig"):
        content = _settled(record.field(_CONTENT), path)
        # A string there is an interpolation of the whole, which `create` would parse as YAML.
        return OmegaConf.create(content) if isinstance(content, dict | list) else content
    if kind.endswith("Node"):
        return _settled(record.field(_VALUE), path)
    return refuse(f"holds a {kind} at {path}, must be plain data and tensors")


def canonical(name: str) -> str:
    """Return a parameter's name without what wrappers of a module put into it."""
    return _WRAPPERS.sub("", name)
