"""Count the collectives of a run, as the process group sees them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

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


class _Reads(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts[func.overloadpacket._qualified_op_name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def scalar_reads() -> Iterator[Counter[str]]:
    """Counts `aten::_local_scalar_dense`, as which reading a number of a tensor shows everywhere.

    On an accelerator the host waits for each of them.
    """
    counts: Counter[str] = Counter()
    reads: Counter[str] = Counter()
    with _Reads(counts):
        try:
            yield reads
        finally:
            reads["reads"] = counts["aten::_local_scalar_dense"]
