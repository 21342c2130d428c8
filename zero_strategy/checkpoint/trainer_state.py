"""Between a Trainer's checkpoint dictionary and the directory on the disk.

Lightning collects one dictionary: weights, optimizer states, loops, callbacks, hyper-parameters.
Its tensors go to the storage by canonical name, the rest becomes metadata. Coming back, the
dictionary holds stand-ins for tensors that are still on the disk, and the strategy reads each
straight into its shards.
"""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.checkpoint import state, storage
from zero_strategy.checkpoint.casts import Casts
from zero_strategy.checkpoint.late import Late, entries
from zero_strategy.checkpoint.plain import OMEGACONF_CLASSES, container_paths, plain

_TENSORS = ("state_dict", "optimizer_states", "sharded_state")


class Stored(Mapping[str, Tensor]):
    """Tensors of a checkpoint directory by name, read when asked for.

    Args:
        path: the checkpoint directory.
        prefix: first part of their canonical names, which the keys leave out.
        casts: decides where a destination has another dtype.
    """

    def __init__(self, path: Path, prefix: str, casts: Casts) -> None:
        self.path = path
        self.prefix = prefix
        self._casts = casts
        self._there = storage.contents(path)
        names = self._there.tensors
        self._names = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        return storage.read(self.path, self._there, self.prefix + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into existing tensors, sharded or not. Collective."""
        storage.load(self.path, {self.prefix + n: t for n, t in tensors.items()}, self._casts)


def to_save(path: Path, checkpoint: Mapping[str, Any]) -> storage.Save:
    """Return a Trainer's checkpoint dictionary as what is stored in a directory.

    A callback may add tensors of its own as `checkpoint["sharded_state"][key][name]`.

    Raises: ValueError: some metadata has no plain form; names its path.
    """
    meta = {k: v for k, v in checkpoint.items() if k not in _TENSORS}
    # Hyper-parameters are stored as plain data; an export rebuilds what was OmegaConf's.
    meta.pop("hparams_type", None)
    meta["omegaconf_at"] = container_paths(meta)
    weights = entries(checkpoint["state_dict"])
    extra_state = {n: v for n, v in weights.items() if state.is_extra_state(n)}
    tensors = {f"model.{n}": t for n, t in weights.items() if n not in extra_state}
    meta["model_extra_state"] = extra_state
    if "optimizer_states" in checkpoint:
        meta["optimizers"] = []
        for index, optimizer in enumerate(checkpoint["optimizer_states"]):
            named, described = state.split_optimizer_state(index, optimizer)
            tensors.update(named)
            meta["optimizers"].append(described)
    extra = checkpoint.get("sharded_state", {})
    meta["sharded_state"] = list(extra)
    for key, named in extra.items():
        tensors.update({f"extra.{key}.{n}": t for n, t in named.items()})
    return storage.Save(path, tensors, plain(meta))


def read(path: Path, *, weights_only: bool | None, casts: Casts) -> dict[str, Any]:
    """Read a checkpoint directory of ours, or a Lightning file, as the dictionary it was.

    Args:
        path: directory or file.
        weights_only: for files, as in `torch.load`; a directory never runs code from its
            metadata.
        casts: decides where a destination of the tensors has another dtype.
    Raises: ValueError: there is nothing, or neither of the two; or it is damaged.
    """
    storage.check_exists(path)
    if path.is_file():
        return _read_file(path, weights_only)
    checkpoint = storage.load_meta(path)
    checkpoint["state_dict"] = Stored(path, "model.", casts)
    if "optimizers" in checkpoint:
        checkpoint["optimizer_states"] = checkpoint.pop("optimizers")
    checkpoint["sharded_state"] = {
        key: Stored(path, f"extra.{key}.", casts) for key in checkpoint["sharded_state"]
    }
    return checkpoint


def _read_file(path: Path, weights_only: bool | None) -> dict[str, Any]:
    checkpoint: Any = None
    # Whatever else a file may be, torch.load would explain it as a question of trust.
    if zipfile.is_zipfile(path):
        with torch.serialization.safe_globals(list(OMEGACONF_CLASSES)):
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(
            f"{path}: must be a checkpoint directory or a whole file that a Trainer saved. Choose "
            "another; weights alone go into the module by load_state_dict, before the Trainer runs."
        )
    return checkpoint


def load_module(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    *,
    strict: bool,
    masters: Mapping[str, Late],
    casts: Casts,
) -> None:
    """Fill a sharded module. Collective.

    Args:
        checkpoint: what `read` gave.
        module: the sharded module.
        strict: whether its names must be those of the checkpoint.
        masters: by name, the weights to fill in place of the module's own.
        casts: decides where a dtype differs.
    """
    weights = checkpoint["state_dict"]
    if isinstance(weights, Stored):
        state.load_model(weights.path, module, strict=strict, masters=masters, casts=casts)
        extra = checkpoint["model_extra_state"]
    else:
        state.load_model_from_full(weights, module, strict=strict, masters=masters, casts=casts)
        extra = {n: v for n, v in weights.items() if state.is_extra_state(n)}
    for name, value in extra.items():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def load_optimizers(
    checkpoint: Mapping[str, Any],
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    names: Mapping[int, str],
    late: state.LateSlots,
    casts: Casts,
) -> None:
    """Fill the optimizers of a sharded module. Collective.

    Args:
        checkpoint: what `read` gave.
        optimizers: as `configure_optimizers` made them, as many as are stored.
        module: the sharded module.
        names: id(parameter) -> qualified name.
        late: what takes slots in place of the optimizers.
        casts: decides where a dtype differs.
    Raises: ValueError: an optimizer steps other parameters than the stored one.
    """
    stored = checkpoint["optimizer_states"]
    weights = checkpoint["state_dict"]
    parameters = {names[id(p)]: p for p in module.parameters()}
    for index, (optimizer, meta) in enumerate(zip(optimizers, stored, strict=True)):
        if all(isinstance(n, str) for g in meta["param_groups"] for n in g["params"]):
            state.add_missing_groups(optimizer, meta["param_groups"], parameters, names)
        if isinstance(weights, Stored):
            state.load_optimizer(weights.path, index, meta, optimizer, names, late, casts)
        else:
            state.load_optimizer_from_full(index, meta, weights, optimizer, names, late, casts)
