"""A checkpoint that the disk does not hold is refused before it is written, or before step 0."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import zero_strategy
from tests import lit
from tests.ranks import ranks
from tests.runs import refusal
from zero_strategy.checkpoint import room, storage
from zero_strategy.checkpoint.room import CheckpointSize, NoRoomError, check_run, check_save

GIB = 1 << 30
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZE = CheckpointSize(weights_bytes=4 * GIB, moments_bytes=8 * GIB)


def disk(free_bytes: int) -> Any:
    """A `statvfs` of a disk with so much left for this user, and more for root."""
    return lambda _: SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_bfree=1 << 40)


def test_a_run_whose_next_checkpoint_does_not_fit_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(NoRoomError) as error:
        check_run(tmp_path / "a/b", SIZE, another_is_there=False, statvfs=disk(10 * GIB))
    text = str(error.value)
    assert "needs 12.0 GiB (weights 4.0 GiB + moments 8.0 GiB)" in text
    assert "the 10.0 GiB that are free on its disk, 2.0 GiB are missing" in text


def test_a_run_with_room_for_one_checkpoint_but_none_beside_it_is_warned(tmp_path: Path) -> None:
    told = check_run(tmp_path, SIZE, another_is_there=False, statvfs=disk(20 * GIB))
    assert "room for one checkpoint of 12.0 GiB" in told
    assert "The second save is written while the first one is still there" in told
    assert check_run(tmp_path, SIZE, another_is_there=False, statvfs=disk(24 * GIB)) == ""
    # What is there already takes part of what is not free.
    assert check_run(tmp_path, SIZE, another_is_there=True, statvfs=disk(12 * GIB)) == ""
    with pytest.raises(NoRoomError, match=r"needs 12.0 GiB beside the one that is there"):
        check_run(tmp_path, SIZE, another_is_there=True, statvfs=disk(11 * GIB))


def test_a_save_that_does_not_fit_writes_nothing_and_leaves_what_was_there(tmp_path: Path) -> None:
    check_save(tmp_path, 10 * GIB, statvfs=disk(10 * GIB))
    path = tmp_path / "last.ckpt"
    storage.save(path, {"model.w": torch.ones(5)}, {"step": 1})
    before = sorted(tmp_path.rglob("*"))
    with (
        mock.patch.object(room, "free_bytes", return_value=0),
        pytest.raises(NoRoomError, match=r"last.ckpt: needs 20 B, must fit into the 0 B"),
    ):
        storage.save(path, {"model.w": torch.zeros(5)}, {"step": 2})
    assert sorted(tmp_path.rglob("*")) == before
    assert storage.load_meta(path)["step"] == 1


def measure(strategy: str, precision: str) -> tuple[int, int]:
    """What is planned before the first step, and what a save of the run asks for."""
    asked: list[int] = []
    module = lit.Lit()
    run = lit.trainer(strategy, max_steps=1, precision=precision)
    planned: list[CheckpointSize] = []

    def remember(path: Path, size: CheckpointSize, **_: Any) -> str:
        planned.append(size)
        return ""

    with mock.patch.object(room, "check_run", remember):
        callback = ModelCheckpoint("unused", every_n_train_steps=100)
        run = lit.trainer(
            strategy,
            max_steps=1,
            precision=precision,
            callbacks=[callback],
            enable_checkpointing=True,
        )
        run.fit(module, lit.loader())
    with (
        mock.patch.object(room, "check_save", lambda path, n: asked.append(n)),
        mock.patch.object(storage.dcp, "save"),
        warnings.catch_warnings(),
    ):
        run.save_checkpoint("unused.ckpt")
    return (planned[0].num_bytes if planned else 0), (asked[0] if asked else 0)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("zero3", "32-true"), ("zero1", "bf16-mixed"), ("zero3_offload", "bf16-mixed")],
)
def test_what_is_planned_is_what_a_checkpoint_takes(strategy: str, precision: str) -> None:
    (planned, asked), *_ = ranks(2).run(measure, strategy, precision)
    # AdamW's step counts and such are not planned.
    assert planned <= asked <= planned + 4096


def fit_on_full_disk(folder: str) -> tuple[str, int]:
    module = lit.Lit()
    strategy = zero_strategy.ZeroStrategy(stage=3)
    keeping = ModelCheckpoint(folder)
    run = lit.trainer(strategy, max_steps=2, callbacks=[keeping], enable_checkpointing=True)
    with mock.patch.object(room, "free_bytes", return_value=1000):
        said = refusal(run.fit, module, lit.loader())
    return said, len(module.losses)


def test_a_model_checkpoint_on_a_full_disk_is_refused_on_all_ranks_before_step_0(
    tmp_path: Path,
) -> None:
    (first, steps), (second, _) = ranks(2).run(fit_on_full_disk, str(tmp_path / "ckpt"))
    assert first == second
    assert "the next checkpoint needs" in first
    assert steps == 0
