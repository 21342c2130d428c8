"""Files go straight into shards: exactly, in part, and not at all if they do not fit the model."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import hf_models, lit
from tests.hf_models import (
    FAMILIES,
    LitHF,
    expect_refusal,
    loader,
    one_step,
    options,
    refusal,
    save_random,
)
from tests.ranks import ranks
from zero_strategy import ZeroStrategy, hf
from zero_strategy.hf import loading

FP32 = {"dtype": torch.float32}


def test_outside_of_the_strategy_a_model_loads_as_transformers_does(tmp_path: Path) -> None:
    expected = save_random("qwen3", tmp_path)
    model = hf.from_pretrained(tmp_path, **FP32)
    assert not any(p.is_meta for p in model.parameters())
    plain = lit.trainer("auto", max_steps=1)
    plain.fit(LitHF(tmp_path, **FP32), loader())
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def masters_of_a_run(folder: Path, load: dict[str, Any]) -> dict[str, Tensor]:
    """Set an offloaded run up and return its masters before the first step."""
    module = LitHF(folder, **load)
    module.found = {}  # pyright: ignore[reportAttributeAccessIssue]

    def look() -> None:
        masters: Any = module.trainer.strategy
        module.found = {n: t.full_tensor() for n, t in masters.masters().items()}

    module.on_train_start = look
    lit.trainer("zero3_offload", max_steps=1, precision="bf16-mixed").fit(module, loader())
    return {name.removeprefix("model."): value for name, value in module.found.items()}


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "deepseek-v3"])
def test_masters_in_host_memory_come_from_the_files(family: str, tmp_path: Path) -> None:
    model = save_random(family, tmp_path)
    masters = ranks(2).run(masters_of_a_run, tmp_path, FP32)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[name], parameter), name


def test_files_of_16_bits_become_fp32_masters_of_the_same_values(tmp_path: Path) -> None:
    model = save_random("deepseek-v3", tmp_path, torch.bfloat16)
    load = {"dtype": torch.bfloat16}
    masters = ranks(2).run(masters_of_a_run, tmp_path, load)[0]
    for name, parameter in model.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(masters[name], parameter.float()), name


def read_by_this_rank(folder: Path) -> tuple[int, int]:
    """Load a model; elements read from its files, and those this rank holds."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    shard, num_read = DtensorShardOperation.shard_tensor, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_read
        tensor = shard(self, *args, **kwargs)
        num_read += 0 if tensor is None else tensor.numel()
        return tensor

    DtensorShardOperation.shard_tensor = counted
    try:
        module = LitHF(folder, **FP32)
        lit.trainer("zero3", max_steps=1).fit(module, loader())
    finally:
        DtensorShardOperation.shard_tensor = shard
    return num_read, sum(p.to_local().numel() for p in module.parameters())


def test_each_rank_reads_its_part_alone(tmp_path: Path) -> None:
    model = save_random("mixtral", tmp_path)
    counts = ranks(2).run(read_by_this_rank, tmp_path)
    assert all(num_read == num_held for num_read, num_held in counts)
    assert sum(held for _, held in counts) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_strategy_that_builds_on_meta_loads_too(family: str, tmp_path: Path) -> None:
    model = save_random(family, tmp_path)
    run = ranks(2).run(one_step_on_meta, tmp_path)[0]
    assert all(torch.equal(run.parameters[n], p) for n, p in model.named_parameters())
    assert all(torch.equal(run.buffers[n], b) for n, b in model.named_buffers())


def one_step_on_meta(folder: Path) -> hf_models.Run:
    return one_step(ZeroStrategy(stage=3, init="meta"), folder, **FP32)


def loaded_by_rank_zero(folder: Path, family: str, strategy: str) -> tuple[Any, list[str]]:
    """Run a step as if transformers' inside had changed; what it saw, and what was warned of."""
    expected = loading._EXPECTED
    loading._EXPECTED = {(PreTrainedModel, "_load_pretrained_model"): ["another"]}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = one_step(strategy, folder, **FP32, **options(family))
    finally:
        loading._EXPECTED = expected
    told = [str(w.message) for w in caught if "rank 0 loads" in str(w.message)]
    return run, told


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "deepseek-v3", "gpt-oss"])
def test_by_way_of_rank_0_the_same_arrives_with_a_warning(family: str, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    direct = ranks(2).run(one_step, "zero3", tmp_path, **FP32, **options(family))[0]
    (run, told), (_, others) = ranks(2).run(loaded_by_rank_zero, tmp_path, family, "zero3")
    assert len(told) == 1
    assert not others
    assert run.loss == direct.loss
    for found, expected in ((run.parameters, direct.parameters), (run.buffers, direct.buffers)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def change_file(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_missing_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    old, new = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.upp_proj.weight"
    change_file(tmp_path, lambda tensors: tensors.update({new: tensors.pop(old)}))
    for told in ranks(2).run(refusal, one_step, "zero3", tmp_path, **FP32):
        assert f"does not hold {old} (nearest: {new})" in told
        assert f"holds {new} (nearest: {old}), which the model has not" in told


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    name = "model.norm.weight"
    change_file(tmp_path, lambda tensors: tensors.update({name: torch.ones(31)}))
    pattern = r"holds model.norm.weight with a shard of shape \(15,\), the model has \(16,"
    expect_refusal(pattern, one_step, "zero3", tmp_path, **FP32)


def test_tied_weights_that_differ_in_the_files_are_refused(tmp_path: Path) -> None:
    save_random("llama-tied", tmp_path)
    embedding = "model.embed_tokens.weight"
    change_file(tmp_path, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    ranks(2).run(one_step, "zero3", tmp_path, **FP32)
    change_file(tmp_path, lambda t: t["lm_head.weight"].add_(1))
    pattern = "are one parameter of the model, but differ in the files"
    expect_refusal(pattern, one_step, "zero3", tmp_path, **FP32)


class WithHead(LitHF):
    """Adds a layer of its own inside the model, which no file holds."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.device(self.load_head_on):
            self.model.extra = nn.Linear(3, 5, bias=False)

    load_head_on = "cpu"


class WithHeadOnMeta(WithHead):
    load_head_on = "meta"


def with_head(folder: Path, kind: Any) -> Tensor:
    torch.manual_seed(4)
    module = kind(folder, **FP32)
    return one_step("zero3", folder, module=module).parameters["extra.weight"]


def test_a_layer_beside_the_files_keeps_its_values_or_is_refused(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    torch.manual_seed(4)
    bound = 1 / math.sqrt(3)
    found = ranks(2).run(with_head, tmp_path, WithHead)[0]
    assert float(found.abs().max()) <= bound
    assert float(found.abs().min()) > 0
    expect_refusal(
        r"extra.weight lies on the meta device and is not in the",
        with_head,
        tmp_path,
        WithHeadOnMeta,
    )


def test_an_option_that_places_the_model_is_refused(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    expect_refusal(
        r"from_pretrained\(device_map=...\): must be left out",
        one_step,
        "zero3",
        tmp_path,
        device_map="auto",
    )


def test_the_names_that_loading_relies_on_are_as_it_knows_them() -> None:
    assert loading.unexpected_entry() is None


def generated(folder: Path, load: dict[str, Any]) -> list[int]:
    """Greedy tokens of a sharded model."""
    module = LitHF(folder, **load)
    run = lit.trainer("zero3", max_steps=0)
    run.fit(module, loader())
    prompt = torch.tensor([[5, 9, 33, 7]])
    with run.strategy.inference():
        return module.model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe", "gpt2"])
def test_a_sharded_model_generates_what_the_whole_one_does(family: str, tmp_path: Path) -> None:
    model = save_random(family, tmp_path)
    prompt = torch.tensor([[5, 9, 33, 7]])
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    for found in ranks(2).run(generated, tmp_path, FP32):
        assert found == expected


def test_every_family_is_stored_a_tensor_at_a_time() -> None:
    from zero_strategy.hf.places import Places
    from zero_strategy.hf.stored import stored_parts

    for family, config in FAMILIES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options(family))
        held = {name: place.tensor for name, place in Places(model).by_name.items()}
        parts = stored_parts(held, lambda tensors, m=model: loading.as_stored(m, tensors))
        assert {len(p.sources) for p in parts} == {1}, family


class Drawn(LitHF):
    """Starts from random weights."""

    def configure_model(self) -> None:
        if self.model is None:
            family: Any = self.folder
            self.model = hf.from_config(FAMILIES[family], **options(family))


def drawn(family: Any) -> hf_models.Run:
    torch.manual_seed(5 + dist.get_rank())
    return one_step("zero3", family, module=Drawn(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_do_not_depend_on_the_number_of_ranks(family: str) -> None:
    one, two = ranks(1).run(drawn, family)[0], ranks(2).run(drawn, family)[0]
    assert all(torch.equal(two.parameters[n], v) for n, v in one.parameters.items())
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], **options(family))
    for name, buffer in model.named_buffers():
        assert torch.equal(two.buffers[name], buffer), name
    for name, parameter in model.named_parameters():
        found = two.parameters[name]
        assert found.shape == parameter.shape
        expected = float(parameter.detach().std())
        if parameter.numel() > 500:  # else its deviation says little
            assert float(found.std()) == pytest.approx(expected, rel=0.2), name
        elif expected == 0:
            assert torch.equal(found, parameter), name
