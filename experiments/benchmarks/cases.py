"""The cases that `zs bench` knows, with the numbers they are measured by."""

from __future__ import annotations

from typing import Any

from zero_strategy.experiments.benchmarks.case import Case

NAMES = (
    "train_step_3b",
    "train_step_small",
    "host_syncs",
    "validate_then_fit_nccl",
    "adam_cpu",
    "checkpoint_faults",
    "checkpoint_speed",
    "offload_3b_16k",
    "offload_3b_4k",
    "offload_7b_8k",
    "offload_15b_16k",
)

OURS = "zero_strategy zero3"


def find_case(name: str) -> Case:
    """Return a case by its name. Imports what the case needs."""
    from zero_strategy.experiments.benchmarks.adam_cpu import AdamCpu
    from zero_strategy.experiments.benchmarks.adam_systems import SYSTEMS
    from zero_strategy.experiments.benchmarks.checkpoint_faults import CheckpointFaults
    from zero_strategy.experiments.benchmarks.checkpoint_speed import CheckpointSpeed
    from zero_strategy.experiments.benchmarks.host_syncs import HostSyncCase
    from zero_strategy.experiments.benchmarks.offload_cases import offload_cases
    from zero_strategy.experiments.benchmarks.train_step import TrainStep
    from zero_strategy.experiments.benchmarks.validate_then_fit import ValidateThenFit

    # Small enough that launching kernels takes about as long as running them.
    small: dict[str, Any] = {"config": "gpt_0.13b.yaml", "batch_size": 8, "seq_len": 1024}
    train_step_small = TrainStep(
        **small,
        systems=(OURS, "fsdp2", "deepspeed zero3"),
        rounds=10,
        warmup_steps=15,
        steps=20,
        timeout_s=360,
        in_turns=True,
        processes=3,
    )
    cases: dict[str, Case] = {
        "train_step_3b": TrainStep(
            config="gpt_3.4b.yaml",
            systems=(OURS, "fsdp2"),
            batch_size=4,
            seq_len=4096,
            rounds=2,
            warmup_steps=5,
            steps=12,
            timeout_s=120,
        ),
        "train_step_small": train_step_small,
        "host_syncs": HostSyncCase(
            **small,
            systems=(OURS, "fsdp2", "lightning model_parallel"),
            accumulate=2,
            warmup_steps=4,
            steps=4,
            timeout_s=80,
        ),
        "validate_then_fit_nccl": ValidateThenFit(shape=train_step_small, timeout_s=60),
        "adam_cpu": AdamCpu(
            systems=tuple(SYSTEMS),
            num_params=1 << 28,
            repeats=5,
            timeout_s=120,
            build_timeout_s=300,
        ),
        "checkpoint_faults": CheckpointFaults(),
        "checkpoint_speed": CheckpointSpeed(),
        **offload_cases(),
    }
    return cases[name]
