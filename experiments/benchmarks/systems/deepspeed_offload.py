"""DeepSpeed's offload in its own engine: its CPU Adam, compiled at the first start."""

from __future__ import annotations

import importlib
from typing import Any

from zero_strategy.experiments.benchmarks.systems.deepspeed_zero3 import engine_config
from zero_strategy.experiments.benchmarks.watch import Watch
from zero_strategy.experiments.benchmarks.workload import (
    BETAS,
    WEIGHT_DECAY,
    TokenBatches,
    Workload,
    build_model,
    loss_of,
    rank_device,
)

_PINNED = {"device": "cpu", "pin_memory": True}


def train_zero2(workload: Workload, watch: Watch) -> None:
    """Train with stage 2 and the optimizer offloaded."""
    _train(workload, watch, {"stage": 2, "offload_optimizer": _PINNED})


def train_zero3(workload: Workload, watch: Watch) -> None:
    """Train with stage 3 and the optimizer offloaded."""
    _train(workload, watch, {"stage": 3, "offload_optimizer": _PINNED})


def train_zero3_params(workload: Workload, watch: Watch) -> None:
    """Train with stage 3, optimizer and parameters offloaded."""
    _train(workload, watch, {"stage": 3, "offload_optimizer": _PINNED, "offload_param": _PINNED})


def train_superoffload(workload: Workload, watch: Watch) -> None:
    """Train with SuperOffload, whose worker takes nine tenths of the cores."""
    superoffload = {**_PINNED, "super_offload": True, "cpuadam_cores_perc": 0.9}
    _train(workload, watch, {"stage": 3, "offload_optimizer": superoffload})


def train_zenflow(workload: Workload, watch: Watch) -> None:
    """Train with ZenFlow, which steps the largest gradients at once and the others later."""
    zenflow = {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    _train(workload, watch, {"stage": 2, "offload_optimizer": _PINNED, "zenflow": zenflow})


def _train(workload: Workload, watch: Watch, zero: dict[str, Any]) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    device = rank_device()
    model = build_model(workload, device)
    config = engine_config(workload)
    config["zero_optimization"] |= zero
    settings = {"lr": workload.lr, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}
    config["optimizer"] = {"type": "AdamW", "params": settings}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=model.parameters()
    )
    for index, host_rows in enumerate(TokenBatches(workload)):
        watch.begin(index)
        # What the configuration set once, for every step that follows.
        engine.optimizer.clip_grad = workload.max_norm_at(index)
        loss = loss_of(engine, host_rows.to(device, non_blocking=True))
        watch.saw(loss)
        engine.backward(loss)
        engine.step()
