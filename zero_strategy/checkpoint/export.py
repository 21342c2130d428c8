"""One file from a checkpoint directory, for programs that know nothing of sharding."""

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.safetensors_file import write_safetensors


def load_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read the whole weights of a checkpoint directory in this process.

    Args:
        path: directory written by `Trainer.save_checkpoint` or `ModelCheckpoint`.
    Returns: qualified name -> whole tensor on CPU, ready for `module.load_state_dict`.
    Raises: ValueError: the path is no complete checkpoint directory, or is damaged.
    Cost: no collective; host memory of the whole weights.

    Example:
        >>> module.load_state_dict(zero_strategy.load_state_dict("step-100.ckpt"))
    """
    path = Path(path)
    extra: dict[str, Any] = storage.load_meta(path)["model_extra_state"]
    return extra | _without_prefix(read_all(path, "model."), "model.")


def export(path: str | Path, out: str | Path) -> None:
    """Consolidate a checkpoint directory into one file.

    Args:
        path: the checkpoint directory.
        out: `*.ckpt` for a Lightning checkpoint that any Trainer resumes from, or
            `*.safetensors` for the weights alone. Its folder is made if absent; an existing file
            is replaced once the new one is complete.
    Raises: ValueError: another ending, no complete checkpoint, or `out` cannot be written.
    Cost: no collective; host memory of the largest tensor for `.safetensors`, of everything that
        is written for `.ckpt`.
    """
    path, out = Path(path), Path(out)
    if out.suffix not in (".ckpt", ".safetensors"):
        raise ValueError(
            f"out = '{out}': must end in .ckpt (Lightning, resumable) or .safetensors (weights). "
            f"Use {out.with_suffix('.ckpt')}."
        )
    if out.is_dir() or any(map(storage.is_checkpoint, out.absolute().parents)):
        raise ValueError(
            f"out = '{out}': must be a file outside any checkpoint, but is a directory or lies in "
            f"one. Use {path.with_name(f'{path.stem}-exported{out.suffix}')}."
        )
    if out.suffix == ".safetensors":
        weights = _weights(path)
        _write(out, lambda file: write_safetensors(file, weights))
    else:
        checkpoint = _lightning_checkpoint(path)
        _write(out, lambda file: torch.save(checkpoint, file))


def _weights(path: Path) -> dict[str, tuple[Sequence[int], torch.dtype, Callable[[], Tensor]]]:
    """What `load_state_dict` returns, each tensor to be read when its turn comes."""
    extra: dict[str, Any] = storage.load_meta(path)["model_extra_state"]
    found: dict[str, tuple[Sequence[int], torch.dtype, Callable[[], Tensor]]] = {
        name: (value.shape, value.dtype, partial(_given, value))
        for name, value in extra.items()
        if isinstance(value, Tensor)
    }
    there = storage.contents(path)
    for name, entry in there.tensors.items():
        if name.startswith("model."):
            read = partial(storage.read, path, there, name)
            found[name.removeprefix("model.")] = (entry.shape, entry.dtype, read)
    return found


def _given(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def _write(out: Path, write: Callable[[Path], None]) -> None:
    """Write beside the target and rename, so that a full disk leaves no half file there."""
    beside = out.with_name(f".{out.name}.inprogress")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
        try:
            write(beside)
            beside.replace(out)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"out = '{out}': cannot be written ({error}). Use a folder with room that you may "
            "write to."
        ) from error


def read_all(path: Path, prefix: str) -> dict[str, Tensor]:
    """Whole tensors whose canonical name starts with the prefix, read in this process alone."""
    there = storage.contents(path)
    names = [name for name in there.tensors if name.startswith(prefix)]
    return {name: storage.read(path, there, name) for name in names}


def _without_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items()}


def module_checkpoint(path: str | PathLike[str], map_location: Any = None) -> dict[str, Any]:
    """Return what `LightningModule.load_from_checkpoint` needs of a checkpoint directory.

    Args:
        path: the directory.
        map_location: as `torch.load` takes it; a name or a device moves the weights there, all else
            leaves them on the CPU, where they were stored from.

    Raises: ValueError: no complete checkpoint, or a damaged one.
    Cost: no collective; host memory of the whole weights. Optimizer state is not read.
    """
    checkpoint = _lightning_checkpoint(Path(path), weights_alone=True)
    if isinstance(map_location, str | torch.device):
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {
            name: value.to(map_location) if isinstance(value, Tensor) else value
            for name, value in weights.items()
        }
    return checkpoint


def _lightning_checkpoint(path: Path, *, weights_alone: bool = False) -> dict[str, Any]:
    checkpoint = storage.load_meta(path)
    checkpoint.pop("model_extra_state")
    for keys in checkpoint.pop("omegaconf_at"):
        _rebuild_container(checkpoint, keys)
    optimizers = checkpoint.pop("optimizers", None)
    checkpoint["state_dict"] = load_state_dict(path)
    if weights_alone:
        del checkpoint["sharded_state"]
        return checkpoint
    checkpoint["sharded_state"] = {
        key: _without_prefix(read_all(path, f"extra.{key}."), f"extra.{key}.")
        for key in checkpoint["sharded_state"]
    }
    if optimizers is not None:
        checkpoint["optimizer_states"] = [
            _integer_keyed(meta, read_all(path, f"optim.{i}."), f"optim.{i}.")
            for i, meta in enumerate(optimizers)
        ]
    return checkpoint


def _rebuild_container(checkpoint: dict[str, Any], keys: list[Any]) -> None:
    """Make the plain value under a path the OmegaConf container that it was."""
    parent: Any = checkpoint
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = OmegaConf.create(parent[keys[-1]])
    if keys == ["hyper_parameters"]:
        # Lightning passes them on as this class instead of as keyword arguments.
        checkpoint["hparams_type"] = type(parent[keys[-1]])


def _integer_keyed(meta: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    """The state dict that torch's own `Optimizer.load_state_dict` expects."""
    order = [name for group in meta["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(order)}
    state: dict[int, dict[str, Any]] = {number[n]: dict(s) for n, s in meta["scalars"].items()}
    for key, tensor in tensors.items():
        name, slot = key.removeprefix(prefix).rsplit(".", 1)
        state[number[name]][slot] = tensor
    groups = [{**g, "params": [number[n] for n in g["params"]]} for g in meta["param_groups"]]
    return {"state": {k: v for k, v in state.items() if v}, "param_groups": groups}
