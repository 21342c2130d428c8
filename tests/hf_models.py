"""Tiny Hugging Face models of many families, and runs of them on any number of ranks."""

import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests import lit
from tests.ranks import ranks
from zero_strategy import hf

_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Three experts on two ranks: one rank holds more of them. Widths are multiples of 8, which grouped
# matrix products of bf16 need.
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
_QWEN_MOE: dict[str, Any] = {
    **_SIZES,
    **_EXPERTS,
    "head_dim": 8,
    "num_experts": 3,
    "moe_intermediate_size": 24,
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "llama-tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=8),
    "mixtral": MixtralConfig(**_SIZES, **_EXPERTS, num_local_experts=3),
    "qwen3-moe": Qwen3MoeConfig(**_QWEN_MOE),
    "gpt-oss": GptOssConfig(
        **_SIZES, **_EXPERTS, head_dim=8, num_local_experts=3, sliding_window=8
    ),
    "gpt2": GPT2Config(
        vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1
    ),
    "deepseek-v3": DeepseekV3Config(**_DEEPSEEK),
}


def options(family: str) -> dict[str, Any]:
    """What a family needs to be told when it is built."""
    return {"attn_implementation": "eager"} if family == "gpt-oss" else {}


def save_random(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a model with random weights, also where they start at 0 or 1, and save it."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family], **options(family))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.02)
    model.to(dtype).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options(family))


def rows(num_rows: int = 4, seq_len: int = 12) -> Tensor:
    """Token rows, the same in every process."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, 131, (num_rows, seq_len), generator=generator)


class LitHF(pl.LightningModule):
    """Trains a Hugging Face model, which it loads in `configure_model`."""

    def __init__(self, folder: Path, **load: Any) -> None:
        super().__init__()
        self.folder, self.load = folder, load
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = hf.from_pretrained(self.folder, **self.load)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.seen = float(self.trainer.strategy.reduce(loss.detach().clone()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


@dataclass
class Look(pl.Callback):
    """Keeps whole tensors: parameters and buffers before the first step, gradients at it."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.parameters = lit.whole(module.model)
        self.buffers = {n: b.clone() for n, b in module.model.named_buffers()}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, parameter in module.model.named_parameters():
            if parameter.grad is not None:
                grad: Any = parameter.grad
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                self.gradients[name] = whole.clone()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of one step saw."""

    loss: float
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor]
    checks: dict[str, str]


def one_step(strategy: Any, folder: Path, *, module: Any = None, **load: Any) -> Run:
    """Train a step on all rows; ranks in a group must call it together."""
    look, module = Look(), module or LitHF(folder, **load)
    precision: Any = "bf16-mixed" if "offload" in str(strategy) else "32-true"
    run = lit.trainer(strategy, max_steps=1, callbacks=[look], precision=precision)
    run.fit(module, loader())
    checks = {} if strategy == "auto" else run.strategy.checks
    return Run(
        loss=module.seen,
        parameters=look.parameters,
        buffers=look.buffers,
        gradients=look.gradients,
        checks=checks,
    )


def loader() -> DataLoader:
    """This rank's part of the rows."""
    data: Any = rows()
    if not dist.is_initialized():
        return DataLoader(data, batch_size=len(data))
    sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=len(data) // dist.get_world_size(), sampler=sampler)


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    """Return what a call is refused with, so that the ranks live on."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "not refused"


def expect_refusal(pattern: str, function: Any, *args: Any, **kwargs: Any) -> None:
    """Expect every one of two ranks to refuse a call alike."""
    for told in ranks(2).run(refusal, function, *args, **kwargs):
        assert re.search(pattern, told), told
