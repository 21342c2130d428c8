"""The one file that knows transformers from inside: from its files into shards, without a copy.

`from_pretrained` of transformers is let run as it is, up to where it would read weights. What it
knows by then, the empty model, the files and the rules by which stored tensors become parameters,
is kept. Once the model is sharded, transformers' own converting loader reads for each parameter the
part that this rank holds; it does so for any parameter that is a DTensor.

Known from inside, at transformers 5.20 to 5.24:

- `PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)`;
- `PreTrainedModel._finalize_model_loading(model, load_config, loading_info)`;
- `core_model_loading.set_param_for_module(model, target_name, param_value, loading_info, ...)`,
  by which the loader hands over one finished parameter;
- `core_model_loading.revert_weight_conversion(model, state_dict)`, for the way back;
- the flag `_is_hf_initialized` of tensors and modules, and a model's `_initialize_weights`;
- the model's `_adjust_missing_and_unexpected_keys`, `_get_dtype_plan` and `_weight_conversions`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, core_model_loading
from transformers.utils import logging as progress

from zero_strategy.gradient import local
from zero_strategy.hf.places import Places, told_with_nearest

_LOAD, _FINISH, _HAND_OVER = (
    "_load_pretrained_model",
    "_finalize_model_loading",
    "set_param_for_module",
)
_EXPECTED = {
    (PreTrainedModel, _LOAD): ["model", "state_dict", "checkpoint_files", "load_config"],
    (PreTrainedModel, _FINISH): ["model", "load_config", "loading_info"],
    (core_model_loading, _HAND_OVER): ["model", "target_name", "param_value", "loading_info"],
    (PreTrainedModel, "_adjust_missing_and_unexpected_keys"): ["self", "loading_info"],
    (core_model_loading, "build_glob_alternation"): ["globs"],
}


def unexpected_entry() -> str | None:
    """Return what of transformers' inside is not as this file knows it, or None."""
    for (owner, name), expected in _EXPECTED.items():
        entry = getattr(owner, name, None)
        if entry is None or [*inspect.signature(entry).parameters][: len(expected)] != expected:
            return f"{getattr(owner, '__name__', owner)}.{name}"
    return None


def build_empty(build: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, StreamedFiles]:
    """Run a `from_pretrained` up to where it would read weights.

    Args:
        build: calls it.
    Returns: the model, with its parameters on the meta device and its derived buffers built, and
        what knows the values.
    Raises: ValueError: the model is quantized.
    """
    found: list[tuple[list[str], Any]] = []

    def keep(model: Any, state_dict: Any, checkpoint_files: list[str], load_config: Any) -> Any:
        found.append((checkpoint_files, load_config))
        return None, None

    def leave(model: Any, load_config: Any, loading_info: Any) -> Any:
        return loading_info

    # A `torch.device("meta")` around would be refused, any other is overruled by transformers.
    with (
        torch.device("cpu"),
        _replaced(PreTrainedModel, _LOAD, staticmethod(keep)),
        _replaced(PreTrainedModel, _FINISH, staticmethod(leave)),
    ):
        model = build()
    ((files, config),) = found
    if config.hf_quantizer is not None:
        raise ValueError(
            f"{config.pretrained_model_name_or_path}: quantized weights cannot be sharded, must be "
            "floating point. Load a checkpoint that is not quantized."
        )
    model.tie_weights(recompute_mapping=False)
    keep_dtypes(model, config.dtype_plan)
    _build_derived_buffers(model)
    return model, StreamedFiles(model, files, dataclasses.replace(config, device_map=None))


def keep_dtypes(model: PreTrainedModel, plan: Mapping[str, torch.dtype]) -> None:
    """Give the tensors that a model keeps in another dtype than its own, such as routers, that.

    Args:
        model: on the meta device.
        plan: pattern of names -> dtype, as `_get_dtype_plan` of a model returns it.
    """
    if not plan:
        return
    pattern, group_of, _ = core_model_loading.build_glob_alternation(list(plan))
    for name, place in Places(model).by_name.items():
        match = pattern.search(name)
        if match and match.lastgroup:
            place.tensor.data = place.tensor.data.to(plan[group_of[match.lastgroup]])


def _build_derived_buffers(model: PreTrainedModel) -> None:
    """Build what no file holds, such as rotary frequencies, by the model's own rules."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, torch.empty_like(buffer, device="cpu"))
    given = [*model.parameters(), *(b for b in model.buffers() if b.is_meta)]
    for tensor in given:
        vars(tensor)["_is_hf_initialized"] = True
    with torch.device("cpu"):
        model.initialize_weights()


def derive_buffers(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Build a model on the meta device, but for its derived buffers."""
    with torch.device("meta"):
        model = build()
    _build_derived_buffers(model)
    return model


def forget_drawn(model: PreTrainedModel) -> None:
    """Let each module of a model be drawn again."""
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)


def draw_own(owner: PreTrainedModel, module: nn.Module) -> None:
    """Draw the first values of a module's own tensors by the rules of the model it belongs to."""
    owner._initialize_weights(module, owner.is_custom_code())


def as_stored(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model under the names and in the shapes that its files have.

    Args:
        model: knows how it was loaded, or by its class how it would be.
        tensors: by their names in the model; all, or those that are converted together.
    """
    return core_model_loading.revert_weight_conversion(model, tensors)


@final
class StreamedFiles:
    """The weights of one model, of which each rank reads what it holds.

    Args:
        model: as it was built, on the meta device.
        files: that hold its weights.
        config: by which transformers would load them.
    """

    def __init__(self, model: PreTrainedModel, files: list[str], config: Any) -> None:
        self._model, self._files, self._config = model, files, config
        self._places = Places(model)
        # The loader works on names and shapes as they are now; they may change until it runs.
        self._plan = copy.deepcopy(model)

    def fills(self, module: nn.Module, name: str) -> bool:
        """Whether the files hold a tensor."""
        return self._places.holds(module, name)

    def fill(self, write: Callable[[Tensor, Tensor], None]) -> None:
        """Read this rank's part of each tensor and write it, a tensor at a time.

        Raises: ValueError: names what the files lack, hold besides, or hold in another shape.
        """
        there = {n: p.tensor for n, p in self._places.by_name.items() if not p.tensor.is_meta}
        for name, tensor in there.items():
            self._plan_like(name, tensor)
        names: dict[int, list[str]] = {}
        for name, tensor in there.items():
            names.setdefault(id(tensor), []).append(name)
        given: dict[int, Tensor | None] = {}

        def take(
            model: Any, target_name: str, param_value: Any, loading_info: Any, *_: Any
        ) -> None:
            loading_info.missing_keys.discard(target_name)
            if target_name not in there:
                return
            tensor, own = there[target_name], param_value.detach()
            first = given.get(id(tensor))
            if own.shape != local(tensor).shape:
                loading_info.mismatched_keys.add((target_name, own.shape, local(tensor).shape))
            elif first is None:
                write(tensor, own)
                # Of a tied one the files may hold another copy, which must be the same.
                given[id(tensor)] = own if len(names[id(tensor)]) > 1 else None
            elif not torch.equal(own, first):
                raise ValueError(
                    f"{self._source}: {' and '.join(names[id(tensor)])} are one parameter of the "
                    "model, but differ in the files: must be equal. Pass tie_word_embeddings=False."
                )

        with _replaced(core_model_loading, _HAND_OVER, take), _one_at_a_time():
            info, _ = PreTrainedModel._load_pretrained_model(
                self._plan, None, self._files, self._config
            )
        self._check(info, {n for n, t in there.items() if id(t) in given}, set(there))
        self._model._weight_conversions = self._plan._weight_conversions

    @property
    def _source(self) -> str:
        return str(self._config.pretrained_model_name_or_path)

    def _plan_like(self, name: str, tensor: Tensor) -> None:
        """Tell the loader how a parameter is cut."""
        if not isinstance(tensor, DTensor):
            return
        path, _, own = name.rpartition(".")
        module = self._plan.get_submodule(path)
        dtype = getattr(module, own).dtype
        cut = DTensor.from_local(
            torch.empty_like(tensor.to_local(), dtype=dtype, device="meta"),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        setattr(module, own, nn.Parameter(cut, requires_grad=False))

    def _check(self, info: Any, given: set[str], there: set[str]) -> None:
        self._plan._adjust_missing_and_unexpected_keys(info)
        missing, unexpected = there - given, info.unexpected_keys
        problems = []
        if missing:
            told = told_with_nearest(missing, unexpected or given)
            problems.append(f"does not hold {told}")
        if unexpected:
            told = told_with_nearest(unexpected, missing or there)
            problems.append(f"holds {told}, which the model has not")
        problems += [
            f"holds {name} with a shard of shape {tuple(stored)}, the model has {tuple(wanted)}"
            for name, stored, wanted in sorted(info.mismatched_keys)
        ]
        problems += [f"{name}: {error}" for name, error in info.conversion_errors.items()]
        if problems:
            raise ValueError(
                f"{self._source} {'; '.join(problems)}: must hold the weights of "
                f"{type(self._model).__name__.removeprefix('FSDP')}. Load the class that the "
                "weights are of, and add your own layers beside it."
            )


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _one_at_a_time() -> Generator[None, None, None]:
    """Let the loader read a tensor when its turn comes, and show no bar on any rank.

    Its threads would read ahead without bound, up to a second copy of the shards.
    """
    variable = "HF_DEACTIVATE_ASYNC_LOAD"
    before, shows = os.environ.get(variable), progress.is_progress_bar_enabled()
    os.environ[variable] = "1"
    progress.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            progress.enable_progress_bar()
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
