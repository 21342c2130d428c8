"""The module's own `load_state_dict` and `state_dict` after sharding; building on meta."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import lit
from tests.ranks import ranks
from tests.runs import refusal
from tests.test_training import NAMES
from zero_strategy import ZeroStrategy


class LoadsWeights(lit.Lit):
    """Loads whole weights once it is sharded, all at once or a part."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def on_fit_start(self) -> None:
        weights = lit.Lit(seed=3).get_submodule(self.part).state_dict()
        if self.trainer.global_rank > 0:
            # Every rank takes the values of rank 0, as when training starts.
            weights = {name: torch.zeros_like(value) for name, value in weights.items()}
        keys = self.get_submodule(self.part).load_state_dict(weights)
        assert not keys.missing_keys
        assert not keys.unexpected_keys


def fit_loaded(strategy: str, part: str) -> tuple[dict[str, Tensor], list[float]]:
    module = LoadsWeights(part)
    run = lit.trainer(strategy, max_steps=2)
    run.fit(module, lit.loader())
    return lit.whole(module), module.losses


@pytest.mark.parametrize("part", ["", "gpt.layers.1"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_weights_load_into_a_sharded_module(name: str, part: str) -> None:
    expected, losses = fit_loaded("auto", part)
    for world_size in (1, 2):
        for found, found_losses in ranks(world_size).run(fit_loaded, name, part):
            assert found_losses == pytest.approx(losses, rel=2e-6)
            for parameter, value in expected.items():
                torch.testing.assert_close(found[parameter], value, rtol=0, atol=2e-6)


def load_wrong_shapes() -> str:
    module = lit.Lit()
    lit.trainer("zero3", max_steps=1).fit(module, lit.loader())
    weights = {n: v[:1] for n, v in lit.Lit().state_dict().items()}
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        return str(error)
    return ""


def test_whole_weights_of_other_shapes_are_listed_by_torch() -> None:
    for message in ranks(2).run(load_wrong_shapes):
        assert "size mismatch for gpt.embed.weight" in message


def warned(strategy: str, path: str) -> tuple[int, list[str]]:
    """Warnings of a run that saves, and then of a call by the user."""
    module = lit.Lit()
    run = lit.trainer(strategy, max_steps=1)
    with warnings.catch_warnings(record=True) as during:
        warnings.simplefilter("always")
        run.fit(module, lit.loader())
        run.save_checkpoint(path)
    ours = [w for w in during if "this rank's shards" in str(w.message)]
    with warnings.catch_warnings(record=True) as after:
        warnings.simplefilter("default")
        module.state_dict()
    return len(ours), [str(w.message) for w in after]


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_of_shards_says_so_once_and_names_the_whole_ones(
    name: str, tmp_path: Any
) -> None:
    for before, messages in ranks(2).run(warned, name, str(tmp_path / "a.ckpt")):
        assert before == 0
        assert len(messages) == 1
        assert "zero_strategy.load_state_dict(path)" in messages[0]
        assert "zs checkpoint export" in messages[0]


class Scaled(nn.Linear):
    """Keeps a table: as a plain tensor, in a container, as a buffer, or filled anew."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__(24, 24)
        table = torch.ones(24)
        kept = {"list": [table], "nested": {"a": (table,)}}
        if kind == "buffer":
            self.register_buffer("table", table, persistent=False)
        else:
            self.table: Any = kept.get(kind, table)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.kind == "filled":
            self.table = torch.ones(24)


class BuiltOnMeta(lit.Lit):
    def __init__(self, kind: str) -> None:
        super(lit.Lit, self).__init__()
        self.kind, self.lr, self.losses = kind, 1e-3, []
        self.gpt = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = lit.GPT(lit.TINY)
            self.gpt.scaled = Scaled(self.kind)


def fit_on_meta(kind: str) -> str:
    run = lit.trainer(ZeroStrategy(init="meta"), max_steps=1)
    return refusal(run.fit, BuiltOnMeta(kind), lit.loader())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["alone", "list", "nested"])
def test_a_plain_tensor_left_on_meta_is_refused_by_name(kind: str, world_size: int) -> None:
    for message in ranks(world_size).run(fit_on_meta, kind):
        assert message.startswith("gpt.scaled.table is a tensor on the meta device")
        assert "self.register_buffer('table', ..., persistent=False)" in message


@pytest.mark.parametrize("kind", ["buffer", "filled"])
def test_a_tensor_that_reset_parameters_fills_is_built_on_meta(kind: str) -> None:
    assert ranks(2).run(fit_on_meta, kind) == ["", ""]
