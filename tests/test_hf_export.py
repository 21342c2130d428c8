"""A trained model leaves as a directory that transformers opens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import lit
from tests.hf_models import FAMILIES, LitHF, expect_refusal, loader, options, rows, save_random
from tests.ranks import ranks
from zero_strategy import hf


def train_and_export(
    strategy: str, folder: Path, out: Path, load: dict[str, Any], **export: Any
) -> dict[str, torch.Tensor]:
    """Train a step, export, and return every weight as the run holds it."""
    module = LitHF(folder, **load)
    precision: Any = "bf16-mixed" if "offload" in strategy else "32-true"
    run = lit.trainer(strategy, max_steps=1, precision=precision)
    run.fit(module, loader())
    hf.export(run, out, **export)
    weights = lit.whole(module.model)
    masters = run.strategy.masters()
    prefix = "model."
    return weights | {
        n.removeprefix(prefix): t.full_tensor() for n, t in masters.items() if n.startswith(prefix)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_opens_with_the_weights_of_the_run(family: str, tmp_path: Path) -> None:
    before = save_random(family, tmp_path / "base")
    load = {"dtype": torch.float32, **options(family)}
    args = ("zero3", tmp_path / "base", tmp_path / "out", load)
    weights = ranks(2).run(train_and_export, *args)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options(family))
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert type(model) is type(before)
    with torch.no_grad():
        before.load_state_dict(weights, strict=False)
        expected = before(input_ids=rows(), use_cache=False).logits
        assert torch.equal(model(input_ids=rows(), use_cache=False).logits, expected)
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "base")


def stored_names(folder: Path) -> set[str]:
    """Return the names of all tensors in a model's files."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        names |= header.keys() - {"__metadata__"}
    return names


def test_masters_in_host_memory_are_exported_in_full(tmp_path: Path) -> None:
    save_random("qwen3-moe", tmp_path / "base")
    args = ("zero3_offload", tmp_path / "base", tmp_path / "out", {"dtype": torch.float32})
    weights = ranks(2).run(train_and_export, *args)[0]
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_large_models_are_split_into_files_of_a_dtype(tmp_path: Path) -> None:
    save_random("mixtral", tmp_path / "base")
    out = tmp_path / "out"
    args = ("zero3", tmp_path / "base", out, {"dtype": torch.float32})
    split = {"dtype": torch.bfloat16, "max_file_bytes": 20_000}
    weights = ranks(2).run(train_and_export, *args, **split)[0]
    assert len(list(out.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name].bfloat16()), name


def test_an_export_over_something_else_is_refused_on_every_rank(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    expect_refusal("must not exist, or be empty", train_and_export, "zero3", tmp_path, tmp_path, {})


def test_a_plain_trainer_exports_too(tmp_path: Path) -> None:
    save_random("qwen3-moe", tmp_path / "base")
    module = LitHF(tmp_path / "base", dtype=torch.float32)
    run = lit.trainer("auto", max_steps=1)
    run.fit(module, loader())
    hf.export(run, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = model.state_dict()
    assert all(torch.equal(found[n], v) for n, v in module.model.state_dict().items())
