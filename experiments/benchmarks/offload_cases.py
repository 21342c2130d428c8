"""The cases of `zs bench` whose optimizer state lies off the GPU."""

from __future__ import annotations

from typing import Any

from zero_strategy.experiments.benchmarks.offload_step import OffloadStep
from zero_strategy.experiments.benchmarks.train_step import TrainStep

HOST = "zero_strategy zero3_offload host"
AS_IS = "zero_strategy zero3_offload"
NO_OFFLOAD = "no offload fsdp2"
FSDP2 = "fsdp2 offload"
ALONE = "compute alone"
# The fastest two of DeepSpeed's own ways at 3.37B, then its two that overlap.
DEEPSPEED = ("deepspeed zero2 offload", "deepspeed zero3 params offload")
DEEPSPEED_OVERLAPPED = ("deepspeed superoffload", "deepspeed zenflow")

_KINDS = {
    "deepspeed": "deepspeed",
    "fsdp2 offload": FSDP2,
    "no offload": NO_OFFLOAD,
    "compute alone": ALONE,
}


def offload_cases() -> dict[str, OffloadStep]:
    """Return the cases by name."""
    return {
        "offload_3b_16k": _case(
            "gpt_3.4b.yaml",
            (HOST, NO_OFFLOAD, FSDP2, *DEEPSPEED, *DEEPSPEED_OVERLAPPED),
            batch_size=4,
            timeout_s=180,
            clipped_steps=10,
        ),
        "offload_3b_4k": _case(
            "gpt_3.4b.yaml",
            (HOST, NO_OFFLOAD, FSDP2, *DEEPSPEED),
            batch_size=1,
            timeout_s=180,
            clipped_steps=10,
        ),
        "offload_7b_8k": _case(
            "gpt_6.7b.yaml",
            (AS_IS, NO_OFFLOAD, FSDP2),
            batch_size=2,
            timeout_s=200,
            clipped_steps=6,
        ),
        "offload_15b_16k": _case(
            "gpt_15b.yaml",
            (AS_IS,),
            batch_size=4,
            timeout_s=300,
            clipped_steps=6,
            limits=(ALONE,),
            rival_steps=4,
        ),
    }


def _case(
    config: str,
    systems: tuple[str, ...],
    *,
    batch_size: int,
    timeout_s: int,
    clipped_steps: int,
    **options: Any,
) -> OffloadStep:
    shape = TrainStep(
        config=config,
        systems=systems,
        batch_size=batch_size,
        seq_len=4096,
        rounds=1,
        # The first ones of each regime are taken in different ways.
        warmup_steps=24,
        steps=10,
        timeout_s=timeout_s,
    )
    settings: dict[str, Any] = {"settle_steps": 24, "traced_steps": 2, "rival_steps": 3, **options}
    return OffloadStep(shape=shape, kinds=_KINDS, clipped_steps=clipped_steps, **settings)
