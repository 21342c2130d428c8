"""Whether the GPU helps the cores is what the first steps of each mode show."""

import pytest

from zero_strategy.offload.help import SETTLE_STEPS, TRIAL_STEPS, HelpTrial

NUM_TRIED = SETTLE_STEPS + 2 * TRIAL_STEPS


class Machine:
    """Steps that take as long as the lanes need, and now and then much longer."""

    def __init__(self, helped_s: float, alone_s: float) -> None:
        self.now_s, self.trial = 0.0, HelpTrial(lambda: self.now_s)
        self.step_s = {True: helped_s, False: alone_s}
        self.helps = True
        self.num_steps = 0

    def run(self, mode: str, num_steps: int) -> list[bool]:
        ways = []
        for _ in range(num_steps):
            ways.append(self.helps)
            self.num_steps += 1
            self.now_s += self.step_s[self.helps] + (30.0 if self.num_steps % 7 == 4 else 0.0)
            self.helps = self.trial.next_step(mode)
        return ways


@pytest.mark.parametrize(("helped_s", "alone_s", "helps"), [(0.9, 1.0, True), (1.1, 1.0, False)])
def test_the_faster_way_is_kept_whatever_single_steps_do(helped_s, alone_s, helps):
    machine = Machine(helped_s, alone_s)
    tried = machine.run("deferred", NUM_TRIED + 1)
    assert {True, False} <= set(tried)
    assert set(machine.run("deferred", 20)) == {helps}


def test_help_that_changes_nothing_is_not_asked_for():
    machine = Machine(0.995, 1.0)
    machine.run("deferred", NUM_TRIED + 1)
    assert set(machine.run("deferred", 5)) == {False}


def test_each_mode_has_its_own_answer_and_remembers_it():
    machine = Machine(0.9, 1.0)
    machine.run("deferred", NUM_TRIED + 1)
    machine.step_s = {True: 1.5, False: 1.0}
    machine.run("late", NUM_TRIED + 1)
    assert set(machine.run("late", 5)) == {False}
    machine.run("deferred", 1)
    assert set(machine.run("deferred", 5)) == {True}


def test_a_trial_that_another_mode_cut_short_begins_again():
    machine = Machine(0.9, 1.0)
    machine.run("late", SETTLE_STEPS + 2)
    machine.run("deferred", 1)
    machine.step_s = {True: 1.5, False: 1.0}
    machine.run("late", NUM_TRIED + 1)
    assert set(machine.run("late", 5)) == {False}
