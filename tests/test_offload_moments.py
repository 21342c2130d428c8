"""Adam's moments in bf16: one result wherever the state lies, in less memory, and not exact."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_strategy
from tests import lit
from tests.ranks import ranks
from tests.test_offload import Lit, _options, _state
from tests.test_offload_engine import NUM_STEPS, Run, outcome
from tests.test_plan import job
from zero_strategy import OffloadConfig, ZeroStrategy
from zero_strategy.kernels import adam
from zero_strategy.kernels.adam import AdamState, Pending
from zero_strategy.kernels.adam.reference import ReferenceAdam
from zero_strategy.offload.host import HostState
from zero_strategy.offload.layout import Layout
from zero_strategy.offload.resident import ResidentState
from zero_strategy.offload.ways import Way
from zero_strategy.planning.machines import H200
from zero_strategy.planning.step_time import step_time
from zero_strategy.planning.tiers import gpu_parts, host_parts

BF16 = torch.bfloat16


class Reference:
    """Steps a run's parameters by the reference kernel, one whole parameter after the other."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.states: dict[str, AdamState] = {}
        self.grads: dict[str, Tensor] = {}
        for name in run.decay:
            master = run.engine.state.master(name)
            upper, lower = (
                torch.empty_like(master, dtype=BF16),
                torch.empty_like(master, dtype=torch.int16),
            )
            adam.split(master, upper, lower)
            m, v = (torch.zeros_like(master, dtype=BF16) for _ in range(2))
            self.states[name] = AdamState(upper=upper, lower=lower, m=m, v=v)
        self.receive, self.seal = run.engine.receive, run.engine.seal
        run.engine.receive, run.engine.seal = self._receive, self._seal  # type: ignore[method-assign]

    def _receive(self, name: str, grad: Tensor, *args: Any, **options: Any) -> None:
        self.grads[name] = grad.clone()
        self.receive(name, grad, *args, **options)

    def _seal(self, scale: float | None, hyper: Any) -> None:
        grads, self.grads = self.grads, {}
        for name, grad in grads.items() if scale is not None else ():
            step = Pending(grad, hyper[name], scale)
            ReferenceAdam().run(
                self.states[name], commit=step, preview=None, wire=None, threads=None
            )
        self.seal(scale, hyper)

    def outcome(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, state in self.states.items():
            found |= {
                name: adam.join(state.upper, state.lower),
                f"{name}.m": state.m.float(),
                f"{name}.v": state.v.float(),
                f"{name}.weights": state.upper,
            }
        return found


@pytest.mark.parametrize("lanes", ["cpu", "delayed both", "delayed stream"])
@pytest.mark.parametrize("mode", ["deferred", "late", "staged"])
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_every_lane_and_mode_repeats_the_reference_with_bf16_moments(mode, max_norm, lanes):
    run = Run(max_norm, 1, BF16, lanes=lanes, moments=BF16)
    reference = Reference(run)
    run.engine.way = Way(mode, helps=True)
    for _ in range(NUM_STEPS):
        run.step()
    found = outcome(run)
    for name, value in reference.outcome().items():
        assert torch.equal(found[name], value), name


def _strategy(placement: Any, moments: Any, stage: int = 3) -> ZeroStrategy:
    config = OffloadConfig(placement=placement, moments=moments, chunk_elements=512, threads=1)
    return ZeroStrategy(stage=stage, offload=config)


def _fit(placement: Any, moments: Any) -> tuple[list[float], dict[str, Tensor]]:
    module, strategy = Lit(), _strategy(placement, moments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_strategy.offloading, "device_room", lambda device: 10**9)
        run = lit.trainer(strategy, **_options(3, 3, 0.5))
        run.fit(module, lit.loader())
    return module.losses, _state(run, module)


@cache
def on_host(moments: str, world_size: int) -> list[Any]:
    return ranks(world_size).run(_fit, "host", moments)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("placement", [0.0, 0.6, "auto"])
def test_where_bf16_moments_lie_changes_no_bit(placement: Any, world_size: int) -> None:
    expected = on_host("bf16", world_size)
    outcomes = ranks(world_size).run(_fit, placement, "bf16")
    for (want_losses, want), (losses, state) in zip(expected, outcomes, strict=True):
        assert losses == want_losses
        assert state.keys() == want.keys()
        for name, value in want.items():
            assert torch.equal(state[name], value), name


def test_bf16_moments_are_near_fp32_ones_and_not_the_same() -> None:
    exact, rounded = on_host("fp32", 1)[0][0], on_host("bf16", 1)[0][0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=2e-2)


def _resume(saved_by: str, resumed_by: str, path: str) -> tuple[dict, dict]:
    saved = Lit()
    run = lit.trainer(_strategy("host", saved_by), **_options(3, 1, 0.5) | {"max_steps": 3})
    run.fit(saved, lit.loader())
    run.save_checkpoint(path)
    kept = _state(run, saved)
    states: dict[str, Tensor] = {}

    class Look(lit.pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            states.update(_state(trainer, pl_module))

    options = _options(3, 1, 0.5) | {"max_steps": 4, "callbacks": [Look()]}
    lit.trainer(_strategy(0.5, resumed_by), **options).fit(Lit(), lit.loader(), ckpt_path=path)
    return kept, states


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")]
)
def test_a_checkpoint_holds_fp32_moments_and_resumes_with_either(
    saved_by: str, resumed_by: str, tmp_path: Any
) -> None:
    for kept, state in ranks(2).run(_resume, saved_by, resumed_by, str(tmp_path / "a.ckpt")):
        assert state.keys() == kept.keys()
        for name, value in kept.items():
            assert value.dtype == torch.float32
            # What is taken into bf16 is rounded once; all else is the same.
            rounds = resumed_by == "bf16" and ".exp_avg" in name
            want = value.to(BF16).float() if rounds else value
            assert torch.equal(state[name], want), name
            assert not rounds or saved_by == "fp32" or torch.equal(want, value), name


@pytest.mark.parametrize(
    ("moments", "dtype", "host_bytes", "device_bytes"),
    [("fp32", torch.float32, 12, 10), ("bf16", BF16, 8, 6)],
)
def test_state_takes_as_many_bytes_per_parameter_as_is_planned(
    moments: Any, dtype: torch.dtype, host_bytes: int, device_bytes: int
) -> None:
    state = HostState(Layout.of({"": {"w": 4096}}, 2048), moments=dtype)
    assert state.parameter_bytes == host_bytes
    assert sum(memory.values.nbytes for memory in state._memories) == host_bytes * 4096
    resident = ResidentState({"w": torch.zeros(64, dtype=BF16)}, moments=dtype)._states["w"]
    assert resident.lower.itemsize + resident.m.itemsize + resident.v.itemsize == device_bytes
    planned = job(moments=moments)
    parts = {part.purpose: part for part in host_parts(planned, 1.0)}
    assert parts["weights and moments"].reason.startswith(f"{host_bytes} B x")
    parts = {part.purpose: part for part in gpu_parts(planned, 0.0)[1]}
    assert parts["state that stays"].num_bytes == device_bytes * planned.trained


def _planned(moments: Any) -> tuple[int, int]:
    strategy = _strategy("host", moments)
    lit.trainer(strategy, **_options(3, 1, 0.5) | {"max_steps": 1}).fit(Lit(), lit.loader())
    offloading: Any = strategy.sharded.offloading
    return strategy.plan.host_bytes, offloading.engine.state.host.layout.length


def test_the_plan_counts_4_bytes_less_per_parameter() -> None:
    (fp32, length), (bf16, same) = (ranks(1).run(_planned, m)[0] for m in ("fp32", "bf16"))
    assert length == same
    assert fp32 - bf16 == pytest.approx(4 * length, rel=1e-2)


def test_smaller_moments_are_planned_to_take_less_time() -> None:
    for lanes in ("cpu", "stream", "both"):
        plans = [step_time(job(moments=m, lanes=lanes), H200, 0.5) for m in ("bf16", "fp32")]
        smaller, larger = ((plan.lane_s, plan.optimizer_s) for plan in plans)
        assert smaller < larger
        assert smaller[1] < larger[1]


def test_a_wrong_dtype_of_moments_is_refused_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"zero\.offload\.moments = 'fp16': must be fp32 or bf16"):
        ZeroStrategy(offload=OffloadConfig(moments="fp16"))  # type: ignore[arg-type]
