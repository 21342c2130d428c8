"""Plain data as JSON and back, without loss: what JSON has no form for is an object with a tag.

{"$": "tuple", "value": [...]}      also set, bytes, complex, dtype, float (not finite),
                                    dict (keys that are no strings) and tensor (by its name)
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

TAG = "$"
PREFIX = "meta."
"""Of the names under which tensors in plain data are stored."""


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return plain data as JSON holds it, and its tensors by the names it refers to them.

    Args:
        value: what `plain.plain` gives.
    """
    tensors: dict[str, Tensor] = {}
    return _encoded(value, tensors), tensors


def _encoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"{PREFIX}{len(tensors)}"
        tensors[name] = value
        return _tagged("tensor", name)
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: _encoded(item, tensors) for key, item in value.items()}
        pairs = [[_encoded(k, tensors), _encoded(v, tensors)] for k, v in value.items()]
        return _tagged("dict", pairs)
    if isinstance(value, list):
        return [_encoded(item, tensors) for item in value]
    if isinstance(value, tuple | set):
        items = [_encoded(item, tensors) for item in value]
        return _tagged(type(value).__name__, items)
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, complex):
        return _tagged("complex", [_scalar(value.real), _scalar(value.imag)])
    if isinstance(value, torch.dtype):
        return _tagged("dtype", str(value).removeprefix("torch."))
    if isinstance(value, float) and not math.isfinite(value):
        return _tagged("float", repr(value))
    return value


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {TAG: kind, "value": value}


def decode(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the plain data that `encode` made a tree of.

    Args:
        tree: what `json.loads` gives.
        tensor: returns one by its name.

    Raises:
        ValueError: a tag that is not known, or a value that does not fit it.
    """
    if isinstance(tree, list):
        return [decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(item, tensor) for key, item in tree.items()}
    kind, value = tree[TAG], tree.get("value")
    if kind == "tensor" and isinstance(value, str):
        return tensor(value)
    if kind not in _DECODERS:
        raise ValueError(f"a value is tagged {kind!r}: must be one of {', '.join(_DECODERS)}.")
    return _DECODERS[kind](decode(value, tensor))


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r}: must be the name of a dtype of torch.")
    return found


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(*parts),
    "dtype": _dtype,
    "float": float,
    "dict": dict,
}
