"""The chunked loss equals the plain one, in value and in gradient."""

import pytest
import torch
import torch.nn.functional as F

from zero_strategy.experiments.models import loss


def case(dtype, shape=(3, 7, 29), scale=5.0):
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(shape[-1], shape[:-1], generator=generator)
    return logits.requires_grad_(), target


def reference(logits, target):
    wide = logits.detach().double().requires_grad_()
    value = F.cross_entropy(wide.flatten(0, 1), target.flatten())
    value.backward()
    return value.detach(), wide.grad


@pytest.fixture(params=[1, 29 * 4, 1 << 23], ids=["one row", "ragged last chunk", "one chunk"])
def chunk_values(request, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_VALUES", request.param)


@pytest.mark.usefixtures("chunk_values")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_equal_the_float64_reference(dtype):
    logits, target = case(dtype)
    expected, expected_grad = reference(logits, target)
    value = loss.token_loss(logits, target)
    value.backward()
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    # The loss is exact to float32; the gradient is rounded once to the dtype of the logits.
    exact = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(value.double(), expected, rtol=exact, atol=0)
    rounding = 1e-12 if dtype == torch.float64 else max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(logits.grad.double(), expected_grad, rtol=rounding, atol=1e-7)


def test_gradient_scales_with_the_incoming_one_before_it_is_rounded():
    logits, target = case(torch.float16, scale=0.1)
    (loss.token_loss(logits, target) * 2.0**16).backward()
    _, expected = reference(logits, target)
    # Unscaled entries near 1e-3 / 21 would keep few bits in float16.
    torch.testing.assert_close(logits.grad.double(), expected * 2.0**16, rtol=1e-3, atol=1e-7)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    value = loss.token_loss(logits, torch.tensor([[1]]))
    value.backward()
    assert value.item() == pytest.approx(2e4)
    torch.testing.assert_close(logits.grad, torch.tensor([[[1.0, -1.0, 0.0]]]))


def test_gradient_passes_the_finite_difference_check():
    logits, target = case(torch.float64, shape=(1, 3, 5))
    assert torch.autograd.gradcheck(lambda x: loss.token_loss(x, target), logits)
