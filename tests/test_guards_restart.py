"""A run that loses a rank under torchrun starts again, and goes on where it was."""

import pytest

from zero_strategy.experiments.benchmarks import faults_restart
from zero_strategy.guards.restarts import check_restarts


def test_a_run_whose_rank_is_killed_goes_on_without_a_sample_repeated_or_lost() -> None:
    found = faults_restart.run(1)
    assert found["recovered"] == found["cases"] == 1
    assert found["slowest_s"] < 20


def test_restarts_over_one_store_are_refused_with_the_launch_that_works() -> None:
    restarting = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(ValueError, match=r"^torchrun --max-restarts = 3: must come with") as error:
        check_restarts(restarting)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in str(error.value)


def test_a_start_that_can_be_repeated_or_is_not_to_be_goes_on() -> None:
    # What torchrun sets under TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without restarts, or nothing.
    check_restarts({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    check_restarts({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    check_restarts({})
