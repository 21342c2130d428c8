"""The reference decoder computes what its docstrings say, on odd sizes."""

import dataclasses
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero_strategy.experiments.models.gpt import GPT, GPTConfig
from zero_strategy.experiments.models.loss import token_loss
from zero_strategy.experiments.models.rotary import rotate

ODD = GPTConfig(
    vocab_size=37,
    num_layers=3,
    hidden_size=42,
    num_heads=7,
    num_kv_heads=7,
    intermediate_size=51,
    max_seq_len=19,
)


def build(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(dataclasses.replace(ODD, **changes))


def tokens(batch=2, seq_len=13, seed=1):
    return torch.randint(37, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def gradients(model, token_BT):
    model.zero_grad()
    token_loss(model(token_BT[:, :-1]), token_BT[:, 1:]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def reset_in_module_order(model):
    for module in model.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()


@pytest.mark.parametrize("position", [0, 5, 12])
def test_a_token_changes_no_earlier_logit_and_some_later_one(position):
    model = build().double()
    before = tokens()
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % 37
    difference = (model(before) - model(after)).abs().amax((0, 2))
    assert difference[:position].eq(0).all()
    assert difference[position:].gt(0).all()


def test_grouped_heads_equal_repeated_key_value_heads():
    grouped = build(num_heads=6, num_kv_heads=2, hidden_size=48).double()
    full = build(num_heads=6, num_kv_heads=6, hidden_size=48).double()
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith("qkv.weight"):
            q, k, v = weight.unflatten(0, (-1, 8)).split((6, 2, 2))
            repeated = [part.repeat_interleave(3, dim=0) for part in (k, v)]
            state[name] = torch.cat((q, *repeated)).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()), rtol=1e-12, atol=1e-12)


def test_logits_equal_an_explicit_attention_reference():
    model = build(num_layers=1, num_kv_heads=1).double()
    token_BT, block = tokens(), model.layers[0]
    cos, sin = model.rotary(13, torch.float64)
    x = model.embed(token_BT)
    qkv = block.attention.qkv(block.attention_norm(x)).unflatten(-1, (9, 6)).transpose(1, 2)
    q, k, v = qkv.split((7, 1, 1), dim=1)
    q = rotate(q.transpose(1, 2), cos, sin).transpose(1, 2)
    k = rotate(k.transpose(1, 2), cos, sin).transpose(1, 2)
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    weight = (q @ k.mT / math.sqrt(6)).masked_fill(hidden, -math.inf).softmax(-1)
    x = x + block.attention.out((weight @ v).transpose(1, 2).flatten(2))
    gate, up = block.feed_forward.gate_up(block.feed_forward_norm(x)).chunk(2, -1)
    x = x + block.feed_forward.down(gate.sigmoid() * gate * up)
    expected = model.head(F.rms_norm(x, (42,), model.norm.weight, 1e-5))
    torch.testing.assert_close(model(token_BT), expected, rtol=1e-12, atol=1e-12)


def test_rotated_products_depend_on_distance_only():
    model = build().double()
    cos, sin = model.rotary(19, torch.float64)
    q, k = torch.randn(2, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    turned_q = rotate(q.expand(19, 1, 6), cos, sin).squeeze(1)
    turned_k = rotate(k.expand(19, 1, 6), cos, sin).squeeze(1)
    product = turned_q @ turned_k.T
    # The table is rounded to float32, so products agree to about its precision.
    torch.testing.assert_close(product[3:, 3:], product[:-3, :-3], rtol=0, atol=1e-6)


def test_rotation_passes_the_finite_difference_check():
    cos, sin = build().rotary(5, torch.float64)
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x)


def test_rotation_equals_a_product_of_complex_numbers():
    cos, sin = build().rotary(5, torch.float64)
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64)
    expected = torch.complex(*x.chunk(2, -1)) * torch.complex(cos, sin)
    actual = torch.complex(*rotate(x, cos, sin).chunk(2, -1))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_reset_after_meta_equals_one_built_directly(tied):
    plain = build(tied=tied)
    with torch.device("meta"):
        late = build(tied=tied)
    late.to_empty(device="cpu")
    if tied:
        late.embed.weight = late.head.weight  # `to_empty` parts shared parameters
    torch.manual_seed(0)
    reset_in_module_order(late)
    assert plain.state_dict().keys() == late.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(late.state_dict()[name], value, rtol=0, atol=0)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(late.get_buffer(name), value, rtol=0, atol=0)


def test_every_owner_of_values_resets_all_of_them():
    model = build()
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        with torch.no_grad():
            for value in own:
                value.fill_(math.nan)
        if own:
            module.reset_parameters()
        assert all(value.isfinite().all() for value in own)


def test_tied_head_and_embedding_share_one_parameter():
    model = build(tied=True)
    assert model.head.weight is model.embed.weight
    untied = sum(p.numel() for p in build().parameters())
    assert untied - sum(p.numel() for p in model.parameters()) == 37 * 42


def test_recomputed_blocks_give_bitwise_equal_gradients():
    expected = gradients(build(), tokens())
    actual = gradients(build(recompute=True), tokens())
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        assert torch.equal(actual[name], grad), name


def test_rotary_table_is_in_no_checkpoint():
    assert not any("rotary" in name for name in build().state_dict())


def test_flops_equal_a_count_over_the_products_of_one_pass():
    model = build(num_heads=7, num_kv_heads=1)
    seq_len = 13
    products = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            products.append(2 * seq_len * module.in_features * module.out_features)
    for position in range(seq_len):
        visible = position + 1
        products.extend([2 * visible * 6, 2 * visible * 6] * 7 * 3)  # scores and values, per head
    assert model.flops_per_token(seq_len) * seq_len == 3 * sum(products)


def test_autocast_keeps_float32_residuals_and_needs_no_conversion_warning():
    model = build()
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        seen = []
        model.layers[1].register_forward_pre_hook(lambda _, args: seen.extend(args))
        logits = model(tokens())
    assert [value.dtype for value in seen] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(tokens()), rtol=0.02, atol=0.02)


def test_bfloat16_parameters_keep_one_dtype_throughout():
    logits = build().to(torch.bfloat16)(tokens())
    assert logits.dtype == torch.bfloat16
    assert token_loss(logits, tokens()).dtype == torch.float32


def test_a_shape_that_cannot_be_is_refused_with_every_reason():
    with pytest.raises(ValueError) as caught:
        build(hidden_size=43, num_kv_heads=2)
    assert str(caught.value).splitlines() == [
        "model.hidden_size = 43: must be a multiple of 2 * num_heads = 14, rotary halves need an "
        "even head dim. Use 42.",
        "model.num_kv_heads = 2: must be a divisor of num_heads = 7. Use 7.",
    ]


def test_too_long_sequence_is_refused_with_the_setting_to_change():
    with pytest.raises(ValueError, match=r"= 20: must be at most model.max_seq_len = 19\. Cut"):
        build()(tokens(seq_len=20))
