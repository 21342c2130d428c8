"""The strategy names a user may type, and what each one stands for.

This table is the only home of the names. It is read while `import torch` still runs, so it
imports nothing.
"""

PRESETS: dict[str, dict[str, int | str]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload": "auto"},
    "zero2_offload": {"stage": 2, "offload": "auto"},
    "zero3_offload": {"stage": 3, "offload": "auto"},
    "zero_auto": {"stage": 3, "offload": "auto"},
    "zero3_nvme": {"stage": 3, "offload": "disk"},
}
"""Name -> keyword arguments of `ZeroStrategy`."""

DESCRIPTIONS = {
    1: "ZeRO-1: optimizer state sharded over the ranks",
    2: "ZeRO-2: optimizer state and gradients sharded over the ranks",
    3: "ZeRO-3: optimizer state, gradients and parameters sharded over the ranks",
}
