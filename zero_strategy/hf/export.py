"""A trained model leaves as a directory that `from_pretrained` and other programs open."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from zero_strategy.checkpoint import files
from zero_strategy.checkpoint.late import Late, entries, stand_in
from zero_strategy.checkpoint.safetensors_file import bytes_of, check_dtype, layout
from zero_strategy.hf.loading import as_stored
from zero_strategy.hf.places import Places
from zero_strategy.hf.stored import StoredPart, split_into_files, stored_parts

_FILE_BYTES = 5_000_000_000


def export(
    trainer: Any,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _FILE_BYTES,
) -> None:
    """Write the Hugging Face model that a Trainer holds, with the names that its files have.

    Args:
        trainer: whose LightningModule holds one model of transformers, during or after a run.
        folder: to be made; holds the safetensors, `config.json` and `generation_config.json`.
        dtype: of the floating point weights; by default as they are trained, so fp32 masters.
        max_file_bytes: of each safetensors file, unless one tensor is larger.
    Raises: ValueError: no single model, adapters in it, or a folder that cannot be written.
    Cost: every rank must call it; gathers the model's bytes. A tensor at a time is whole in memory,
        where the model's rules make one of several, these.

    Example:
        >>> trainer.fit(module, loader)
        >>> zero_strategy.hf.export(trainer, "llama-tuned", dtype=torch.bfloat16)
    """
    prefix, model = _the_model(trainer.lightning_module)
    folder = Path(folder)
    _agree(trainer.strategy, lambda: _check_new(folder))
    held = _held(trainer.strategy.lightning_module_state_dict(), prefix, model)
    meta = {name: _to_store(stand_in(value), dtype) for name, value in held.items()}
    parts = stored_parts(meta, lambda tensors: as_stored(model, tensors))
    for stored in parts:
        check_dtype(stored.part.key, stored.part.dtype)
    by_file = split_into_files(parts, max_file_bytes)
    gather = _Gatherer(model, held, dtype, keeps=trainer.is_global_zero)
    beside = folder.with_name(f".{folder.name}.inprogress")
    # What a model keeps in another dtype, such as routers, comes after its embedding.
    stored_dtype = next(tensor.dtype for tensor in meta.values() if tensor.is_floating_point())
    write = _Writer(beside, model, stored_dtype) if trainer.is_global_zero else None
    for name, stored in by_file.items():
        tensors = (gather(part) for part in stored)
        if write:
            write.file(name, [part.part for part in stored], tensors)
        # A rank that does not write, or no longer can, still takes part in gathering.
        for _ in tensors:
            pass
    _agree(trainer.strategy, lambda: write and write.finish(folder, by_file))


def _the_model(module: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return a module's only model of transformers and its name there."""
    found: dict[str, PreTrainedModel] = {}
    for name, sub in module.named_modules():
        if isinstance(sub, PreTrainedModel) and not any(f"{name}.".startswith(n) for n in found):
            found[f"{name}."] = sub
    if len(found) != 1:
        raise ValueError(
            f"the LightningModule holds {len(found)} models of transformers: must be one to be "
            "exported. Export others by zero_strategy.load_state_dict and save_pretrained."
        )
    ((prefix, model),) = found.items()
    adapted = [n for n, _ in model.named_parameters() if ".base_layer." in n or "lora_" in n]
    if adapted:
        raise ValueError(
            f"{prefix}{adapted[0]}: the model must be without adapters to be exported. Use "
            "zero_strategy.hf.save_adapter."
        )
    return prefix, model


def _held(state: Mapping[str, Any], prefix: str, model: PreTrainedModel) -> dict[str, Any]:
    """Return what is to be stored, by its name in the model; tied tensors once."""
    values = entries(state)
    ignored = set(model._keys_to_ignore_on_save or ())
    tied = model.all_tied_weights_keys
    places = Places(model).by_name
    return {
        name: values[prefix + name]
        for name, place in places.items()
        if name not in ignored and not (name in tied and places[tied[name]].tensor is place.tensor)
    }


def _to_store(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=wanted, device="meta")


class _Gatherer:
    """Makes whole tensors as they are stored, those of one group at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        held: Mapping[str, Any],
        dtype: torch.dtype | None,
        *,
        keeps: bool,
    ) -> None:
        self._model, self._held, self._dtype, self._keeps = model, held, dtype, keeps
        self._sources: tuple[str, ...] = ()
        self._made: dict[str, Tensor] = {}

    def __call__(self, stored: StoredPart) -> Tensor | None:
        """Return a tensor on the CPU, or None where nothing is written. Collective."""
        if stored.sources != self._sources:
            self._made.clear()
            whole = {name: self._whole(self._held[name]) for name in stored.sources}
            self._sources = stored.sources
            if self._keeps:
                self._made = as_stored(self._model, whole)
        return self._made.get(stored.part.key)

    @torch.no_grad()
    def _whole(self, value: Tensor | Late) -> Tensor:
        tensor = value.read() if isinstance(value, Late) else value
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not self._keeps:
            return torch.empty(0)
        wanted = self._dtype if self._dtype and whole.is_floating_point() else whole.dtype
        return whole.detach().to("cpu", wanted)


class _Writer:
    """Writes a directory beside the one to be, which it then becomes."""

    def __init__(self, beside: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._beside, self._model, self._dtype = beside, model, dtype
        self._failed: OSError | None = None
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        except OSError as error:
            self._failed = error

    def file(self, name: str, parts: Sequence[Any], tensors: Any) -> None:
        """Write a safetensors file; what fails is kept, for the other ranks wait."""
        if self._failed:
            return
        try:
            header, _ = layout(parts, {"format": "pt"})
            descriptor = os.open(self._beside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                files.write_all(descriptor, header)
                for tensor in tensors:
                    files.write_all(descriptor, bytes_of(tensor.contiguous()))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._failed = error

    def finish(self, folder: Path, by_file: Mapping[str, Sequence[StoredPart]]) -> None:
        """Add what is not weights and give the directory its name."""
        try:
            if self._failed:
                raise self._failed
            self._describe(by_file)
            if folder.exists():
                folder.rmdir()
            self._beside.rename(folder)
            files.sync_folder(folder.parent)
        except OSError as error:
            shutil.rmtree(self._beside, ignore_errors=True)
            raise ValueError(
                f"folder = '{folder}': cannot be written ({error}). Use a folder with room that "
                "you may write to."
            ) from error

    def _describe(self, by_file: Mapping[str, Sequence[StoredPart]]) -> None:
        if len(by_file) > 1:
            size = sum(p.part.num_bytes for parts in by_file.values() for p in parts)
            where = {p.part.key: name for name, parts in by_file.items() for p in parts}
            index = {"metadata": {"total_size": size}, "weight_map": where}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            files.write_file(self._beside / "model.safetensors.index.json", text.encode())
        config: Any = copy.deepcopy(self._model.config)
        config.architectures = [type(self._model).__name__.removeprefix("FSDP")]
        config.dtype = self._dtype
        config.save_pretrained(self._beside)
        if self._model.can_generate():
            generation: Any = self._model.generation_config
            generation.save_pretrained(self._beside)


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder = '{folder}': must not exist, or be empty. Use another name.")


def _agree(strategy: Any, act: Callable[[], object]) -> None:
    """Act on rank 0 and raise on every rank what it raises. Collective."""
    message: str | None = None
    if strategy.global_rank == 0:
        try:
            act()
        except ValueError as error:
            message = str(error)
    message = strategy.broadcast(message)
    if message is not None:
        raise ValueError(message)
