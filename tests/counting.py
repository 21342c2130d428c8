"""Count the collectives of a run, as the process group sees them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from zero_strategy.control import control_group

# FSDP2 calls the newer names from torch 2.13 on.
_NEW = "all_gather_single" in dir(dist)
_NAMES = {
    "all_gather_single" if _NEW else "all_gather_into_tensor": "all_gather",
    "reduce_scatter_single" if _NEW else "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
}


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """Counts by kind, of calls on the default group's mesh (the control group is left out)."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in _NAMES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is not control_group():
                counts[_NAMES[name]] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in _NAMES:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
