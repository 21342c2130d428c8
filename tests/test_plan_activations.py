"""What a decoder keeps for backward, by formula and by counting what autograd saves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zero_strategy.experiments.models.activations import activations, block_bytes, head_bytes
from zero_strategy.experiments.models.gpt import GPT, GPTConfig
from zero_strategy.experiments.models.loss import token_loss

BATCH_SIZE, SEQ_LEN = 2, 120
NUM_TOKENS = BATCH_SIZE * SEQ_LEN
# Tables of angles and the like are left out of the formulas.
TOLERANCE = 0.1


class FusedNorm(torch.autograd.Function):
    """Keeps what the fused kernel keeps: the input and one inverse root per vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        root = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, root, weight)
        return (x * root * weight).to(x.dtype)


@pytest.fixture(autouse=True)
def _fused_norm(monkeypatch):
    # The CPU's norm is put together from parts, each of which keeps its own copy.
    monkeypatch.setattr(F, "rms_norm", lambda x, _, weight, eps: FusedNorm.apply(x, weight, eps))


def decoder(*, recompute: bool, dtype: torch.dtype, num_kv_heads: int) -> GPT:
    config = GPTConfig(
        vocab_size=103,
        num_layers=3,
        hidden_size=48,
        num_heads=2,
        num_kv_heads=num_kv_heads,
        intermediate_size=136,
        max_seq_len=SEQ_LEN,
        recompute=recompute,
    )
    return GPT(config).to(dtype)


def saved_bytes(module: torch.nn.Module, run: Callable[[], object]) -> int:
    """Bytes of memory that autograd keeps for `run`, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The tensor is held, so that no other takes its address.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result is not None
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_keeps_what_the_formula_says(dtype, num_kv_heads):
    model = decoder(recompute=False, dtype=dtype, num_kv_heads=num_kv_heads)
    x_BTH = torch.randn(BATCH_SIZE, SEQ_LEN, 48, dtype=dtype, requires_grad=True)
    angles = model.rotary(SEQ_LEN, dtype)
    counted = saved_bytes(model, lambda: model.layers[0](x_BTH, *angles))
    planned = block_bytes(model.config, num_tokens=NUM_TOKENS, itemsize=dtype.itemsize)
    assert planned == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_with_its_loss_keeps_what_the_formulas_say(dtype, recompute):
    model = decoder(recompute=recompute, dtype=dtype, num_kv_heads=2)
    token_BT = torch.randint(0, 103, (BATCH_SIZE, SEQ_LEN + 1))
    counted = saved_bytes(model, lambda: token_loss(model(token_BT[:, :-1]), token_BT[:, 1:]))
    sizes = {"itemsize": dtype.itemsize}
    kept = activations(model.config, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, **sizes).kept_bytes
    planned = kept + head_bytes(model.config, num_tokens=NUM_TOKENS, **sizes)
    assert planned == pytest.approx(counted, rel=TOLERANCE)


def test_recompute_moves_inner_activations_from_every_block_to_one():
    def of(recompute: bool):
        model = decoder(recompute=recompute, dtype=torch.bfloat16, num_kv_heads=2)
        return activations(model.config, batch_size=4, seq_len=100, itemsize=2)

    kept, again = of(False), of(True)
    assert again.kept_bytes < kept.kept_bytes / 5
    assert again.unit_bytes > kept.unit_bytes
    assert again.loss_bytes == kept.loss_bytes
