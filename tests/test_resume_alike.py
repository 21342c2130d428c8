"""Resuming with other optimizers, groups, slots, settings or schedulers than were saved."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests import lit
from tests.ranks import ranks
from tests.runs import fit, refusal
from zero_strategy.checkpoint import matching, trainer_state
from zero_strategy.checkpoint.export import export

pytestmark = pytest.mark.filterwarnings(
    # Lightning, in the plain process: a callback of the saved run is missing.
    "ignore:Be aware that when using"
)


class Stepped(lit.Lit):
    """Is stepped in one of several ways."""

    def __init__(self, way: str, seed: int = 7) -> None:
        super().__init__(seed=seed)
        self.way = way

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        every = list(self.parameters())
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optim, schedules = torch.optim, torch.optim.lr_scheduler
        match self.way:
            case "SGD":
                return optim.SGD(every, lr=0.1, momentum=0.9)
            case "Adam":
                return optim.Adam(every, lr=1e-3)
            case "RMSprop":
                return optim.RMSprop(every, lr=1e-3)
            case "amsgrad":
                return optim.AdamW(every, lr=1e-3, amsgrad=True)
            case "two groups":
                return optim.AdamW(groups, lr=1e-3)
            case "two groups, the other first":
                return optim.AdamW(groups[::-1], lr=1e-3)
            case "other settings":
                return optim.AdamW(every, lr=5e-3, weight_decay=0.2, betas=(0.8, 0.9))
            case _:
                pass
        optimizer = optim.AdamW(every, lr=1e-3)
        match self.way:
            case "OneCycleLR":
                schedule = schedules.OneCycleLR(optimizer, 1e-2, total_steps=20)
            case "OneCycleLR, other peak":
                schedule = schedules.OneCycleLR(optimizer, 2e-2, total_steps=20, max_momentum=0.9)
            case "CosineAnnealingLR":
                schedule = schedules.CosineAnnealingLR(optimizer, 20)
            case _:
                return optimizer
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Groups(Callback):
    """Keeps the settings with which training goes on."""

    seen: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        self.seen = [{k: v for k, v in g.items() if k != "params"} for g in groups]


def save(way: str, path: str) -> None:
    fit("zero3", module=Stepped(way), epochs=1, save=path)


def resume(way: str, path: str) -> tuple[str, list[str], list[dict[str, Any]], bool]:
    """The refusal, warnings about settings, what was resumed with, and whether nothing was."""
    module, groups = Stepped(way, seed=99), Groups()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = refusal(fit, "zero3", module=module, resume=path, callbacks=[groups])
    told = [str(w.message) for w in caught if "values count" in str(w.message)]
    fresh = dict(Stepped(way, seed=99).named_parameters())
    untouched = all(torch.equal(w, fresh[n]) for n, w in lit.whole(module).items())
    return said, told, groups.seen, untouched


OTHERS = [
    ("AdamW", "SGD", "optimizer 0 is SGD, was AdamW when it was saved"),
    ("AdamW", "Adam", "optimizer 0 is Adam, was AdamW when it was saved"),
    ("AdamW", "RMSprop", "optimizer 0 is RMSprop, was AdamW when it was saved"),
    ("SGD", "AdamW", "optimizer 0 is AdamW, was SGD when it was saved"),
    ("AdamW", "amsgrad", "optimizer 0 (AdamW), group 0, amsgrad = True here, False in the check"),
    ("AdamW", "two groups", "optimizer 0 (AdamW) has groups of 14, 7 parameters, had 21 when"),
    ("two groups", "AdamW", "optimizer 0 (AdamW) has groups of 21 parameters, had 14, 7 when"),
    ("AdamW", "OneCycleLR", "LR scheduler is OneCycleLR, was none when it was saved"),
    ("OneCycleLR", "AdamW", "LR scheduler is none, was OneCycleLR when it was saved"),
    ("OneCycleLR", "CosineAnnealingLR", "LR scheduler is CosineAnnealingLR, was OneCycleLR when"),
]


@pytest.mark.parametrize(("saved", "resumed", "expected"), OTHERS)
def test_a_run_that_steps_otherwise_is_refused_before_anything_is_loaded(
    saved: str, resumed: str, expected: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(1).run(save, saved, path)
    [(said, told, _, untouched)] = ranks(1).run(resume, resumed, path)
    assert expected in said
    assert f'module.load_state_dict(zero_strategy.load_state_dict("{path}")), then fit' in said
    assert untouched
    assert told == []


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("two groups", "two groups, the other first"),
        ("amsgrad", "amsgrad"),
        # What a scheduler sets is its own.
        ("OneCycleLR", "OneCycleLR, other peak"),
    ],
)
def test_the_same_groups_in_another_order_and_what_a_scheduler_sets_resume_without_a_word(
    saved: str, resumed: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(1).run(save, saved, path)
    [(said, told, groups, untouched)] = ranks(1).run(resume, resumed, path)
    assert (said, told, untouched) == ("", [], False)
    if saved == "two groups":
        assert [group["weight_decay"] for group in groups] == [0.01, 0.1]


def test_settings_that_differ_are_told_once_and_the_checkpoints_count(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(2).run(save, "AdamW", path)
    first, second = ranks(2).run(resume, "other settings", path)
    for said, _, groups, _ in (first, second):
        assert said == ""
        assert (groups[0]["weight_decay"], groups[0]["betas"]) == (0.01, (0.9, 0.999))
    [told] = first[1]
    assert "group 0, weight_decay = 0.2 here, 0.01 in the checkpoint" in told
    assert "group 0, betas = (0.8, 0.9) here, (0.9, 0.999) in the checkpoint" in told
    assert "lr" not in told
    assert second[1] == []


def save_as_before(way: str, path: str) -> None:
    """As a version did that did not say what steps."""
    to_save = trainer_state.to_save

    def without_classes(path: Path, checkpoint: Any) -> Any:
        return to_save(path, {k: v for k, v in checkpoint.items() if k != matching.KEY})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_state, "to_save", without_classes)
        save(way, path)


def test_a_checkpoint_that_does_not_say_what_steps_is_not_compared(tmp_path: Path) -> None:
    path, file = str(tmp_path / "a.ckpt"), str(tmp_path / "plain.ckpt")
    ranks(1).run(save_as_before, "AdamW", path)
    fit("auto", module=Stepped("AdamW"), epochs=1, save=file)
    for source in (path, file):
        for way in ("Adam", "other settings"):
            [(said, told, *_)] = ranks(1).run(resume, way, source)
            assert (said, told) == ("", [])


def test_an_exported_file_is_compared_as_its_directory_is(tmp_path: Path) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "out.ckpt")
    ranks(1).run(save, "two groups", path)
    export(path, out)
    for way, expected in (
        ("two groups", ""),
        ("SGD", "optimizer 0 is SGD, was AdamW"),
        ("AdamW", "groups of 21 parameters, had 14, 7"),
    ):
        [(said, *_)] = ranks(1).run(resume, way, out)
        assert expected in said if expected else said == ""
        assert not expected or f'torch.load("{out}", weights_only=True)["state_dict"]' in said
