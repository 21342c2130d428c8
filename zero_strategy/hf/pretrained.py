"""Models from files: as transformers loads them, or straight into shards."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from zero_strategy.deferred import defer, is_deferring
from zero_strategy.hf.drawing import DrawnValues
from zero_strategy.hf.loading import build_empty, derive_buffers, unexpected_entry
from zero_strategy.hf.rank_zero import build_on_meta


def from_pretrained(
    folder: str | os.PathLike[str], *, model_class: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """Build a Hugging Face model with the weights of its files.

    In `configure_model` under a strategy of this package the model comes without weights: it is
    sharded first, and each rank then reads its shards. Elsewhere this is
    `model_class.from_pretrained`.

    Args:
        folder: with `config.json` and safetensors, or the name of a model on the hub.
        model_class: a model class of transformers, or one of its `AutoModel...`.
        options: of transformers' `from_pretrained`, such as `dtype=torch.float32`, the dtype of
            the weights. By default it is that of the files.
    Raises: ValueError: an option that places or shards the model itself. At set-up: names that the
        files lack or hold besides.
    Cost: at set-up each rank reads its shards, a tensor at a time; no collective.

    Example:
        >>> def configure_model(self):
        ...     if self.model is None:
        ...         self.model = zero_strategy.hf.from_pretrained("llama", dtype=torch.float32)
    """
    if not is_deferring():
        return model_class.from_pretrained(folder, **options)
    refused = {"device_map", "distributed_config", "tp_plan", "gguf_file", "output_loading_info"}
    if wrong := sorted(refused & options.keys()):
        raise ValueError(
            f"from_pretrained({', '.join(wrong)}=...): must be left out under a strategy that "
            "shards the model itself. Load the model before, without the strategy, to use it."
        )
    entry = unexpected_entry()
    if entry is None:
        model, values = build_empty(lambda: model_class.from_pretrained(folder, **options))
    else:
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(
                f"transformers {transformers.__version__} has another {entry} than 5.24: rank 0 "
                f"loads {folder} whole and sends every rank its shards, which takes longer and the "
                "model's memory on that host.",
                stacklevel=2,
            )
        model, values = build_on_meta(model_class, folder, options)
    defer(model, values)
    return model


def from_config(
    config: PreTrainedConfig, *, model_class: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """Build a Hugging Face model with random weights.

    In `configure_model` under a strategy of this package each rank keeps its shards of what is
    drawn, a block at a time, from rank 0's random state; the values are the same on any number of
    ranks. Elsewhere this is `model_class.from_config`.

    Args:
        config: of the model.
        model_class: one of the `AutoModel...` of transformers.
        options: of transformers' `from_config`, such as `dtype` or `attn_implementation`.
    Cost: at set-up every rank draws the whole model on its CPU, and holds a block of it.
    """
    if not is_deferring():
        return model_class.from_config(config, **options)
    model = derive_buffers(lambda: model_class.from_config(config, **options))
    defer(model, DrawnValues(model))
    return model
