"""What a benchmark case is."""

from __future__ import annotations

from typing import Protocol, Self

from zero_strategy.experiments.benchmarks.launch import Launcher
from zero_strategy.experiments.benchmarks.result import Findings


class Case(Protocol):
    """One question to measure; a frozen dataclass whose whole numbers `key=value` words can set."""

    def quick(self) -> Self:
        """Return the same case with a tiny model and few steps, for a CPU."""
        ...

    def measure(self, launcher: Launcher) -> Findings:
        """Measure, each system in processes of its own. Must not start CUDA in this process."""
        ...
