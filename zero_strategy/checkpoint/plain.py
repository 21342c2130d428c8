"""Turn a checkpoint's metadata into plain data that loads without running code.

Metadata is everything beside tensors of the model and optimizer: loop progress, schedulers,
callbacks, hyper-parameters. It is stored as JSON (`codec.py`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from omegaconf import AnyNode, Container, DictConfig, ListConfig, OmegaConf
from omegaconf.base import ContainerMetadata, Metadata
from torch.distributed.tensor import DTensor

OMEGACONF_CLASSES = (
    DictConfig,
    ListConfig,
    AnyNode,
    ContainerMetadata,
    Metadata,
    defaultdict,
    Any,
    dict,
    list,
    int,
)
"""What a pickled OmegaConf container refers to, for `torch.serialization.safe_globals`."""


def container_paths(value: Any, path: tuple[Any, ...] = ()) -> list[list[Any]]:
    """Where OmegaConf containers stand inside plain dictionaries, as lists of keys."""
    if isinstance(value, Container):
        return [list(path)]
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in container_paths(v, (*path, k))]
    return []


def plain(value: Any, path: str = "checkpoint") -> Any:
    """Rebuild a value from plain containers, numbers, strings and tensors.

    Args:
        value: anything a LightningModule, callback or scheduler put into the checkpoint.
        path: dotted path of the value, for the error.
    Returns: dict, list, tuple, set, number, string, bytes, None, dtype or tensor.
    Raises: ValueError: a value has no plain form; names its path and type.
    """
    if value is None or type(value) in (bool, int, float, str, bytes, complex, torch.dtype):
        return value
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Container):
        return plain(OmegaConf.to_container(value, resolve=False), path)
    if isinstance(value, Mapping):
        return {_key(k, path): plain(v, f"{path}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name), f"{path}.{f.name}")
            for f in dataclasses.fields(value)
        }
    if isinstance(value, list | tuple | set | frozenset):
        items = [plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
        return {list: list, tuple: tuple}.get(type(value), _like(value))(items)
    return _scalar(value, path)


def changed(value: Any, path: str) -> Iterator[str]:
    """Yield what of a value comes back as another type, with its path."""
    if isinstance(value, Container):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from changed(item, f"{path}.{key}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield from changed(item, f"{path}[{index}]")
    elif isinstance(value, Enum | PurePath | np.ndarray | torch.device) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        yield f"{path} ({type(value).__name__})"


def _like(value: Any) -> Any:
    if isinstance(value, list):
        return list
    return tuple if isinstance(value, tuple) else set


def _key(key: Any, path: str) -> Any:
    return plain(key, f"{path}, key {key!r}")


def _scalar(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return plain(value.value, path)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy())
    if isinstance(value, torch.device):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise ValueError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: must be plain data "
        "(numbers, strings, lists, dictionaries, tensors), so that loading runs no code. Leave it "
        "out, for hyper-parameters by save_hyperparameters(ignore=[...])."
    )
