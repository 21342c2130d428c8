"""Every strategy name learns what one plain process learns."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import lit
from tests.ranks import ranks

STEPS = 8
CLIP = 0.5
NAMES = ("zero1", "zero2", "zero3")

# A sum over 2 or 4 shards rounds differently from one over the whole batch; 8 Adam steps of
# lr 3e-3 carry about 1e-7 of that into the weights (fp32 has 1.2e-7 per unit in the last place).
FP32_TOLERANCE = 2e-6


@cache
def plain(precision: Any, accumulate: int, clip: float | None) -> lit.Outcome:
    """One process, no strategy."""
    return lit.fit("auto", steps=STEPS, **_options(precision, accumulate, clip))


def _options(precision: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    return {"precision": precision, "accumulate": accumulate, "gradient_clip_val": clip}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative distance of all parameters taken together, in float64."""
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in b)
    size = sum(float(b[n].double().square().sum()) for n in b)
    return (difference / size) ** 0.5


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_run_repeats_the_plain_process(
    name: str, accumulate: int, clip: float | None, world_size: int
) -> None:
    options = _options("32-true", accumulate, clip)
    outcome = ranks(world_size).run(lit.fit, name, steps=STEPS, **options)[0]
    expected = plain("32-true", accumulate, clip)
    assert len(outcome.losses) == STEPS * accumulate
    assert outcome.losses == pytest.approx(expected.losses, rel=FP32_TOLERANCE)
    for parameter, value in expected.parameters.items():
        torch.testing.assert_close(
            outcome.parameters[parameter], value, rtol=0, atol=FP32_TOLERANCE, msg=parameter
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("clip", [None, CLIP], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_run_is_as_close_to_float64_as_the_plain_process(
    name: str, precision: str, accumulate: int, clip: float | None, world_size: int
) -> None:
    exact = plain("64-true", accumulate, clip).parameters
    allowed = 2 * distance(plain(precision, accumulate, clip).parameters, exact)
    options = _options(precision, accumulate, clip)
    outcome = ranks(world_size).run(lit.fit, name, steps=STEPS, **options)[0]
    assert distance(outcome.parameters, exact) <= allowed
