"""The offload engine beside fp32 masters under torch's fused AdamW, bit for bit."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from tests.delayed import DelayedLane, DelayedLink
from zero_strategy.kernels.adam import AdamStep
from zero_strategy.offload.engine import OffloadEngine
from zero_strategy.offload.host import HostState
from zero_strategy.offload.lanes import CpuLane, Lane, StreamLane
from zero_strategy.offload.layout import Layout
from zero_strategy.offload.link import CudaLink, Link, link_for
from zero_strategy.offload.resident import ResidentState
from zero_strategy.offload.tiers import TieredState
from zero_strategy.offload.ways import Way

NUM_STEPS = 40
SPIKES = {7: 30.0, 9: 30.0, 17: 300.0, 25: math.inf, 33: math.inf}
VOCAB = 97


class Model(nn.Module):
    """Odd sizes, a frozen matrix, a parameter that is used in some steps, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 13)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(13, 29), nn.GELU(), nn.Linear(29, 13)) for _ in range(4)
        )
        self.odd = nn.Linear(13, 13)
        self.norm = nn.LayerNorm(13)
        self.layers[1][0].weight.requires_grad_(False)

    def forward(self, x: Tensor, *, odd: bool) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        h = self.odd(h) if odd else h
        return self.norm(h) @ self.embed.weight.T


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def half_away(master: Tensor) -> Tensor:
    bits = master.detach().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def loss_of(model: nn.Module, step: int, micro: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randint(0, VOCAB, (8, 16), generator=draw).to(model.norm.weight.device)
    logits = model(x, odd=step % 3 != 1)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), (x * 7 + 3).flatten() % VOCAB)
    return loss * SPIKES.get(step, 1.0)


def groups_of(names: list[str]) -> list[list[str]]:
    matrices = [n for n in names if n.endswith("weight") and "norm" not in n]
    return [matrices, [n for n in names if n not in matrices]]


def lr_at(step: int) -> float:
    return 3e-3 * min(1.0, (step + 1) / 10) * (1 - step / 200)


def coefficient(square: float, max_norm: float | None) -> float | None:
    if not math.isfinite(square):
        return None
    if max_norm is None:
        return 1.0
    norm = torch.tensor(math.sqrt(square), dtype=torch.float32)
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


WEIGHT_DECAY = (0.1, 0.0)


def whole_vectors(flat: Tensor) -> Tensor:
    """Padded with zeros: torch's loop over the last elements rounds `v` in another order."""
    return nn.functional.pad(flat.flatten(), (0, -flat.numel() % 64))


def part(padded: Tensor, like: Tensor) -> Tensor:
    return padded[: like.numel()].view_as(like)


def expected(max_norm: float | None, num_micro: int, grad_dtype: torch.dtype) -> dict:
    """fp32 masters stepped by torch, weights for compute rounded from them."""
    model = build()
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.bfloat16()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    leaves = {n: nn.Parameter(whole_vectors(masters[n])) for n in trained}

    def write_weights() -> None:
        for name, parameter in trained.items():
            parameter.data = part(half_away(leaves[name]), parameter)

    write_weights()
    groups = [
        {"params": [leaves[n] for n in names], "weight_decay": decay}
        for names, decay in zip(groups_of(list(trained)), WEIGHT_DECAY, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    losses, scales = [], []
    for step in range(NUM_STEPS):
        sums: dict[str, Tensor] = {}
        for micro in range(num_micro):
            loss = loss_of(model, step, micro) / num_micro
            loss.backward()
            losses.append(loss.item())
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    grad = parameter.grad.float()
                    sums[name] = sums[name] + grad if name in sums else grad
                    parameter.grad = None
        sums = {n: g.to(grad_dtype).float() for n, g in sums.items()}
        scale = coefficient(sum(float(g.double().square().sum()) for g in sums.values()), max_norm)
        scales.append(scale)
        if scale is None:
            continue
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        for name, leaf in leaves.items():
            leaf.grad = whole_vectors(sums[name] * torch.tensor(scale)) if name in sums else None
        optimizer.step()
        write_weights()
    state = {n: optimizer.state[leaf] for n, leaf in leaves.items()}
    return {
        "losses": losses,
        "scales": scales,
        "master": {n: part(leaf.detach(), trained[n]) for n, leaf in leaves.items()},
        "m": {n: part(s["exp_avg"], trained[n]) for n, s in state.items()},
        "v": {n: part(s["exp_avg_sq"], trained[n]) for n, s in state.items()},
        "steps": {n: int(s["step"]) for n, s in state.items()},
    }


class Run:
    """A plain module in bf16 whose parameters the engine steps."""

    def __init__(
        self,
        max_norm: float | None,
        num_micro: int,
        grad_dtype: torch.dtype,
        *,
        device: str = "cpu",
        lanes: str = "cpu",
        moments: torch.dtype = torch.float32,
        spare_slots: int = 3,
    ) -> None:
        self.model = build()
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        masters = {n: p.detach().flatten().clone() for n, p in trained.items()}
        self.model.bfloat16().to(device)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        units: dict[str, dict[str, int]] = {}
        for name, parameter in trained.items():
            unit = ".".join(name.split(".")[:2]) if name.startswith("layers") else ""
            units.setdefault(unit, {})[name] = parameter.numel()
        layout = Layout.of(units, 256)
        state = HostState(layout, moments=moments)
        for name, master in masters.items():
            state.write_master(name, master)
            trained[name].data = state.upper(name).view_as(trained[name]).to(device)
        pinned = device == "cuda"
        late = DelayedLink(seed=1)
        link: Link = late if lanes.startswith("delayed") else link_for(torch.device(device))
        longest = layout.slot_length
        num_cpu = {"cpu": 2, "both": 1, "delayed cpu": 2, "delayed both": 1}.get(lanes, 0)
        chosen: list[Lane] = [
            CpuLane(link, longest, num_wires=2, threads=1, pinned=pinned) for _ in range(num_cpu)
        ]
        if lanes in ("delayed both", "delayed stream"):
            chosen.append(DelayedLane(late, 2, leaves=num_cpu))
        if isinstance(link, CudaLink) and lanes != "cpu":
            state.pin(range(len(layout.chunks)))
            chosen.append(
                StreamLane(
                    link,
                    longest,
                    grad_dtype=grad_dtype,
                    moments=moments,
                    num_slots=2,
                    leaves=num_cpu,
                )
            )
        self.engine = OffloadEngine(
            state=TieredState(state, ResidentState({}, moments=moments)),
            weights={n: p.detach().view(-1) for n, p in trained.items()},
            lanes=chosen,
            link=link,
            grad_dtype=grad_dtype,
            spare_slots=spare_slots,
            max_held=3,
            pinned=pinned,
        )
        self.decay = {
            n: decay
            for names, decay in zip(groups_of(list(trained)), WEIGHT_DECAY, strict=True)
            for n in names
        }
        self.max_norm, self.num_micro = max_norm, num_micro
        self.losses: list[float] = []
        self.scales: list[float | None] = []
        self.last = True
        self.step_index = 0
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))
        for unit in units:
            self.model.get_submodule(unit).register_forward_pre_hook(
                lambda *_, unit=unit: self.engine.fetch(unit), prepend=True
            )

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        grad, parameter.grad = parameter.grad, None
        self.engine.receive(name, grad.flatten(), self.hyper, last=self.last)

    def hyper(self) -> dict[str, AdamStep]:
        return {
            name: AdamStep(
                lr=lr_at(self.step_index),
                beta1=0.9,
                beta2=0.95,
                weight_decay=decay,
                step=self.engine.steps[name] + 1,
            )
            for name, decay in self.decay.items()
        }

    def step(self) -> None:
        for micro in range(self.num_micro):
            self.last = micro == self.num_micro - 1
            loss = loss_of(self.model, self.step_index, micro) / self.num_micro
            loss.backward()
            self.losses.append(loss.item())
        scale = coefficient(float(self.engine.square()), self.max_norm)
        self.scales.append(scale)
        self.engine.seal(scale, self.hyper())
        self.step_index += 1


def assert_equal(run: Run, want: dict) -> None:
    run.engine.close()
    assert run.scales == want["scales"]
    assert run.losses == pytest.approx(want["losses"], rel=0, abs=0, nan_ok=True)
    assert run.engine.steps == want["steps"]
    for name in run.decay:
        assert torch.equal(run.engine.state.master(name), want["master"][name].flatten()), name
        m, v = run.engine.state.moments(name)
        assert torch.equal(m, want["m"][name].flatten()), name
        assert torch.equal(v, want["v"][name].flatten()), name
        weights = run.model.get_parameter(name).detach().flatten()
        assert torch.equal(weights, half_away(want["master"][name]).flatten()), name


@pytest.mark.parametrize("mode", ["deferred", "late", "staged"])
@pytest.mark.parametrize("max_norm", [None, 0.5, 2.0])
@pytest.mark.parametrize(
    ("num_micro", "grad_dtype"),
    [(1, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16)],
)
def test_every_mode_repeats_torch_bit_for_bit(mode, max_norm, num_micro, grad_dtype):
    run = Run(max_norm, num_micro, grad_dtype)
    run.engine.way = Way(mode, helps=True)
    for _ in range(NUM_STEPS):
        run.step()
    want = expected(max_norm, num_micro, grad_dtype)
    clipped = sum(s is not None and s < 1 for s in want["scales"])
    assert (0 < clipped < NUM_STEPS) == (max_norm == 2.0) or max_norm != 2.0
    assert want["scales"].count(None) == 2
    assert_equal(run, want)


@pytest.mark.parametrize("lanes", ["delayed cpu", "delayed both", "delayed stream"])
@pytest.mark.parametrize("mode", ["deferred", "late", "staged"])
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_copies_and_passes_that_end_late_change_no_bit(mode, max_norm, lanes):
    run = Run(max_norm, 1, torch.bfloat16, lanes=lanes)
    run.engine.way = Way(mode, helps=True)
    for _ in range(NUM_STEPS):
        run.step()
    assert_equal(run, expected(max_norm, 1, torch.bfloat16))


@pytest.mark.parametrize("lanes", ["delayed cpu", "delayed both", "delayed stream"])
@pytest.mark.parametrize("mode", ["deferred", "late", "staged"])
def test_gradients_that_wait_on_the_device_for_room_change_no_bit(mode, lanes):
    run = Run(2.0, 2, torch.float32, lanes=lanes, spare_slots=1)
    run.engine.way = Way(mode, helps=True)
    for _ in range(NUM_STEPS):
        run.step()
    assert_equal(run, expected(2.0, 2, torch.float32))


@pytest.mark.parametrize("lanes", ["cpu", "delayed both"])
def test_ways_may_change_and_the_run_be_flushed_at_any_step(lanes):
    run = Run(2.0, 1, torch.bfloat16, lanes=lanes)
    modes = itertools.cycle(["deferred", "late", "deferred", "staged", "staged", "late", "late"])
    for step, mode in zip(range(NUM_STEPS), modes, strict=False):
        run.engine.way = Way(mode, helps=step % 3 > 0)
        run.step()
        if step % 6 == 5:
            run.engine.flush()
    assert_equal(run, expected(2.0, 1, torch.bfloat16))


def outcome(run: Run) -> dict[str, Tensor]:
    run.engine.close()
    state = {"losses": torch.tensor(run.losses).nan_to_num()}
    for name in run.decay:
        m, v = run.engine.state.moments(name)
        weights = run.model.get_parameter(name).detach().flatten().cpu()
        state |= {name: run.engine.state.master(name), f"{name}.m": m, f"{name}.v": v}
        state[f"{name}.weights"] = weights
        assert torch.equal(weights, half_away(state[name])), name
    return state


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("max_norm", [None, 2.0])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_lanes_and_modes_change_no_bit_on_a_gpu(max_norm, grad_dtype, moments):
    want = None
    for mode in ("staged", "deferred", "late"):
        for lanes in ("cpu", "both", "stream"):
            run = Run(max_norm, 2, grad_dtype, device="cuda", lanes=lanes, moments=moments)
            run.engine.way = Way(mode, helps=True)
            for _ in range(NUM_STEPS):
                run.step()
            got = outcome(run)
            want = want or got
            for name, value in want.items():
                assert torch.equal(got[name], value), (mode, lanes, name)
