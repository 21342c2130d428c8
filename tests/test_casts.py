"""Checkpoints of another precision: refused in few words, or cast where that was asked for."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests import lit
from tests.ranks import ranks
from tests.runs import Run, fit, refusal
from zero_strategy import OffloadConfig, SaveConfig, ShardedEMA, ZeroStrategy
from zero_strategy.checkpoint.casts import Casts, Pair
from zero_strategy.checkpoint.export import read_all

CASTS = SaveConfig(casts=True)
DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32,
}


class SaveAtStart(Callback):
    """Saves what a run goes on from."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def save(path: str, precision: str, offload: bool = False) -> None:
    strategy = "zero3_offload" if offload else "zero3"
    fit(strategy, precision=precision, epochs=1, save=path, callbacks=[ShardedEMA()])


def resume(
    path: str, precision: str, after: str, *, offload: bool = False
) -> tuple[Run, list[str]]:
    """The run, and what it said of casts."""
    strategy = ZeroStrategy(saving=CASTS, offload=OffloadConfig() if offload else None)
    callbacks: list[Callback] = [ShardedEMA(), SaveAtStart(after)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(strategy, precision=precision, resume=path, callbacks=callbacks)
    return run, [str(w.message) for w in caught if "casts" in str(w.message)]


def tensors(path: str) -> dict[str, Tensor]:
    return {
        n: t
        for part in ("model.", "optim.", "extra.")
        for n, t in read_all(Path(path), part).items()
    }


PAIRS = [
    ("32-true", "bf16-true", False, 2),
    ("bf16-true", "32-true", False, 1),
    ("bf16-mixed", "bf16-true", False, 1),
    ("bf16-true", "bf16-mixed", True, 1),
]


@pytest.mark.parametrize(("saved", "resumed", "offload", "world_size"), PAIRS)
def test_weights_moments_and_averages_are_cast_where_allowed_and_told_once(
    saved: str, resumed: str, offload: bool, world_size: int, tmp_path: Path
) -> None:
    path, after = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    ranks(world_size).run(save, path, saved)
    results = ranks(world_size).run(resume, path, resumed, after, offload=offload)
    there, here = tensors(path), tensors(after)
    assert there.keys() == here.keys()
    assert any(n.endswith("exp_avg_sq") for n in there)
    for name, value in there.items():
        assert value.dtype == DTYPES[saved]
        assert here[name].dtype == DTYPES[resumed], name
        assert torch.equal(here[name], value.to(DTYPES[resumed])), name
    [told] = results[0][1]
    kinds = f"from {DTYPES[saved]} to {DTYPES[resumed]}"
    assert (
        told == f"zero.saving.casts = True: the checkpoint was cast, {len(there)} tensors {kinds}"
    )
    assert all(told == [] for _, told in results[1:])
    for run, _ in results:
        assert len(run.losses) == 3
        assert all(torch.tensor(run.losses).isfinite())


def test_state_in_host_memory_resumes_in_16_bits_on_the_device(tmp_path: Path) -> None:
    path, after = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    ranks(1).run(save, path, "bf16-mixed", True)
    ranks(1).run(resume, path, "bf16-true", after)
    there, here = tensors(path), tensors(after)
    assert all(torch.equal(here[n], t.bfloat16()) for n, t in there.items())


def cast_to_validate(path: str) -> tuple[str, list[str]]:
    run = lit.trainer(ZeroStrategy(saving=CASTS), precision="bf16-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = refusal(run.validate, lit.Lit(), lit.loader(24), ckpt_path=path, verbose=False)
    return said, [str(w.message) for w in caught if "casts" in str(w.message)]


def load_wider(path: str) -> str:
    module = lit.Lit(replace(lit.TINY, intermediate_size=41))
    return refusal(fit, ZeroStrategy(saving=CASTS), module=module, resume=path)


def load_at(path: str, precision: str) -> tuple[str, bool]:
    module = lit.Lit(seed=99)
    said = refusal(fit, "zero3", module=module, precision=precision, resume=path)
    fresh = dict(lit.Lit(seed=99).to(DTYPES[precision]).named_parameters())
    return said, all(torch.equal(w, fresh[n]) for n, w in lit.whole(module).items())


@pytest.mark.filterwarnings("ignore:Be aware that when using")
@pytest.mark.parametrize("source", ["directory", "file"])
def test_another_precision_or_width_is_refused_in_few_lines_with_the_way_out(
    source: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    if source == "directory":
        ranks(1).run(save, path, "32-true")
    else:
        fit("auto", epochs=1, save=path)
    [(said, untouched)] = ranks(1).run(load_at, path, "bf16-true")
    lines = said.splitlines()
    num = len(list(lit.Lit().parameters()))
    assert len(lines) == 5
    assert all("torch.float32, must be" in line for line in lines[:3])
    assert lines[3] == f"and {num - 3} more"
    assert "The precision differs" in lines[4]
    assert "ZeroStrategy(saving=SaveConfig(casts=True))" in lines[4]
    assert untouched

    [said] = ranks(1).run(load_wider, path)
    assert "stored as (24, 37)" in said
    assert said.endswith("and 3 more\nLoad a checkpoint of the same model.")

    [(said, told)] = ranks(1).run(cast_to_validate, path)
    assert said == ""
    assert len(told) == 1
    assert f"{num} tensors from torch.float32 to torch.bfloat16" in told[0]


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.int64, torch.int32),
        (torch.bool, torch.float32),
        (torch.float32, torch.int64),
        (torch.complex64, torch.float32),
    ],
)
def test_what_is_no_floating_point_number_is_never_cast(
    stored: torch.dtype, here: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=r"model\.n: stored as \(3,\).*\n.*of the same model"):
        Casts(allowed=True).check([Pair("model.n", (3,), stored, (3,), here)])


def test_casts_must_be_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"zero\.saving\.casts = 'bf16': must be True or False"):
        ZeroStrategy(saving=SaveConfig(casts="bf16"))  # type: ignore[arg-type]
