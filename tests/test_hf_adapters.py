"""Adapters train in shards as in one process, on a base that stays as it was loaded."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests import hf_models, lit
from tests.hf_models import LitHF, expect_refusal, loader, one_step, save_random
from tests.ranks import ranks
from tests.test_hf_parity import TOLERANCE, difference
from zero_strategy import hf

BF16 = {"dtype": torch.bfloat16}
PROJECTIONS = r".*self_attn\.(q_proj|o_proj|q_a_proj|kv_b_proj)"


class LitLora(LitHF):
    """Adds an adapter in `configure_model`, of which both matrices are drawn."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(2)
            model = hf.from_pretrained(self.folder, **self.load)
            config = peft.LoraConfig(r=3, target_modules=PROJECTIONS, init_lora_weights=False)
            self.model = hf.add_adapter(model, config)


def lora_step(strategy: Any, folder: Path, load: dict[str, Any]) -> hf_models.Run:
    return one_step(strategy, folder, module=LitLora(folder, **load))


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe", "deepseek-v3"])
def test_an_adapter_trains_in_shards_as_in_one_process(family: str, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    load = {"dtype": torch.float32}
    expected = lora_step("auto", tmp_path, load)
    run = ranks(2).run(lora_step, "zero3", tmp_path, load)[0]
    assert run.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert torch.equal(run.parameters[name], value), name
    assert run.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert run.gradients.keys() == {n for n in expected.parameters if "lora_" in n}
    for name, gradient in expected.gradients.items():
        assert difference(run.gradients[name], gradient) <= TOLERANCE, name


@pytest.mark.parametrize("strategy", ["zero2", "zero3_offload"])
@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_a_frozen_base_keeps_its_16_bits(family: str, strategy: str, tmp_path: Path) -> None:
    model = save_random(family, tmp_path, torch.bfloat16)
    run = ranks(2).run(lora_step, strategy, tmp_path, BF16)[0]
    base = {n.replace(".base_layer", ""): v for n, v in run.parameters.items()}
    for name, parameter in model.named_parameters():
        found = base[f"base_model.model.{name}"]
        assert found.dtype == parameter.dtype
        assert torch.equal(found, parameter), name


def train_and_save(strategy: str, folder: Path, out: Path, load: dict[str, Any]) -> Any:
    """Train an adapter for two steps and save it; what the run holds of it."""
    module = LitLora(folder, **load)
    precision: Any = "bf16-mixed" if "offload" in strategy else "32-true"
    run = lit.trainer(strategy, max_epochs=2, precision=precision)
    run.fit(module, loader())
    hf.save_adapter(run, out)
    weights = lit.whole(module.model) | {
        name.removeprefix("model."): value.full_tensor()
        for name, value in run.strategy.masters().items()
    }
    return {name: value for name, value in weights.items() if "lora_" in name}


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload"])
def test_peft_opens_a_saved_adapter(strategy: str, tmp_path: Path) -> None:
    base = save_random("llama", tmp_path / "base")
    load = {"dtype": torch.float32}
    trained = ranks(2).run(train_and_save, strategy, tmp_path / "base", tmp_path / "out", load)[0]
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    found = {n: p for n, p in opened.named_parameters() if "lora_" in n}
    assert found.keys() == trained.keys()
    for name, value in trained.items():
        assert torch.equal(found[name], value), name


class AddsLate(LitHF):
    """Adds an adapter once the model is sharded."""

    def configure_optimizers(self) -> Any:
        self.model = peft.get_peft_model(self.model, peft.LoraConfig(r=2))
        return super().configure_optimizers()


class AddsByPeft(LitHF):
    """Leaves it to peft where the adapter lies."""

    def configure_model(self) -> None:
        if self.model is None:
            model = hf.from_pretrained(self.folder, **self.load)
            self.model = peft.get_peft_model(model, peft.LoraConfig(r=2))


def step_of(kind: Any, folder: Path) -> None:
    one_step("zero3", folder, module=kind(folder))


def test_an_adapter_added_after_sharding_is_refused_by_name(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    expect_refusal(
        r"lora_A.default.weight.*: trainable parameters must be", step_of, AddsLate, tmp_path
    )


def test_an_adapter_without_values_is_refused_by_name(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    expect_refusal(r"lora_A.default.weight lies on the meta device", step_of, AddsByPeft, tmp_path)


class UsesWeights(LitHF):
    """Starts an adapter from the model's weights."""

    def configure_model(self) -> None:
        if self.model is None:
            model = hf.from_pretrained(self.folder, **self.load)
            self.model = hf.add_adapter(model, peft.LoraConfig(r=2, use_dora=True))


def test_an_adapter_made_of_weights_that_come_later_is_refused(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    expect_refusal(
        r"lora_magnitude.*is made of the model's weights", step_of, UsesWeights, tmp_path
    )


def test_a_model_with_an_adapter_is_not_exported_as_a_whole(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    module = LitLora(tmp_path)
    run = lit.trainer("auto", max_steps=1)
    run.fit(module, loader())
    with pytest.raises(ValueError, match="must be without adapters to be exported"):
        hf.export(run, tmp_path / "out")
    assert isinstance(module.model, nn.Module)
    assert AutoModelForCausalLM.from_pretrained(tmp_path) is not None
