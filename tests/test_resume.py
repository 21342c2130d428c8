"""Resuming: what was saved goes on as it would have gone on, or says why it cannot."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_strategy
from tests import lit
from tests.ranks import ranks
from tests.runs import (
    FP32_TOLERANCE,
    HeadFirst,
    Run,
    SaveAfter,
    Unfreezing,
    assert_same,
    fit,
    refusal,
)
from zero_strategy.checkpoint.export import export

NAMES = ("zero1", "zero2", "zero3")
WORLD_SIZES = (1, 2, 4)

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing.
    "ignore:Be aware that when using"
)


# Other ranks, other programs.


@cache
def uninterrupted() -> Run:
    """One plain process over two epochs."""
    return fit("auto")


def fit_each(strategies: list[str], paths: list[str]) -> list[Run]:
    return [fit(strategy, resume=path) for strategy, path in zip(strategies, paths, strict=True)]


def test_a_run_resumed_at_any_stage_on_any_number_of_ranks_repeats_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / f"{name}.ckpt") for name in NAMES]
    saving = []
    for world_size, name, path in zip(WORLD_SIZES, NAMES, paths, strict=True):
        saving.append(ranks(world_size).run(fit, name, save=path)[0])
        assert_same(saving[-1], uninterrupted())
    for index, world_size in enumerate(WORLD_SIZES):
        # A Latin square: every two numbers of ranks meet, and so do every two stages.
        strategies = [NAMES[(index + other) % 3] for other in range(3)]
        resumed = ranks(world_size).run(fit_each, strategies, paths)[0]
        for run in resumed:
            assert_same(run, uninterrupted(), first=3)
        # On as many ranks as before, sums are taken in the same order.
        assert resumed[index].losses == saving[index].losses[3:]


def test_a_plain_file_resumes_sharded_and_an_exported_directory_resumes_plain(
    tmp_path: Path,
) -> None:
    file, folder, out = (str(tmp_path / n) for n in ("plain.ckpt", "sharded.ckpt", "out.ckpt"))
    fit("auto", epochs=1, save=file)
    assert_same(ranks(2).run(fit, "zero3", resume=file)[0], uninterrupted(), first=3)
    ranks(2).run(fit, "zero3", epochs=1, save=folder)
    export(folder, out)
    assert_same(fit("auto", resume=out), uninterrupted(), first=3)
    # A file that came from a directory is a plain one in every respect.
    assert_same(ranks(2).run(fit, "zero3", resume=out)[0], uninterrupted(), first=3)


def evaluate(strategy: str, path: str | None, module: pl.LightningModule) -> list[Any]:
    """Validation loss, test loss and predictions of the weights in a checkpoint."""
    data = lit.loader(24)
    run = lit.trainer(strategy)
    val = run.validate(module, data, ckpt_path=path, verbose=False)
    test = run.test(module, data, ckpt_path=path, verbose=False)
    rows = torch.cat(run.predict(module, data, ckpt_path=path))
    return [val[0]["val_loss"], test[0]["test_loss"], rows]


def evaluate_fresh(strategy: str, path: str) -> list[Any]:
    return evaluate(strategy, path, lit.Lit(seed=99))


def test_a_directory_loads_in_every_run_of_a_trainer_and_into_a_plain_module(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.ckpt"
    weights = ranks(2).run(fit, "zero3", epochs=1, save=str(path))[0].weights
    module = lit.Lit(seed=99)
    module.load_state_dict(zero_strategy.load_state_dict(path))
    for name, value in weights.items():
        assert torch.equal(module.get_parameter(name), value)
    expected = evaluate("auto", None, module)
    for world_size, name in [(2, "zero1"), (2, "zero3"), (4, "zero2")]:
        results = ranks(world_size).run(evaluate_fresh, name, str(path))
        for val, test, _ in results:
            assert [val, test] == pytest.approx(expected[:2], rel=FP32_TOLERANCE)
        rows = torch.stack([rows for *_, rows in results], dim=1).flatten(0, 1)
        assert torch.equal(rows, expected[2])
    export(path, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors").keys() == module.state_dict().keys()
    for name, value in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(module.state_dict()[name], value)


# Refusals.


class Wider(lit.Lit):
    def __init__(self) -> None:
        super().__init__(replace(lit.TINY, intermediate_size=41))


class Deeper(lit.Lit):
    """One layer more, and one module renamed."""

    def __init__(self) -> None:
        super().__init__(replace(lit.TINY, num_layers=4))
        self.gpt.normed = self.gpt.norm
        del self.gpt.norm

    def forward(self, token_BT: Tensor) -> Tensor:
        self.gpt.__dict__["norm"] = self.gpt.normed
        return super().forward(token_BT)


def validate(
    path: str, kind: type[lit.Lit], strict: bool = True, precision: str = "32-true"
) -> tuple[str, dict[str, Tensor]]:
    """The message of a refusal, and the weights after."""
    module = kind()
    module.strict_loading = strict
    run = lit.trainer("zero3", precision=precision)
    message = refusal(run.validate, module, lit.loader(24), ckpt_path=path, verbose=False)
    return message, lit.whole(module)


@pytest.mark.parametrize("source", ["directory", "file"])
def test_weights_of_another_model_are_refused_by_name_and_loose_names_only_when_asked(
    source: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    if source == "directory":
        stored = ranks(2).run(fit, "zero3", epochs=1, save=path)[0].weights
    else:
        stored = fit("auto", epochs=1, save=path).weights
    for strict in (True, False):
        for message, _ in ranks(2).run(validate, path, Wider, strict):
            assert re.search(
                r"model\.gpt\.layers\.0\.feed_forward\.down\.weight: stored as \(24, 37\).*"
                r"must be \(24, 41\)",
                message,
            )
    for message, _ in ranks(2).run(validate, path, Deeper):
        assert "model.gpt.layers.3.attention.qkv.weight: missing in the checkpoint" in message
        assert "(nearest there: gpt.norm.weight)" in message
        assert "model.gpt.norm.weight: in the checkpoint, not in the module" in message
        assert "strict_loading = False" in message
    for message, weights in ranks(2).run(validate, path, Deeper, strict=False):
        assert message == ""
        common = weights.keys() & stored.keys()
        assert len(common) == len(stored) - 1
        assert all(torch.equal(weights[n], stored[n]) for n in common)
    if source == "directory":
        for message, _ in ranks(2).run(validate, path, lit.Lit, precision="bf16-true"):
            assert "stored as (61, 24) torch.float32, must be (61, 24) torch.bfloat16" in message


def resume_weights_only(path: str) -> tuple[list[Any], str]:
    return evaluate_fresh("zero3", path), refusal(fit, "zero3", resume=path)


def save_weights_only(path: str) -> dict[str, Tensor]:
    return fit("zero3", epochs=1, callbacks=[SaveAfter(0, path, weights_only=True)]).weights


def test_weights_alone_load_for_evaluation_and_say_what_they_lack_for_training(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(2).run(save_weights_only, path)
    module = lit.Lit(seed=99)
    module.load_state_dict(zero_strategy.load_state_dict(path))
    expected = evaluate("auto", None, module)
    for found, message in ranks(2).run(resume_weights_only, path):
        assert found[:2] == pytest.approx(expected[:2], rel=FP32_TOLERANCE)
        assert "optimizer" in message
        assert "weights_only" in message or "weights only" in message
    export(path, tmp_path / "out.ckpt")
    out = str(tmp_path / "out.ckpt")
    assert evaluate("auto", out, lit.Lit(seed=99))[:2] == pytest.approx(expected[:2])


# Optimizers that differ from one run to the next.


class Grown(lit.Lit):
    """A rate that falls tenfold an epoch, over parameters of which some may be new."""

    def __init__(self, *, grown: bool = True) -> None:
        super().__init__(lr=1e-2)
        if grown:
            self.adapter = nn.Linear(3, 3)
            self.strict_loading = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]


def fit_grown(strategy: str, *, grown: bool, **options: Any) -> Run:
    return fit(strategy, module=Grown(grown=grown), **options)


def test_a_group_that_gained_a_parameter_keeps_its_learning_rate(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = ranks(2).run(fit_grown, "zero3", grown=False, save=path)[0]
    assert expected.lrs == pytest.approx([1e-2 * 0.1**2])
    for run in ranks(2).run(fit_grown, "zero3", grown=True, resume=path):
        assert run.lrs == pytest.approx(expected.lrs)
        assert run.losses == pytest.approx(expected.losses[3:], rel=FP32_TOLERANCE)


class TwoPlayers(pl.LightningModule):
    """Two optimizers with schedulers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.maker = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9))
        self.judge = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> None:
        rows = batch.float() / lit.TINY.vocab_size
        made = self.maker(rows[:, :5])
        self._step(1, self.judge(made.detach()).mean() - self.judge(rows[:, 5:]).mean())
        self._step(0, -self.judge(self.maker(rows[:, :5])).mean())

    def _step(self, which: int, loss: Tensor) -> None:
        optimizer, scheduler = self.optimizers()[which], self.lr_schedulers()[which]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()
        self.untoggle_optimizer(optimizer)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.maker.parameters(), lr=2e-3),
            torch.optim.SGD(self.judge.parameters(), lr=3e-2, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


def fit_players(strategy: str, **options: Any) -> Run:
    return fit(strategy, module=TwoPlayers(), **options)


def fit_one_player(resume: str) -> str:
    module = TwoPlayers()
    module.configure_optimizers = lambda: torch.optim.Adam(module.maker.parameters())
    return refusal(fit, "zero3", module=module, resume=resume)


def test_several_optimizers_resume(tmp_path: Path) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    expected = fit_players("auto")
    ranks(2).run(fit_players, "zero3", epochs=1, save=path)
    assert_same(ranks(4).run(fit_players, "zero2", resume=path)[0], expected, first=6)
    export(path, out)
    assert_same(fit_players("auto", resume=out), expected, first=6)
    for message in ranks(2).run(fit_one_player, path):
        assert "the checkpoint holds 2 optimizers, must be 1" in message


def fit_unfreezing(strategy: str, **options: Any) -> Run:
    return fit(strategy, module=HeadFirst(), epochs=3, callbacks=[Unfreezing()], **options)


def test_a_parameter_group_that_joined_late_resumes(tmp_path: Path) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    expected = fit_unfreezing("auto")
    for run in ranks(2).run(fit_unfreezing, "zero3", save=path, save_after=1):
        assert_same(run, expected)
    export(path, out)
    assert_same(fit_unfreezing("auto", resume=out), expected, first=6)
    for run in ranks(2).run(fit_unfreezing, "zero3", resume=path):
        assert_same(run, expected, first=6)
