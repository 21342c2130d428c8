"""The phase clocks: every moment counted once, and no waiting for the device."""

import time
from typing import ClassVar

import pytest
import torch

from zero_strategy.telemetry.clock import PHASES, CudaClock, HostClock, clock_for


def test_phases_add_up_to_the_wall_time_over_micro_batches():
    clock = HostClock()
    started = time.perf_counter()
    clock.enter("data")
    for _ in range(3):
        for phase, seconds in zip(PHASES, (0.001, 0.004, 0.008, 0.002), strict=True):
            clock.enter(phase)
            time.sleep(seconds)
    times = clock.take()
    wall_ms = (time.perf_counter() - started) * 1e3
    # The host clock is read once per change of phase: nothing falls between phases.
    assert sum(times.values()) == pytest.approx(wall_ms, rel=0.02, abs=0.5)
    assert times["backward"] >= 24
    assert times["forward"] >= 12


def test_time_outside_phases_is_not_counted():
    clock = HostClock()
    clock.enter("forward")
    clock.enter(None)
    time.sleep(0.02)
    clock.enter("forward")
    assert sum(clock.take().values()) < 10


def test_take_starts_anew_within_the_phase_that_runs():
    clock = HostClock()
    clock.enter("forward")
    time.sleep(0.01)
    assert clock.take()["forward"] >= 10
    time.sleep(0.005)
    second = clock.take()["forward"]
    assert 5 <= second < 10


class FakeEvent:
    """An event of a device that is `device_ms` far, behind a host that queued `queued_ms`."""

    queued_ms: ClassVar[float] = 0.0
    device_ms: ClassVar[float] = 0.0
    syncs: ClassVar[int] = 0
    made: ClassVar[int] = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at_ms = FakeEvent.queued_ms

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.device_ms

    def synchronize(self) -> None:
        FakeEvent.syncs += 1
        FakeEvent.device_ms = max(FakeEvent.device_ms, self.at_ms)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query(), "the device has not come to the start"
        assert end.query(), "the device has not come to the end"
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    for name in ("queued_ms", "device_ms", "syncs", "made"):
        monkeypatch.setattr(FakeEvent, name, 0)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return FakeEvent


def run_steps(clock: CudaClock, device: type[FakeEvent], steps: int) -> None:
    for _ in range(steps):
        for phase, ms in zip(PHASES, (1, 30, 60, 9), strict=True):
            clock.enter(phase)
            device.queued_ms += ms


def test_device_phases_are_counted_without_a_sync_until_taken(device):
    clock = CudaClock()
    run_steps(clock, device, 5)
    assert device.syncs == 0
    assert clock.take() == {"data": 5, "forward": 150, "backward": 300, "optimizer": 45}
    assert device.syncs == 1


def test_finished_events_are_used_again(device):
    clock = CudaClock()
    for _ in range(100):
        run_steps(clock, device, 1)
        device.device_ms = device.queued_ms - 50
    assert device.made < 12
    assert sum(clock.take().values()) == 100 * 100


def test_device_time_outside_phases_is_not_counted(device):
    clock = CudaClock()
    clock.enter("forward")
    device.queued_ms = 10
    clock.enter(None)
    device.queued_ms = 500
    clock.enter("forward")
    device.queued_ms = 512
    assert clock.take()["forward"] == 22


def test_the_host_clock_serves_the_cpu():
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 0)), CudaClock)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_see_the_work_of_a_gpu_and_not_its_queueing():
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    square @ square
    torch.cuda.synchronize()
    clock = CudaClock()
    torch.cuda.set_sync_debug_mode("error")
    try:
        clock.enter("forward")
        for _ in range(20):
            square @ square
        clock.enter("backward")
        for _ in range(40):
            square @ square
        clock.enter("data")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    times = clock.take()
    assert times["forward"] > 1
    # Same products twice as often; clocks of a GPU vary by some percent.
    assert times["backward"] == pytest.approx(2 * times["forward"], rel=0.3)
