"""Adapters of peft on a model that is sharded: added before, trained, saved as peft opens them."""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def add_adapter(model: PreTrainedModel, config: PeftConfig, **options: Any) -> PeftModel:
    """Add an adapter to a model, which freezes the model itself.

    Call it in `configure_model`, before the strategy shards. It is peft's `get_peft_model`, which
    would put the adapter of a model without values where its weights lie, on the meta device.

    Args:
        model: of `from_pretrained`.
        config: such as `peft.LoraConfig(r=8)`.
        options: of `get_peft_model`.
    Raises: ValueError: the adapter's first values depend on the model's, which come later.
    Returns: the model with its adapter, drawn as peft draws it, in fp32 on weights of 16 bits.

    Example:
        >>> model = hf.from_pretrained("llama", dtype=torch.bfloat16)
        >>> self.model = hf.add_adapter(model, peft.LoraConfig(r=8))
    """
    with torch.device("cpu"), _stand_ins(model):
        adapted = get_peft_model(model, config, **options)
    for name, parameter in adapted.named_parameters():
        if not parameter.is_meta and bool(parameter.isnan().any()):
            raise ValueError(
                f"{name} is made of the model's weights, as PiSSA, DoRA and others do: must start "
                "from values of its own, since the weights are read after sharding. Use "
                "init_lora_weights=True or 'gaussian', without use_dora."
            )
    assert isinstance(adapted, PeftModel), "adapters of one type are not mixed"
    return adapted


@contextmanager
def _stand_ins(model: PreTrainedModel) -> Generator[None, None, None]:
    """Lay one NaN of the CPU under each parameter on meta, so that peft puts adapters there.

    Whatever peft computes from weights then shows.
    """
    parameters = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    stand_ins: dict[int, nn.Parameter] = {}
    for module, name, parameter in parameters:
        nan = torch.full((), math.nan, dtype=parameter.dtype).expand(parameter.shape)
        stand_in = nn.Parameter(nan, requires_grad=parameter.requires_grad)
        setattr(module, name, stand_ins.setdefault(id(parameter), stand_in))
    try:
        yield
    finally:
        for module, name, parameter in parameters:
            parameter.requires_grad_(stand_ins[id(parameter)].requires_grad)
            setattr(module, name, parameter)


def save_adapter(trainer: Any, folder: str | os.PathLike[str]) -> None:
    """Write the adapter that a Trainer trains as a directory that peft opens.

    Args:
        trainer: whose LightningModule holds one model with an adapter, during or after a run.
        folder: to be written; peft's files in it are replaced.
    Raises: ValueError: there is not one such model.
    Cost: every rank must call it; gathers the trained parameters, which rank 0 holds whole.

    Example:
        >>> zero_strategy.hf.save_adapter(trainer, "llama-lora")
        >>> peft.PeftModel.from_pretrained(base_model, "llama-lora")
    """
    module = trainer.lightning_module
    found = {n: m for n, m in module.named_modules() if isinstance(m, PeftModel)}
    if len(found) != 1:
        raise ValueError(
            f"the LightningModule holds {len(found)} models with adapters: must be one. Add an "
            "adapter in configure_model by zero_strategy.hf.add_adapter."
        )
    ((path, model),) = found.items()
    state = trainer.strategy.lightning_module_state_dict()
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = state[f"{path}.{name}"]
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if trainer.is_global_zero:
                whole[name] = value.detach().cpu()
    if trainer.is_global_zero:
        model.save_pretrained(str(folder), state_dict=whole)
    trainer.strategy.barrier()
