"""The systems that can be measured, by the name that results use."""

from __future__ import annotations

_SYSTEMS = "zero_strategy.experiments.benchmarks.systems"

# Name -> "module:function" of `train(workload, watch)`. Imported in the worker alone, so that a
# missing package is the failure of one system.
SYSTEMS = {
    "zero_strategy zero1": f"{_SYSTEMS}.lightning_fit:train_zero1",
    "zero_strategy zero2": f"{_SYSTEMS}.lightning_fit:train_zero2",
    "zero_strategy zero3": f"{_SYSTEMS}.lightning_fit:train_zero3",
    "zero_strategy zero3_offload": f"{_SYSTEMS}.lightning_fit:train_zero3_offload",
    "zero_strategy zero3_offload host": f"{_SYSTEMS}.lightning_fit:train_zero3_host",
    "fsdp2": f"{_SYSTEMS}.fsdp2:train",
    "no offload fsdp2": f"{_SYSTEMS}.fsdp2:train",
    "fsdp2 offload": f"{_SYSTEMS}.fsdp2:train_offload",
    "compute alone": f"{_SYSTEMS}.compute_only:train",
    "deepspeed zero3": f"{_SYSTEMS}.deepspeed_zero3:train",
    "deepspeed zero2 offload": f"{_SYSTEMS}.deepspeed_offload:train_zero2",
    "deepspeed zero3 offload": f"{_SYSTEMS}.deepspeed_offload:train_zero3",
    "deepspeed zero3 params offload": f"{_SYSTEMS}.deepspeed_offload:train_zero3_params",
    "deepspeed superoffload": f"{_SYSTEMS}.deepspeed_offload:train_superoffload",
    "deepspeed zenflow": f"{_SYSTEMS}.deepspeed_offload:train_zenflow",
    "lightning model_parallel": f"{_SYSTEMS}.lightning_fit:train_model_parallel",
}
