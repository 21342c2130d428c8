"""What the offload engine counts adds up, and waits are those of a step's forward alone."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import lit
from tests.ranks import ranks
from tests.test_offload_engine import Run
from zero_strategy import OffloadConfig, ZeroStrategy
from zero_strategy.offload.chunk import Agenda
from zero_strategy.offload.figures import Meter, OffloadFigures
from zero_strategy.offload.lanes import CpuLane

STEPS = 5


def _strategy(**config: Any) -> ZeroStrategy:
    return ZeroStrategy(stage=3, offload=OffloadConfig(threads=1, **config))


def _trained(
    clip: float | None, placement: Any, grad_dtype: str
) -> tuple[OffloadFigures, OffloadFigures, dict[str, int]]:
    """Two readings after a run, and what its layout says."""
    strategy = _strategy(chunk_elements=512, placement=placement, grad_dtype=grad_dtype)
    lit.fit(strategy, steps=STEPS, gradient_clip_val=clip, precision="bf16-mixed")
    engine = strategy.sharded.offloading.engine
    layout = engine.state.host.layout
    held = {
        "elements": sum(layout.sizes.values()),
        "chunks": len(layout.chunks),
        "redone": engine.num_redone,
    }
    first, second = (strategy.take_offload_figures() for _ in range(2))
    return first, second, held


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("placement", ["host", 0.4])
def test_bytes_and_passes_are_what_the_layout_says(
    placement: Any, clip: float | None, world_size: int
) -> None:
    grad_dtype, grad_bytes = ("bf16", 2) if world_size == 1 else ("fp32", 4)
    outcomes = ranks(world_size).run(_trained, clip, placement, grad_dtype)
    for figures, again, held in outcomes:
        engine, (elements, chunks) = figures.engine, (held["elements"], held["chunks"])
        assert engine.state_bytes == 12 * elements
        assert (figures.host_share == 1) == (placement == "host")
        # The CPU lane alone; gradients go to the host, weights of every preview come back.
        kinds = {kind: n for (lane, kind), n in engine.passes.items() if lane == "cpu"}
        assert engine.num_passes("cpu") == sum(engine.passes.values())
        both = kinds.get("commit and preview", 0)
        assert both + kinds.get("commit", 0) == STEPS * chunks
        assert both + kinds.get("preview", 0) == STEPS * chunks
        assert engine.num_redone == held["redone"]
        assert engine.down_bytes == STEPS * grad_bytes * elements
        redone = engine.up_bytes - STEPS * 2 * elements
        assert 0 <= redone <= 2 * 512 * engine.num_redone
        assert bool(redone) == bool(engine.num_redone)
        assert not engine.num_redone or clip
        assert 1 <= engine.max_waiting <= chunks
        # A reading starts anew.
        assert again.engine.down_bytes == again.engine.up_bytes == again.engine.max_waiting == 0
        assert not again.engine.passes
        assert again.engine.slot_wait_ms == 0
        assert again.engine.state_bytes == engine.state_bytes


def test_a_chunk_that_is_noted_twice_waits_once() -> None:
    meter, agenda = Meter(), Agenda()
    chunks: list[Any] = [SimpleNamespace(index=index) for index in range(3)]
    agenda.arrived = [(chunk.index, chunk) for chunk in chunks]
    agenda.urgent = [(chunk.index, chunk) for chunk in chunks[1:]]
    meter.chose(chunks[0], agenda)
    assert meter.take(0).max_waiting == 3
    assert meter.take(0).max_waiting == 0


def test_without_offload_there_are_no_figures() -> None:
    assert ranks(1).run(_without) == [None]


def _without() -> OffloadFigures | None:
    strategy = ZeroStrategy(stage=3)
    lit.fit(strategy, steps=1)
    return strategy.take_offload_figures()


# Waits.

PASS_S = 0.05


class _Reading(lit.Lit):
    """Reads the figures before every step."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[OffloadFigures] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.figures.append(self.trainer.strategy.take_offload_figures())


def _read(*, validated: bool) -> list[OffloadFigures]:
    """Train with a lane that is slower than the model, and read before every step."""
    run_pass = CpuLane.run

    def run_late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(PASS_S)
        return run_pass(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuLane, "run", run_late)
        module = _Reading()
        options: dict[str, Any] = {"limit_val_batches": 0}
        if validated:
            options = {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
        run = lit.trainer(_strategy(), max_steps=STEPS, precision="bf16-mixed", **options)
        run.fit(module, lit.loader(), lit.loader())
    return module.figures


@pytest.mark.parametrize("world_size", [1, 2])
def test_waits_are_measured_from_the_first_reading_on(world_size: int) -> None:
    for readings in ranks(world_size).run(_read, validated=False):
        unread, first, second, *others = (r.exposed_ms for r in readings)
        assert unread is None
        # The first step waits for nothing, the second for passes over all chunks: until it is
        # known what moves to the device, they begin at the end of a step.
        assert first is not None
        assert first < PASS_S * 1e3
        assert second is not None
        assert second > 2 * PASS_S * 1e3
        assert None not in others


def test_a_backward_that_waits_for_room_says_so() -> None:
    (readings,) = ranks(1).run(_read, validated=False)
    assert readings[1].engine.slot_wait_ms == 0
    assert sum(r.engine.slot_wait_ms for r in readings) > PASS_S * 1e3


def test_waits_of_a_validation_are_not_the_steps() -> None:
    (readings,) = ranks(1).run(_read, validated=True)
    assert all(r.exposed_ms is not None and r.exposed_ms < PASS_S * 1e3 for r in readings[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_that_is_streamed_counts_both_ways() -> None:
    run = Run(None, 1, torch.bfloat16, device="cuda", lanes="stream")
    for _ in range(STEPS):
        run.step()
    run.engine.close()
    engine = run.engine.take_figures()
    commits = sum(n for (_, kind), n in engine.passes.items() if "commit" in kind)
    assert engine.num_passes("stream") == sum(engine.passes.values()) > commits
    # A commit brings its chunk's state back; one parameter has no gradient in some steps.
    assert (STEPS - 2) * engine.state_bytes < engine.down_bytes < (STEPS + 1) * engine.state_bytes
    assert engine.up_bytes > engine.down_bytes
