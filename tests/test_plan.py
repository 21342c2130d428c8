"""Placement, bytes and seconds of offloaded jobs: properties, and measured runs."""

import dataclasses
import math

import pytest

from zero_strategy.experiments.config import load_config
from zero_strategy.experiments.plan_job import job_of
from zero_strategy.offload.layout import Layout
from zero_strategy.planning.job import (
    NUM_WIRES,
    Activations,
    Job,
    host_layout,
    host_slot_length,
    host_units,
    shares,
)
from zero_strategy.planning.machines import H200
from zero_strategy.planning.offload_plan import (
    choose_placement,
    fits,
    missing_bytes,
    plan_job,
)
from zero_strategy.planning.remedies import host_remedies
from zero_strategy.planning.sizes import ROOT, UnitSize
from zero_strategy.planning.step_time import step_time
from zero_strategy.planning.tiers import gpu_parts, host_parts, total_bytes

GIB = 2**30
# Sizes that divide by nothing.
UNITS = {
    ROOT: UnitSize(trained=70_001, frozen=11),
    **{f"layers.{i}": UnitSize(trained=100_003 + i) for i in range(7)},
}


def job(**changes) -> Job:
    plain = Job(
        units=UNITS,
        zero_stage=3,
        world_size=1,
        num_local_ranks=1,
        grad_dtype="auto",
        lanes="cpu",
        moments="fp32",
        chunk_elements=4096,
        tokens_per_step=4096,
        flops_per_step=8.0 * 770_000 * 4096,
    )
    return dataclasses.replace(plain, **changes)


def with_gpu(num_bytes: int):
    return dataclasses.replace(H200, gpu_bytes=num_bytes)


def measured_job(*words: str, **changes) -> Job:
    """The 3.37B decoder of the measured runs, by the host's cores, in chunks of 16 M."""
    config = load_config("gpt_3.4b.yaml", ["trainer.strategy=zero3_offload", *words])
    return dataclasses.replace(
        job_of(config, H200), **{"lanes": "cpu", "chunk_elements": 16 << 20, **changes}
    )


# Placement.


def test_units_in_host_memory_are_the_last_in_forward_order():
    assert host_units(UNITS, 0.0) == ()
    assert host_units(UNITS, 0.01) == ("layers.6",)
    assert host_units(UNITS, 0.25) == ("layers.5", "layers.6")
    assert host_units(UNITS, 1.0) == tuple(UNITS)


def test_each_share_gives_one_more_unit_to_the_host():
    assert [len(host_units(UNITS, share)) for share in shares(UNITS)] == list(range(9))


@pytest.mark.parametrize("num_units", [0, 1, 3, 7])
def test_the_smallest_share_that_fits_is_chosen(num_units):
    wanted = shares(UNITS)[num_units]
    machine = with_gpu(total_bytes(gpu_parts(job(), wanted)[1]))
    chosen = choose_placement(job(), machine)
    assert fits(job(), machine, chosen)
    assert not any(fits(job(), machine, share) for share in shares(UNITS) if share < chosen)
    assert len(host_units(UNITS, chosen)) <= num_units


def test_all_goes_to_the_host_where_nothing_fits():
    plan = plan_job(job(), with_gpu(1000), choose_placement(job(), with_gpu(1000)))
    assert plan.host_units == tuple(UNITS)
    assert plan.gpu_missing_bytes == plan.gpu_bytes - 1000
    assert not plan.fits


def test_more_in_host_memory_never_needs_more_of_the_gpu():
    held = [total_bytes(gpu_parts(job(), share)[1]) for share in shares(UNITS)[1:]]
    assert held == sorted(held, reverse=True)


# Bytes.


@pytest.mark.parametrize("grad_dtype", ["bf16", "fp32"])
def test_host_bytes_are_those_of_the_engines_chunks(grad_dtype):
    of_engine = Layout.of(
        {
            name: {"a": size.trained // 3, "b": size.trained - size.trained // 3}
            for name, size in UNITS.items()
        },
        4096,
    )
    planned = job(grad_dtype=grad_dtype)
    itemsize = 2 if grad_dtype == "bf16" else 4
    num_chunks = len(of_engine.chunks)
    state, gradients, wires = host_parts(planned, 1.0)
    assert host_layout(planned, 1.0).length == of_engine.length
    assert host_slot_length(planned, 1.0) == of_engine.slot_length
    assert state.num_bytes == 12 * of_engine.length
    slots = num_chunks + min(8, num_chunks // 5)
    assert gradients.num_bytes == itemsize * slots * of_engine.slot_length
    assert wires.num_bytes == 2 * NUM_WIRES * of_engine.slot_length


def test_a_job_without_offload_has_nothing_in_host_memory_and_16_bytes_per_parameter():
    frozen_and_trained = job(micro_batches=2)
    plan = plan_job(frozen_and_trained, H200, None)
    assert (plan.host, plan.host_units, plan.share) == ((), (), None)
    held = {part.purpose: part.num_bytes for part in plan.gpu}
    trained = frozen_and_trained.trained
    states = held["weights"] + held["moments"] + held["gradients"]
    assert states == 16 * trained + 4 * UNITS[ROOT].frozen


def test_state_that_stays_under_offload_has_12_bytes_per_parameter_and_its_gradient():
    plan = plan_job(job(grad_dtype="bf16", micro_batches=2), H200, 0.0)
    held = {part.purpose: part.num_bytes for part in plan.gpu}
    assert held["weights"] + held["state that stays"] == 12 * job().trained
    assert held["gradients"] == 2 * job().trained


def test_gradients_are_exact_unless_bf16_is_asked_for():
    assert job().grad_itemsize == 2
    assert job(micro_batches=2).grad_itemsize == 4
    assert job(world_size=2).grad_itemsize == 4
    assert job(world_size=2, grad_dtype="bf16").grad_itemsize == 2


def test_below_stage_3_all_units_stay_gathered():
    forward = job(world_size=2, activations=Activations(kept_bytes=GIB))
    held = {
        stage: total_bytes(gpu_parts(dataclasses.replace(forward, zero_stage=stage), None)[1])
        for stage in (1, 2, 3)
    }
    assert held[1] == held[2] > held[3]


def test_only_stage_1_sums_whole_gradients():
    sums = {
        stage: {
            part.purpose: part.num_bytes
            for part in plan_job(
                job(zero_stage=stage, world_size=2, micro_batches=2), H200, None
            ).gpu
        }.get("sums", 0)
        for stage in (1, 2, 3)
    }
    assert sums == {1: 4 * 2 * job().trained, 2: 0, 3: 0}


def test_the_fullest_moment_is_planned():
    wide = Activations(kept_bytes=10 * GIB, unit_bytes=GIB, loss_bytes=2 * GIB)
    assert plan_job(job(activations=wide), H200, None).peak_at == "the loss"
    deep = dataclasses.replace(wide, unit_bytes=3 * GIB)
    assert plan_job(job(activations=deep), H200, None).peak_at == "the first unit's backward"
    assert plan_job(job(), H200, None).peak_at in (
        "the last unit's backward",
        "the root's gradients",
    )


def test_gradients_of_what_stays_on_the_gpu_leave_it_at_no_moment():
    wide = dataclasses.replace(UNITS[ROOT], trained=5_000_000)
    root_stays = job(units={**UNITS, ROOT: wide})
    moment, parts = gpu_parts(root_stays, 0.1)
    assert moment == "the root's gradients"
    assert "gradients leaving" not in {part.purpose for part in parts}
    assert "gradients leaving" in {part.purpose for part in gpu_parts(root_stays, 1.0)[1]}


def test_each_number_has_its_reason():
    plan = plan_job(job(micro_batches=2, world_size=2, zero_stage=1, lanes="both"), H200, 0.5)
    assert all(part.reason for part in (*plan.gpu, *plan.host))
    assert all(reason for _, _, reason in plan.time.parts)


def test_ranks_of_one_host_share_its_memory():
    alone, eight = job(world_size=8), job(world_size=8, num_local_ranks=8)
    little = dataclasses.replace(H200, host_bytes=total_bytes(host_parts(alone, 1.0)))
    assert missing_bytes(alone, little, 1.0)[1] == 0
    assert missing_bytes(eight, little, 1.0)[1] > 0


def test_without_a_gpu_both_tiers_are_one_memory():
    cpu = dataclasses.replace(H200, num_gpus=0, gpu_bytes=0)
    needed = plan_job(job(), cpu, 1.0)
    cpu = dataclasses.replace(cpu, host_bytes=needed.gpu_bytes + needed.host_bytes - 1)
    assert missing_bytes(job(), cpu, 1.0) == (0, 1)


# Seconds.


def test_what_stays_on_the_gpu_exposes_nothing():
    time = step_time(job(), H200, 0.0)
    assert (time.exposed_s, time.exposed_clipped_s, time.lane_s) == (0.0, 0.0, 0.0)
    assert time.compute_s == job().flops_per_step / H200.matmul_flops_per_s


def test_tokens_enough_hide_all_passes_but_the_last():
    exposed = []
    for tokens in (1 << 12, 1 << 16, 1 << 20):
        tokens_job = measured_job(tokens_per_step=tokens, flops_per_step=8.0 * 3.37e9 * tokens)
        time = step_time(tokens_job, H200, 1.0)
        exposed.append(time.exposed_s / time.compute_s)
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[-1] < 0.01 < exposed[0]


def test_a_step_takes_no_less_than_any_of_its_queues():
    for lanes in ("cpu", "stream", "both"):
        time = step_time(measured_job(lanes=lanes), H200, 1.0)
        assert time.step_s >= max(time.compute_s, time.lane_s, time.down_s, time.up_s) * 0.999


@pytest.mark.parametrize("rate", ["deferred_params_per_s", "duplex_bytes_per_s"])
def test_a_slower_machine_never_makes_a_step_faster(rate):
    times = []
    for factor in (1.0, 0.5, 0.1):
        slower = dataclasses.replace(H200, **{rate: factor * getattr(H200, rate)})
        times.append(step_time(measured_job(), slower, 1.0).step_s)
    assert times == sorted(times)


def test_only_the_last_backward_and_the_first_forward_hide_passes():
    # So micro-batches in one step do not hide more, and one large one does.
    once = step_time(measured_job("data.batch_size=1"), H200, 1.0)
    words = ("data.batch_size=1", "trainer.accumulate=4")
    often = step_time(measured_job(*words, grad_dtype="bf16"), H200, 1.0)
    large = step_time(measured_job("data.batch_size=4"), H200, 1.0)
    assert often.exposed_s == pytest.approx(once.exposed_s, rel=0.05)
    assert large.exposed_s < 0.5 * often.exposed_s


def test_the_norm_is_waited_for_only_where_gradients_are_clipped():
    time = step_time(measured_job(clips=False), H200, 1.0)
    assert time.exposed_clipped_s == time.exposed_s
    assert step_time(measured_job(clips=True), H200, 1.0).exposed_clipped_s > time.exposed_s


@pytest.mark.parametrize(
    ("batch_size", "share", "lanes", "measured_s"),
    [
        (4, None, "cpu", 0.925),
        (4, 1.0, "cpu", 1.006),
        (4, 1.0, "both", 0.955),
    ],
)
def test_measured_steps_are_predicted_within_a_twelfth(batch_size, share, lanes, measured_s):
    # One H200, 3.37B parameters, rows of 4096 tokens, no step clipped. The first gave the rate of
    # products; the others are predictions from the rates of passes and copies alone.
    planned = measured_job(f"data.batch_size={batch_size}", lanes=lanes)
    assert step_time(planned, H200, share).step_s == pytest.approx(measured_s, rel=1 / 12)


def test_a_measured_peak_is_predicted_within_a_fiftieth():
    # `train_step_3b_h200.json`: 52.861 GiB.
    plan = plan_job(measured_job("trainer.strategy=zero3"), H200, None)
    assert plan.gpu_bytes / GIB == pytest.approx(52.861, rel=1 / 50)


# Remedies.


@pytest.fixture
def short():
    """A job whose gradients are sums, all in host memory, of which a part is missing."""
    summed = measured_job("data.batch_size=2", "trainer.accumulate=2")
    return summed, total_bytes(host_parts(summed, 1.0)) - 3 * GIB


def test_every_kind_of_remedy_is_found_with_what_it_saves(short):
    summed, available = short
    found = {r.action: r for r in host_remedies(summed, H200, 1.0, available)}
    share, bf16, single, nodes = found.values()
    assert share.action.startswith("offload 9")
    assert bf16.action.startswith('zero.offload.grad_dtype = "bf16"')
    assert single.action.startswith("accumulate=1")
    assert nodes.action == "2 times as many nodes"
    needed = total_bytes(host_parts(summed, 1.0))
    rounded = dataclasses.replace(summed, grad_dtype="bf16")
    assert bf16.saves_bytes == single.saves_bytes == needed - total_bytes(host_parts(rounded, 1.0))
    assert share.saves_bytes >= 3 * GIB
    assert nodes.saves_bytes >= 0.4 * needed


def test_a_share_that_the_gpu_has_no_room_for_is_no_remedy(short):
    summed, available = short
    full = with_gpu(total_bytes(gpu_parts(summed, 1.0)[1]))
    found = host_remedies(summed, full, 1.0, available)
    assert not [r for r in found if r.action.startswith("offload")]


def test_exact_gradients_of_one_micro_batch_have_no_cheaper_dtype():
    found = host_remedies(measured_job(), H200, 1.0, GIB)
    assert not [r for r in found if "grad_dtype" in r.action or "accumulate" in r.action]


def test_more_nodes_cost_their_gpus_time(short):
    summed, available = short
    *_, nodes = host_remedies(summed, H200, 1.0, available)
    assert nodes.cost_s > 0.5 * step_time(summed, H200, 1.0).compute_s
    assert math.isfinite(nodes.cost_s)
