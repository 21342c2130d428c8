"""In which way steps are taken is what the first of them show."""

import pytest

from zero_strategy.offload.ways import SETTLE_STEPS, TRIAL_STEPS, Way, Ways, plain_way

ALONE, HELPED, STAGED = Way("deferred", False), Way("deferred", True), Way("staged", True)
NUM_TRIED = SETTLE_STEPS + 3 * TRIAL_STEPS


class Machine:
    """Steps that take as long as their way needs, and now and then much longer."""

    def __init__(self, seconds: dict[Way, float], *, can_help: bool = True) -> None:
        self.now_s = 0.0
        self.ways = Ways(can_help=can_help, tries=True, clock=lambda: self.now_s)
        self.seconds = seconds
        self.way = plain_way(clips=False, helps=False)
        self.num_steps = 0

    def run(self, num_steps: int, *, clips: bool = False) -> list[Way]:
        taken = []
        for _ in range(num_steps):
            taken.append(self.way)
            self.num_steps += 1
            self.now_s += self.seconds.get(self.way, 2.0)
            self.now_s += 30.0 if self.num_steps % 7 == 4 else 0.0
            self.way = self.ways.next_step(clips=clips)
        return taken


@pytest.mark.parametrize("fastest", [ALONE, HELPED, STAGED])
def test_the_fastest_way_is_kept_whatever_single_steps_do(fastest):
    machine = Machine({ALONE: 1.0, HELPED: 1.0, STAGED: 1.0} | {fastest: 0.9})
    tried = machine.run(NUM_TRIED + 1)
    assert set(tried) == {ALONE, HELPED, STAGED}
    assert set(machine.run(20)) == {fastest}
    assert machine.ways.chosen == {False: fastest}


def test_another_way_that_changes_nothing_is_not_kept():
    machine = Machine({ALONE: 1.0, HELPED: 0.995, STAGED: 0.995})
    machine.run(NUM_TRIED + 1)
    assert set(machine.run(5)) == {ALONE}


def test_steps_that_are_clipped_have_their_own_answer_and_it_is_remembered():
    late = Way("late", True)
    machine = Machine({ALONE: 1.0, HELPED: 0.9, STAGED: 1.5, Way("late", False): 1.3, late: 1.1})
    machine.run(NUM_TRIED + 1)
    machine.run(NUM_TRIED + 1, clips=True)
    assert set(machine.run(5, clips=True)) == {late}
    machine.run(1)
    assert set(machine.run(5)) == {HELPED}


def test_a_trial_that_is_cut_short_begins_again():
    machine = Machine({ALONE: 1.0, HELPED: 0.9, STAGED: 1.5, Way("late", False): 1.3})
    machine.run(SETTLE_STEPS + 2, clips=True)
    machine.run(1)
    machine.seconds = {Way("late", False): 1.0, Way("late", True): 1.5, STAGED: 1.5}
    machine.run(NUM_TRIED + 1, clips=True)
    assert set(machine.run(5, clips=True)) == {Way("late", False)}


def test_without_lanes_that_help_none_is_asked():
    machine = Machine({ALONE: 1.0, Way("staged", False): 0.8}, can_help=False)
    tried = machine.run(SETTLE_STEPS + 2 * TRIAL_STEPS + 1)
    assert set(tried) == {ALONE, Way("staged", False)}
    assert set(machine.run(5)) == {Way("staged", False)}


def test_what_is_not_tried_is_plain_with_all_the_help_there_is():
    ways = Ways(can_help=True, tries=False)
    assert ways.next_step(clips=False) == HELPED
    assert ways.next_step(clips=True) == Way("late", True)
