"""Hugging Face models train in shards as they do whole, and hold what their files hold."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import hf_models
from tests.hf_models import FAMILIES, one_step, options, rows, save_random
from tests.ranks import ranks

# Means over two ranks' rows round differently from one over all; relative to a gradient's largest
# entry, fp32 has 1.2e-7 per unit in the last place.
TOLERANCE = 2e-6


def expect_same_step(run: hf_models.Run, model: torch.nn.Module) -> None:
    """Compare a run with an unsharded forward and backward: weights bitwise, gradients closely."""
    loss = model(input_ids=rows(), labels=rows(), use_cache=False).loss
    loss.backward()
    expected = dict(model.named_parameters())
    assert run.parameters.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(run.parameters[name], parameter.detach()), name
    for name, buffer in model.named_buffers():
        assert torch.equal(run.buffers[name], buffer), name
    assert run.loss == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert run.gradients.keys() == expected.keys()
    for name, parameter in expected.items():
        assert difference(run.gradients[name], parameter.grad) <= TOLERANCE, name


def difference(found: Tensor, expected: Tensor | None) -> float:
    """The largest difference, relative to the largest expected entry."""
    assert expected is not None
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_in_shards_as_it_does_whole(family: str, tmp_path: Path) -> None:
    model = save_random(family, tmp_path)
    run = ranks(2).run(one_step, "zero3", tmp_path, dtype=torch.float32, **options(family))[0]
    expect_same_step(run, model)


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
@pytest.mark.parametrize("family", ["llama-tied", "mixtral"])
def test_lower_stages_train_as_the_whole_model_does(
    family: str, stage: str, tmp_path: Path
) -> None:
    model = save_random(family, tmp_path)
    run = ranks(2).run(one_step, stage, tmp_path, dtype=torch.float32)[0]
    expect_same_step(run, model)
