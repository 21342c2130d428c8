"""Under offload: what the module's owner does to its weights and optimizer."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_strategy.offloading
from tests import lit
from tests.ranks import ranks
from tests.test_offload import Lit, _options, on_device
from zero_strategy import OffloadConfig, ZeroStrategy
from zero_strategy.checkpoint.state import copy_whole
from zero_strategy.gradient import local


class Tied(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.gpt.embed.weight = self.gpt.head.weight


class Decoupled(Lit):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, lr=3e-3, weight_decay=0.5, decoupled_weight_decay=True)


class AdamW(Lit):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.5)


def _masters_of(module: Lit, name: str = "zero3_offload", **options: Any) -> dict[str, Tensor]:
    run = lit.trainer(name, **_options(3, 1, 0.5) | options)
    run.fit(module, lit.loader())
    return {n: local(t) for n, t in run.strategy.masters().items()}


def _decouple() -> bool:
    adam, adamw = _masters_of(Decoupled()), _masters_of(AdamW())
    return all(torch.equal(adam[n], adamw[n]) for n in adamw)


def test_adam_with_decoupled_decay_is_adamw() -> None:
    assert ranks(1).run(_decouple)[0]


def _tie(path: str) -> tuple[set[str], bool, bool]:
    module = Tied()
    run = lit.trainer("zero3_offload", **_options(3, 1, 0.5))
    run.fit(module, lit.loader())
    run.save_checkpoint(path)
    weights = run.strategy.lightning_module_state_dict()
    kinds = {str(weights[f"gpt.{n}.weight"].dtype) for n in ("embed", "head")}
    same = torch.equal(local(weights["gpt.embed.weight"]), local(weights["gpt.head.weight"]))
    plain = Tied()
    lit.trainer("zero3", precision="bf16-mixed").validate(
        plain, lit.loader(24), ckpt_path=path, verbose=False
    )
    kept = torch.equal(local(plain.gpt.head.weight.detach()), local(weights["gpt.head.weight"]))
    return kinds, same, kept


def test_a_tied_weight_is_saved_exactly_under_each_of_its_names(tmp_path: Any) -> None:
    for kinds, same, kept in ranks(2).run(_tie, str(tmp_path / "a.ckpt")):
        assert kinds == {"torch.float32"}
        assert same
        assert kept


class Writes(lit.pl.Callback):
    """Writes to weights at a hook of its choice."""

    def __init__(self, hook: str, write: str) -> None:
        setattr(self, hook, lambda trainer, module, *_: self.write(module, write))
        self.done = False

    @torch.no_grad()
    def write(self, module: Any, how: str) -> None:
        if self.done:
            return
        self.done = True
        torch.manual_seed(11)
        whole = {n: torch.randn(p.shape) for n, p in module.named_parameters()}
        if how == "load":
            module.load_state_dict(whole, strict=False)
        else:
            module.gpt.head.weight.mul_(0.5)


def _write(hook: str, how: str, when: str) -> tuple[float, int]:
    """lr is 0, so that what was written stays: its distance from what the masters hold."""
    module = Lit()
    module.lr = 0.0
    callbacks = [Writes(hook, how)] if when == "during" else []
    run = lit.trainer("zero3_offload", **_options(3, 1, 0.5) | {"callbacks": callbacks})
    before = Lit().gpt.head.weight.detach()
    run.fit(module, lit.loader())
    if when == "after":
        Writes(hook, how).write(module, how)
    masters = run.strategy.masters()
    got = masters["gpt.head.weight"].full_tensor()
    torch.manual_seed(11)
    whole = {n: torch.randn(p.shape) for n, p in module.named_parameters()}
    want = whole["gpt.head.weight"] if how == "load" else before * 0.5
    return float((got - want).abs().max() / want.abs().max()), len(masters)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["load", "in place"])
@pytest.mark.parametrize(
    ("hook", "when"),
    [
        ("on_fit_start", "during"),
        ("on_train_start", "during"),
        ("on_train_batch_end", "during"),
        ("on_train_end", "after"),
    ],
)
def test_weights_written_to_the_module_are_taken_over_as_bf16_holds_them(
    hook: str, how: str, when: str, world_size: int
) -> None:
    for distance, _ in ranks(world_size).run(_write, hook, how, when):
        assert distance <= 2**-8


def _write_placed(placement: Any, hook: str, when: str) -> tuple[str, float, float]:
    """What an optimizer on the device is told, and where its state ends up."""
    module = Lit()
    module.lr = 0.0
    write = Writes(hook, "in place")
    before = Lit().gpt.head.weight.detach()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(zero_strategy.offloading, "device_room", lambda device: 10**9)
        strategy = ZeroStrategy(stage=3, offload=OffloadConfig(placement=placement))
        callbacks = [write] if when == "during" else []
        run = lit.trainer(strategy, **_options(3, 1, 0.5) | {"callbacks": callbacks})
        try:
            run.fit(module, lit.loader())
        except RuntimeError as error:
            return str(error), 0.0, strategy.sharded.offloading.share
        if when == "after":
            write.write(module, "in place")
        got = strategy.masters()["gpt.head.weight"].full_tensor()
        said = [str(w.message) for w in caught if "written to between" in str(w.message)]
    distance = float((got - before * 0.5).abs().max() / before.abs().max())
    return " ".join(said), distance, strategy.sharded.offloading.share


@pytest.mark.parametrize(
    ("placement", "hook", "when", "said", "share"),
    [
        # Moved to the device only where nothing was written by then.
        ("auto", "on_train_batch_end", "during", "", 1.0),
        ("auto", "on_train_end", "after", "gpt.head.weight was written to between two runs", 0.0),
        (0.0, "on_fit_start", "during", "gpt.head.weight was written to between two runs", 0.0),
        (0.0, "on_train_batch_end", "during", "placement='host'", 0.0),
    ],
)
def test_a_write_that_cannot_be_taken_apart_is_said(
    placement: Any, hook: str, when: str, said: str, share: float
) -> None:
    told, distance, got_share = ranks(1).run(_write_placed, placement, hook, when)[0]
    assert said in told
    assert bool(told) == bool(said)
    assert distance <= 2**-8
    assert got_share == share


# Loads.


class Loads(lit.pl.Callback):
    """Loads weights at a hook of its choice, once."""

    def __init__(self, hook: str, what: str) -> None:
        setattr(self, hook, lambda trainer, module, *_: self.load(module, what))
        self.done = False

    def load(self, module: Any, what: str) -> None:
        if self.done:
            return
        self.done = True
        if what == "shards":
            module.load_state_dict(_drawn_shards(module), strict=False)
        elif what == "a layer":
            module.gpt.head.load_state_dict({"weight": _drawn()["gpt.head.weight"]})
        else:
            module.load_state_dict(_drawn(), strict=False)


def _drawn() -> dict[str, Tensor]:
    torch.manual_seed(11)
    return {n: torch.randn(p.shape) for n, p in Lit().named_parameters()}


def _drawn_shards(module: Any) -> dict[str, Tensor]:
    """As `strategy.masters()` gives them."""
    drawn, masters = _drawn(), module.trainer.strategy.masters()
    for name, master in masters.items():
        copy_whole(master, drawn[name], name)
    return masters


def _load(placement: Any, hook: str, what: str, when: str) -> tuple[float, list[str], float]:
    """lr is 0: the largest distance from what was loaded, what was said, where state lies."""
    module = Lit()
    module.lr = 0.0
    load = Loads(hook, what)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(zero_strategy.offloading, "device_room", lambda device: 10**9)
        strategy = ZeroStrategy(offload=OffloadConfig(placement=placement, threads=1))
        callbacks = [load] if when == "during" else []
        run = lit.trainer(strategy, **_options(3, 1, 0.5) | {"callbacks": callbacks})
        run.fit(module, lit.loader())
        if when == "after":
            load.load(module, what)
        masters = strategy.masters()
        said = [str(w.message) for w in caught if "written to" in str(w.message)]
    drawn = _drawn()
    names = ["gpt.head.weight"] if what == "a layer" else list(masters)
    distance = max(float((masters[n].full_tensor() - drawn[n]).abs().max()) for n in names)
    return distance, said, strategy.sharded.offloading.share


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", ["whole tensors", "shards", "a layer"])
@pytest.mark.parametrize(
    ("hook", "when"),
    [("on_fit_start", "during"), ("on_train_batch_end", "during"), ("on_train_end", "after")],
)
@pytest.mark.parametrize("placement", ["host", 0.5, "auto"])
def test_weights_loaded_into_the_module_reach_the_masters_exactly_and_without_a_word(
    placement: Any, hook: str, when: str, what: str, world_size: int
) -> None:
    for distance, said, share in ranks(world_size).run(_load, placement, hook, what, when):
        assert distance == 0.0
        assert said == []
        # Loading keeps no state on the host.
        assert placement != "auto" or share == 0.0


def _load_rounded(placement: Any) -> tuple[bool, bool]:
    """The module's own state dict, with one element changed."""
    module = Lit()
    strategy = ZeroStrategy(offload=OffloadConfig(placement=placement, threads=1))
    lit.trainer(strategy, **_options(3, 1, 0.5)).fit(module, lit.loader())
    before = strategy.masters()
    weights = {n: v.detach().clone() for n, v in module.state_dict().items()}
    head = local(weights["gpt.head.weight"]).view(-1)
    head[3] = 5.0
    module.load_state_dict(weights)
    after = strategy.masters()
    changed = local(before["gpt.head.weight"]).view(-1) != local(after["gpt.head.weight"]).view(-1)
    rest = [n for n in before if n != "gpt.head.weight"]
    return (
        all(torch.equal(local(before[n]), local(after[n])) for n in rest),
        changed.nonzero().flatten().tolist() == [3]
        and float(local(after["gpt.head.weight"]).view(-1)[3]) == 5.0,
    )


@pytest.mark.parametrize("placement", ["host", 0.0])
def test_loading_the_modules_own_rounded_weights_keeps_what_is_known_beyond_them(
    placement: Any,
) -> None:
    assert ranks(2).run(_load_rounded, placement) == [(True, True)] * 2


def _write_after_load() -> list[str]:
    module = Lit()
    strategy = ZeroStrategy(offload=OffloadConfig(placement=0.0, threads=1))
    lit.trainer(strategy, **_options(3, 1, 0.5)).fit(module, lit.loader())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.load_state_dict(_drawn(), strict=False)
        with torch.no_grad():
            module.gpt.head.weight.mul_(0.5)
        strategy.masters()
    return [str(w.message) for w in caught if "written to" in str(w.message)]


def test_a_change_in_place_after_a_load_is_still_said() -> None:
    said = ranks(1).run(_write_after_load)[0]
    assert len(said) == 1
    assert said[0].startswith("gpt.head.weight was written to between two runs")


def _find_lr() -> list[float]:
    module = Lit()
    options = _options(3, 1, 0.5)
    run = lit.trainer("zero3_offload", **options)
    tuner = lit.pl.tuner.Tuner(run)
    tuner.lr_find(module, lit.loader(), num_training=5, update_attr=False)
    module.losses.clear()
    module.calls = 0
    run.fit(module, lit.loader())
    return module.losses


def test_a_search_for_the_learning_rate_leaves_no_moments(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    losses = ranks(1).run(_find_lr, timeout_s=120)[0]
    assert losses == on_device(3, 1, 0.5, 1)[0][0]
