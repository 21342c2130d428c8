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
    "fsdp2": f"{_SYSTEMS}.fsdp2:train",
    "deepspeed zero3": f"{_SYSTEMS}.deepspeed_zero3:train",
    "lightning model_parallel": f"{_SYSTEMS}.lightning_fit:train_model_parallel",
}
