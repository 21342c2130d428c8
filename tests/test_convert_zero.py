"""DeepSpeed's ZeRO directories become ours: every stage and layout, bit for bit.

The files are written by `tests/zero_files.py`, which knows their layout alone.
"""

from typing import Any

import pytest
import torch

from tests.conversions import assert_equal, assert_optimizer, expected, stored, trained
from tests.zero_files import write_zero_files
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.convert import convert
from zero_strategy.checkpoint.diff import diff


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_zero_files_become_the_fp32_weights_and_moments_bit_for_bit(
    zero_stage, num_ranks, dtype, tmp_path
):
    run = trained()
    source = write_zero_files(
        tmp_path / "ds", run, zero_stage=zero_stage, num_ranks=num_ranks, dtype=dtype
    )
    done = convert(source, tmp_path / "out.ckpt")
    assert done.kind == "deepspeed"
    wanted = expected(run)
    wanted |= {f"model.{n}": w.to(dtype).float() for n, w in run.frozen.items()}
    assert_equal(stored(tmp_path / "out.ckpt"), wanted)
    assert_optimizer(tmp_path / "out.ckpt", run)


@pytest.mark.parametrize("options", [
    {"zero_stage": 2, "alignment": 8},
    {"zero_stage": 1, "counts_step_in_state": False},
    {"zero_stage": 3, "per_sub_group": 2},
    {"zero_stage": 3, "per_sub_group": 1, "counts_step_in_state": False},
    {"zero_stage": 2, "tag": "checkpoint", "latest": False},
])  # fmt: skip
def test_every_layout_of_zero_is_read(options, tmp_path):
    run = trained()
    source = write_zero_files(tmp_path / "ds", run, num_ranks=3, **options)
    convert(source, tmp_path / "out.ckpt")
    assert_equal(stored(tmp_path / "out.ckpt"), expected(run))
    assert_optimizer(tmp_path / "out.ckpt", run)


def test_the_folder_of_one_tag_is_a_source_too(tmp_path):
    source = write_zero_files(tmp_path / "ds", trained(), zero_stage=2, num_ranks=2)
    convert(source, tmp_path / "one.ckpt")
    convert(source / "global_step3", tmp_path / "other.ckpt")
    assert list(diff(tmp_path / "one.ckpt", tmp_path / "other.ckpt")) == []


def test_what_is_frozen_keeps_16_bits_where_asked_and_only_weights_come_where_asked(tmp_path):
    run = trained()
    source = write_zero_files(tmp_path / "ds", run, zero_stage=3, num_ranks=2)
    convert(source, tmp_path / "out.ckpt", stored_dtypes=True, weights_only=True)
    wanted = {n: t for n, t in expected(run).items() if n.startswith("model.")}
    wanted |= {f"model.{n}": w.bfloat16() for n, w in run.frozen.items()}
    assert_equal(stored(tmp_path / "out.ckpt"), wanted)


def test_a_loss_scale_and_a_schedule_are_kept_where_ours_look_for_them(tmp_path):
    source = write_zero_files(
        *(tmp_path / "ds", trained()),
        zero_stage=2,
        num_ranks=2,
        dtype=torch.float16,
        dynamic_scale=512.0,
        client={"mine": (1, "x")},
    )
    done = convert(source, tmp_path / "out.ckpt")
    meta = storage.load_meta(tmp_path / "out.ckpt")
    assert meta["ZeroPrecision"] == {"scale": 512.0, "finite_steps": 0, "skipped_steps": 1}
    assert meta["lr_schedulers"] == [{"last_epoch": 3, "_step_count": 4}]
    assert meta["foreign"]["client_state"] == {"mine": (1, "x")}
    assert done.notes == ("no Trainer wrote it: its counters start at 0",)


def drop(name: str) -> Any:
    return lambda tag: (tag / name).unlink()


def rename(old: str, new: str) -> Any:
    return lambda tag: (tag / old).rename(tag / new)


OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"
SPOILT = {
    "must have those of 3": drop("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    "must have each once": drop(OPTIMIZER),
    "model states of 2 ranks, must have 3": drop("zero_pp_rank_2_mp_rank_00_model_states.pt"),
    "parallelism are not read": rename(MODEL, "zero_pp_rank_1_mp_rank_01_model_states.pt"),
    "no whole zip file": lambda tag: (tag / OPTIMIZER).write_bytes(b"PK"),
}


@pytest.mark.parametrize("words", SPOILT)
def test_zero_files_that_are_not_whole_are_refused(words, tmp_path):
    source = write_zero_files(tmp_path / "ds", trained(), zero_stage=3, num_ranks=3)
    SPOILT[words](source / "global_step3")
    with pytest.raises(ValueError, match=words):
        convert(source, tmp_path / "out.ckpt")


@pytest.mark.parametrize(("zero_stage", "key"), [
    (2, "single_partition_of_fp32_groups"),
    (3, "fp32_flat_groups"),
])  # fmt: skip
def test_flat_weights_of_another_length_are_refused(zero_stage, key, tmp_path):
    source = write_zero_files(tmp_path / "ds", trained(), zero_stage=zero_stage, num_ranks=2)
    file = source / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    plain = {"optimizer_state_dict": {key: [torch.zeros(3)] * 2, "partition_count": 2}}
    torch.save(plain, file)
    with pytest.raises(ValueError, match=r"elements of weights of group 0.* must have \d+"):
        convert(source, tmp_path / "out.ckpt")
