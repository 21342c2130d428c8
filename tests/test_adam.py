"""Adam over split master weights is torch's fused Adam, bitwise, whichever way its steps run."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_strategy.kernels.adam import (
    AdamState,
    AdamStep,
    Pending,
    commit_and_preview,
    join,
    preview,
    split,
    step,
    sum_of_squares,
)

# Elsewhere torch's own kernel fuses no products.
VECTORS = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
NUM_STEPS = 40
SPIKES = {9: 30.0, 17: 300.0, 18: 300.0}
SCALES = {3: 0.37, 9: 1 / 30, 17: 1 / 300, 25: 0.999}
# Whole vectors for torch, whose scalar tail fuses another product.
VECTOR = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    num: int = 1021
    start: str = "random"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decoupled: bool = True
    dtype: torch.dtype = torch.bfloat16

    def adam(self, index):
        warm_up = min(1.0, (index + 1) / 10) * (1 - index / 100)
        return AdamStep(
            lr=3e-3 * warm_up,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=self.weight_decay if index % 8 else 0.0,
            step=index + 1,
            decoupled=self.decoupled,
        )

    def weights(self):
        values = torch.randn(self.num, generator=torch.Generator().manual_seed(self.num))
        factor = {"random": 1.0, "zero": 0.0, "denormal": 1e-40, "huge": 1e37}[self.start]
        return values * factor

    def grads(self):
        generator = torch.Generator().manual_seed(1)
        factor = {"denormal": 1e-22, "huge": 1e15}.get(self.start, 1.0)
        for index in range(NUM_STEPS):
            grad = torch.randn(self.num, generator=generator) * factor * SPIKES.get(index, 1.0)
            yield grad.to(self.dtype), self.adam(index), SCALES.get(index, 1.0)


def bits(tensor):
    """Bit patterns; all patterns of NaN count as one."""
    values = tensor.detach().clone()
    if values.is_floating_point():
        values[values.isnan()] = math.nan
        return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
    return values


def same(a, b):
    return torch.equal(bits(a), bits(b))


def new_state(master, dtype=torch.float32):
    upper, lower = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master).short()
    split(master, upper, lower)
    m, v = torch.zeros_like(master, dtype=dtype), torch.zeros_like(master, dtype=dtype)
    return AdamState(upper=upper, lower=lower, m=m, v=v)


def rounded(master):
    """To bf16, half away from zero."""
    upper, lower = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master).short()
    split(master, upper, lower)
    return upper


class Torch:
    """torch.optim.Adam(W)(fused=True) on fp32 parameters."""

    def __init__(self, case, *, pad=True):
        values = torch.nn.functional.pad(case.weights(), (0, -case.num % VECTOR if pad else 0))
        self.num = case.num
        self.param = torch.nn.Parameter(values)
        optimizer = torch.optim.AdamW if case.decoupled else torch.optim.Adam
        self.optimizer = optimizer([self.param], betas=case.betas, eps=case.eps, fused=True)

    def step(self, grad, adam, scale):
        self.param.grad = torch.zeros_like(self.param)
        self.param.grad[: self.num] = grad.float() * torch.tensor(scale, dtype=torch.float32)
        self.optimizer.param_groups[0].update(lr=adam.lr, weight_decay=adam.weight_decay)
        self.optimizer.step()

    def p_m_v(self):
        state = self.optimizer.state[self.param]
        tensors = (self.param.detach(), state["exp_avg"], state["exp_avg_sq"])
        return [tensor[: self.num] for tensor in tensors]


def expect_equal(state, oracle):
    ours = (join(state.upper, state.lower), state.m, state.v)
    for name, mine, theirs in zip("pmv", ours, oracle.p_m_v(), strict=True):
        assert same(mine, theirs), name


CASES = [
    Case(num=num, start=start, betas=betas, eps=eps, decoupled=decoupled, dtype=dtype)
    for num in (1, 7, 8191, 100003)
    for start in ("random", "zero", "denormal", "huge")
    for betas, eps, dtype in (
        ((0.9, 0.95), 1e-8, torch.bfloat16),
        ((0.0, 0.999), 1e-6, torch.float32),
        ((0.5, 0.99), 1e-15, torch.bfloat16),
    )
    for decoupled in (True, False)
    if num < 100003 or start == "random"
]


def case_id(case):
    optimizer = "adamw" if case.decoupled else "adam"
    return f"{optimizer}-{case.num}-{case.start}-{case.betas[0]}"


@pytest.fixture(params=["c", "reference"])
def backend(request, monkeypatch):
    monkeypatch.setenv("ZERO_STRATEGY_ADAM", request.param)


@pytest.mark.skipif(not VECTORS, reason="torch fuses products with AVX2 and AVX-512 only")
@pytest.mark.usefixtures("backend")
class TestAgainstTorch:
    @pytest.mark.parametrize("case", CASES, ids=case_id)
    def test_forty_steps_equal_torch_bitwise(self, case):
        state, oracle = new_state(case.weights()), Torch(case)
        for grad, adam, scale in case.grads():
            step(state, grad, adam, scale)
            oracle.step(grad, adam, scale)
        expect_equal(state, oracle)

    @pytest.mark.parametrize("case", CASES, ids=case_id)
    def test_deferred_commits_equal_torch_bitwise_and_every_wire_is_its_weight(self, case):
        state, oracle, pending = new_state(case.weights()), Torch(case), None
        wire = torch.empty(case.num, dtype=torch.bfloat16).fill_(math.nan)
        for grad, adam, scale in case.grads():
            if pending is None:
                preview(state, grad, adam, 1.0, wire)
            else:
                commit_and_preview(state, pending, grad, adam, 1.0, wire)
            if scale != 1:
                preview(state, grad, adam, scale, wire)
            pending = Pending(grad, adam, scale)
            oracle.step(grad, adam, scale)
            assert same(wire, rounded(oracle.p_m_v()[0]))
        step(state, pending.grad, pending.adam, pending.scale)
        expect_equal(state, oracle)

    @pytest.mark.parametrize("decoupled", [True, False])
    def test_without_padding_torch_differs_in_its_scalar_tail_alone_and_in_last_bits(
        self, decoupled
    ):
        case = Case(num=8191, decoupled=decoupled)
        state, oracle = new_state(case.weights()), Torch(case, pad=False)
        for grad, adam, scale in case.grads():
            step(state, grad, adam, scale)
            oracle.step(grad, adam, scale)
        ours = (join(state.upper, state.lower), state.m, state.v)
        body = case.num // VECTOR * VECTOR
        for mine, theirs in zip(ours, oracle.p_m_v(), strict=True):
            assert same(mine[:body], theirs[:body])
            # Forty steps of a few units in the last place, on weights and moments near one.
            torch.testing.assert_close(mine[body:], theirs[body:], rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("backend")
def test_a_preview_keeps_the_state():
    case = Case()
    state = new_state(case.weights())
    before = [tensor.clone() for tensor in (state.upper, state.lower, state.m, state.v)]
    grad, adam, _ = next(case.grads())
    preview(state, grad, adam, 0.5, torch.empty_like(state.upper))
    after = (state.upper, state.lower, state.m, state.v)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("backend")
def test_bf16_moments_are_the_fp32_ones_rounded_half_away():
    case = Case()
    grad, adam, scale = next(case.grads())
    exact, compact = (new_state(case.weights(), t) for t in (torch.float32, torch.bfloat16))
    for state in (exact, compact):
        step(state, grad, adam, scale)
    assert same(compact.m, rounded(exact.m))
    assert same(compact.v, rounded(exact.v))
    assert same(compact.upper, exact.upper)


LOWER_HALVES = (0, 1, 2, 0x1234, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xC000, 0xFFFE, 0xFFFF)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("lower_bits", LOWER_HALVES)
def test_split_is_lossless_over_all_upper_halves(lower_bits):
    master_bits = ((torch.arange(1 << 16) - (1 << 15)) << 16 | lower_bits).to(torch.int32)
    master = master_bits.view(torch.float32)
    upper, lower = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master).short()
    split(master, upper, lower)
    assert same(join(upper, lower), master)
    assert torch.equal(upper.isnan(), master.isnan())
    is_inf = master.isinf()
    assert torch.equal(upper[is_inf].float(), master[is_inf])
    if lower_bits == 0x8000:
        finite = master.isfinite() & upper.isfinite()
        assert (upper[finite].float().abs() >= master[finite].abs()).all(), "half goes away"
    else:
        assert same(upper, master.bfloat16()), "the nearest"


@pytest.mark.usefixtures("backend")
@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40))
def test_split_is_lossless_for_any_floats(values):
    master = torch.tensor(values, dtype=torch.float32)
    upper, lower = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master).short()
    split(master, upper, lower)
    assert same(join(upper, lower), master)
    assert torch.equal(upper.isnan(), master.isnan())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num", [0, 1, 255, 257, 65536, 70001])
def test_sum_of_squares_is_exact_to_fp64(dtype, num):
    grad = (torch.randn(num) * 100).to(dtype)
    total = sum_of_squares(grad)
    assert total.shape == ()
    exact = math.fsum(value * value for value in grad.double().tolist())
    # Sums of 256 terms in double, folded in pairs.
    assert total.item() == pytest.approx(exact, rel=1e-13)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_sum_of_squares_shows_a_value_that_is_not_finite(bad):
    grad = torch.ones(70001, dtype=torch.bfloat16)
    grad[68000] = bad
    assert not sum_of_squares(grad).isfinite()


def test_narrowing_a_state_gives_views():
    state = new_state(torch.randn(10))
    part = state.narrow(3, 4)
    part.m.fill_(7)
    assert part.length == 4
    assert state.m.tolist() == [0.0] * 3 + [7.0] * 4 + [0.0] * 3


ADAM = AdamStep(lr=1e-3, step=1)


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "tensor", "message"),
        [
            ("upper", torch.zeros(4), r"adam\.upper\.dtype = float32: must be bfloat16"),
            ("lower", torch.zeros(4), r"adam\.lower\.dtype = float32: must be int16"),
            ("m", torch.zeros(5), r"adam\.m\.shape = \(5,\): must be \(4,\)"),
            ("v", torch.zeros(2, 2), r"adam\.v\.shape = \(2, 2\): must be \(4,\)"),
            ("v", torch.zeros(4).bfloat16(), r"adam\.v\.dtype = bfloat16: must be float32"),
            ("m", torch.zeros(8)[::2], r"adam\.m\.stride = \(2,\): must be \(1,\)"),
            ("m", torch.zeros(4, device="meta"), r"adam\.m\.device = meta: must be cpu"),
        ],
    )
    def test_a_state_that_does_not_fit_names_the_tensor(self, field, tensor, message):
        tensors = {
            "upper": torch.zeros(4, dtype=torch.bfloat16),
            "lower": torch.zeros(4, dtype=torch.int16),
            "m": torch.zeros(4),
            "v": torch.zeros(4),
        }
        with pytest.raises(ValueError, match=message):
            AdamState(**(tensors | {field: tensor}))

    @pytest.mark.parametrize(
        ("grad", "message"),
        [
            (torch.zeros(5), r"adam\.grad\.shape = \(5,\): must be \(4,\)"),
            (torch.zeros(4).half(), r"adam\.grad\.dtype = float16: must be bfloat16 or float32"),
            (torch.zeros(8)[::2], r"adam\.grad\.stride"),
        ],
    )
    def test_every_pass_refuses_a_gradient_that_does_not_fit(self, grad, message):
        state = new_state(torch.zeros(4))
        wire, good = torch.empty_like(state.upper), torch.zeros(4)
        with pytest.raises(ValueError, match=message):
            step(state, grad, ADAM, 1.0)
        with pytest.raises(ValueError, match=message):
            preview(state, grad, ADAM, 1.0, wire)
        with pytest.raises(ValueError, match=message):
            commit_and_preview(state, Pending(grad, ADAM, 1.0), good, ADAM, 1.0, wire)
        with pytest.raises(ValueError, match=message):
            commit_and_preview(state, Pending(good, ADAM, 1.0), grad, ADAM, 1.0, wire)

    def test_a_wire_that_does_not_fit_is_refused(self):
        state = new_state(torch.zeros(4))
        with pytest.raises(ValueError, match=r"adam\.wire\.dtype = float32: must be bfloat16"):
            preview(state, torch.zeros(4), ADAM, 1.0, torch.zeros(4))

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"step": 0}, r"adam\.step = 0: must count from 1"),
            ({"beta1": 1.0}, r"adam\.beta1 = 1\.0: must lie in \[0, 1\)"),
            ({"beta2": -0.1}, r"adam\.beta2 = -0\.1: must lie in \[0, 1\)"),
        ],
    )
    def test_hyperparameters_that_would_divide_by_zero_are_refused(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            AdamStep(**({"lr": 1e-3, "step": 1} | wrong))

    def test_devices_without_an_implementation_are_refused(self):
        with pytest.raises(ValueError, match=r"adam\.device = meta: must be a CPU or CUDA device"):
            sum_of_squares(torch.zeros(4, device="meta"))
