"""Train what does not fit: ZeRO sharding and offload as a PyTorch Lightning strategy.

Importing this package registers the strategy names with Lightning and loads nothing heavy;
the names below are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_strategy.autoload import activate

if TYPE_CHECKING:
    from zero_strategy.checkpoint.export import load_state_dict
    from zero_strategy.config import GuardConfig, OffloadConfig, SaveConfig
    from zero_strategy.ema import ShardedEMA
    from zero_strategy.monitor import Monitor
    from zero_strategy.strategy import ZeroStrategy

__version__ = "0.1.0.dev0"
__all__ = [
    "GuardConfig",
    "Monitor",
    "OffloadConfig",
    "SaveConfig",
    "ShardedEMA",
    "ZeroStrategy",
    "load_state_dict",
]

_HOMES = {
    "GuardConfig": "zero_strategy.config",
    "Monitor": "zero_strategy.monitor",
    "OffloadConfig": "zero_strategy.config",
    "SaveConfig": "zero_strategy.config",
    "ShardedEMA": "zero_strategy.ema",
    "ZeroStrategy": "zero_strategy.strategy",
    "load_state_dict": "zero_strategy.checkpoint.export",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zero_strategy' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


activate()
