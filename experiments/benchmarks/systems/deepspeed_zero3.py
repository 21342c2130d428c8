"""DeepSpeed's ZeRO stage 3 in its own engine, with torch's fused AdamW.

The optimizer is torch's so that no op has to be compiled, and the arithmetic is everybody's.
"""

from __future__ import annotations

import importlib
from typing import Any

from zero_strategy.experiments.benchmarks.watch import Watch
from zero_strategy.experiments.benchmarks.workload import (
    TokenBatches,
    Workload,
    build_model,
    loss_of,
    make_optimizer,
    rank_device,
)


def train(workload: Workload, watch: Watch) -> None:
    """Train the workload.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    device = rank_device()
    model = build_model(workload, device)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters(), workload.lr),
        config=engine_config(workload),
    )
    for index, host_rows in enumerate(TokenBatches(workload)):
        watch.begin(index)
        loss = loss_of(engine, host_rows.to(device, non_blocking=True))
        watch.saw(loss)
        engine.backward(loss)
        engine.step()


def engine_config(workload: Workload) -> dict[str, Any]:
    """Return the engine's configuration: bf16 compute, fp32 masters and optimizer state."""
    return {
        "train_micro_batch_size_per_gpu": workload.batch_size,
        "gradient_accumulation_steps": workload.accumulate,
        "gradient_clipping": workload.max_norm,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
