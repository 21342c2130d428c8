"""A run that hangs ends on every rank, and names the rank that it hangs on."""

import threading
import time
from functools import cache
from typing import Any

import pytest

from tests import forked
from tests.stuck import TIMEOUT_S
from zero_strategy.guards import stacks
from zero_strategy.guards.heartbeat import HUNG_EXIT_CODE, HangWatch
from zero_strategy.guards.verdict import Beat, judge

LATE_S = 3.0
"""How long a busy machine may take beyond the limit, of which every rank's farewell takes most."""


@cache
def ended() -> dict[str, forked.Ended]:
    """How the runs of `tests/stuck.py` ended; one program runs all."""
    return forked.run("tests.stuck")


STUCK = {
    "step": "phase 'training step' of step 2, micro-batch 3",
    "loader": "phase 'loading data' of step 2, micro-batch 2",
    "barrier": "phase 'hooks' of step 3, micro-batch 3",
    "backward": "phase 'backward' of step 2, micro-batch 3",
}


@pytest.mark.parametrize("case", STUCK)
def test_a_stuck_rank_is_named_on_every_rank_with_its_phase_and_its_stack(case: str) -> None:
    run = ended()[case]
    assert run.codes == [HUNG_EXIT_CODE] * 2, run.outputs
    assert all(TIMEOUT_S < seconds < TIMEOUT_S + LATE_S for seconds in run.seconds)
    for rank, output in enumerate(run.outputs):
        assert f"the run hangs on rank 1. Rank {rank} ends with exit code" in output
        assert f"rank 1 made no progress for 2 s in sleep_here, {STUCK[case]}" in output
        assert "rank 0 waits in" in output
        assert "rank 0 made no progress" not in output
        # The innermost calls of the stuck rank's stack.
        assert "rank 1 is here:\n" in output
        assert "in sleep_here\n    time.sleep(FOREVER_S)\n" in output


def test_a_single_process_that_is_stuck_names_itself() -> None:
    run = ended()["alone"]
    assert run.codes == [HUNG_EXIT_CODE]
    assert "the run hangs on rank 0" in run.outputs[0]
    assert "phase 'loading data'" in run.outputs[0]
    assert "time.sleep(FOREVER_S)" in run.outputs[0]
    assert run.seconds[0] < TIMEOUT_S + LATE_S


def test_a_rank_that_was_stopped_from_outside_is_named_by_the_others() -> None:
    run = ended()["stopped"]
    assert run.codes[0] == HUNG_EXIT_CODE
    assert "the run hangs on rank 1" in run.outputs[0]
    assert "rank 1 gives no sign of life" in run.outputs[0]
    assert run.seconds[0] < TIMEOUT_S + 2 * LATE_S


def test_a_slow_rank_that_says_it_works_and_its_forked_child_are_left_alone() -> None:
    run = ended()["working"]
    assert run.codes == [0, 0], run.outputs
    assert "the child ended by itself" in run.outputs[1]
    assert all("still here" in output for output in run.outputs), "the watch has ended too"


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("dying", -9, "ended without a word: it was killed"),
        ("failing", 1, "rank 1 failed with ValueError: broken on one rank"),
    ],
)
def test_a_rank_does_not_stay_when_another_one_died_or_failed(
    case: str, code: int, told: str
) -> None:
    run = ended()[case]
    assert run.codes == [HUNG_EXIT_CODE, code]
    assert "the run was left by rank 1. Rank 0 ends" in run.outputs[0]
    assert told in run.outputs[0]
    assert run.seconds[0] < 10


def test_a_second_signal_ends_zs_train_at_once_but_not_one_that_a_launcher_passes_on() -> None:
    run = ended()["signalled"]
    assert run.codes == [128 + 10]
    assert "the first one is waited for" in run.outputs[0]
    assert "a second signal: ends at once" in run.outputs[0]


def beat(rank: int, stalled_s: float, place: tuple[int, int, int], **told: Any) -> Beat:
    fields = {"beats": 1, "step": place[0], "phase": "backward", "call": "wait"} | told
    return Beat(rank=rank, stalled_s=stalled_s, place=place, **fields)


def hung_on(*beats: Beat, silent: tuple[int, ...] = ()) -> tuple[int, ...]:
    of_rank = {b.rank: b for b in beats}
    verdict = judge(of_rank, frozenset(silent), timeout_s=10, units=("a", "b"))
    return verdict.ranks if verdict else ()


def test_where_no_wait_is_seen_the_run_hangs_on_the_rank_that_is_furthest_behind() -> None:
    # As on a GPU, where hosts run ahead and then wait for a number.
    ahead, behind = beat(0, 11, (5, 2, 1)), beat(1, 12, (5, 0, 0))
    assert hung_on(ahead, behind) == (1,)
    assert hung_on(ahead, beat(1, 12, (5, 2, 0))) == (1,)
    assert hung_on(ahead, beat(1, 12, (5, 2, 1))) == (0, 1)


def test_ranks_that_wait_for_one_that_gets_on_do_not_end_the_run() -> None:
    assert hung_on(beat(0, 30, (5, 2, 1), waits=True), beat(1, 1, (5, 0, 0))) == ()
    assert hung_on(beat(0, 30, (5, 2, 1)), beat(1, 1, (5, 0, 0))) == ()
    assert hung_on(beat(0, 30, (5, 2, 1), waits=True), beat(1, 9.9, (9, 0, 0))) == ()


def test_a_rank_that_is_over_is_not_waited_for_and_a_silent_one_is_named() -> None:
    waiting = beat(0, 30, (5, 2, 1), waits=True)
    assert hung_on(waiting, beat(1, 0, (5, 0, 0), ended=True)) == (0,)
    assert hung_on(waiting, beat(1, 0, (5, 2, 1)), silent=(1,)) == (1,)
    assert hung_on() == ()


def test_where_all_wait_those_are_named_that_came_least_far() -> None:
    others = [beat(rank, 11, (5, 2, 1), waits=True) for rank in (0, 2, 3)]
    assert hung_on(beat(1, 11, (5, 1, 1), waits=True), *others) == (1,)


def test_time_in_which_the_process_did_not_run_is_no_hang(monkeypatch: Any) -> None:
    watch = HangWatch(2.0, step=lambda: 0, units={})
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watch._measure()
    # As after a suspended job, or a machine that slept.
    clock[0] += 3600
    watch._measure()
    assert watch._stalled_s <= 1.0


def test_a_wait_is_told_from_work_that_a_collective_library_calls() -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        leave.wait(10)

    # The innermost module decides: a writer that torch's checkpoint calls is at work.
    torchs = {"__name__": "torch.distributed.checkpoint", "call": wait}
    exec("def save():\n    call()", torchs)
    thread = threading.Thread(target=torchs["save"], daemon=True)
    thread.start()
    assert inside.wait(10)
    assert thread.ident is not None
    assert not stacks.waits_for_ranks(thread.ident)
    assert "in save" in stacks.stack_text(thread.ident)
    leave.set()
    thread.join()
