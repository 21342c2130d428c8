"""What compute had to wait for: communication, and weights that are offloaded.

A gather stalls the forward or backward of its unit from the moment the unit is reached until its
parameters are there; marks are set right before and right after FSDP2's own hooks. A reduction
runs beside the backward of earlier layers, on an accelerator; what shows is the time between the
last reduction's start and the end of the backward. On the CPU every reduction blocks and shows.

Marks are host times on the CPU and stream events on an accelerator, where nothing waits for them
until they are read.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

# The name from torch 2.13 on.
_REDUCE_SCATTER = (
    "reduce_scatter_single" if "reduce_scatter_single" in dir(dist) else "reduce_scatter_tensor"
)


class _HostMark:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def ms_until(self, end: "_HostMark") -> float:
        return (end._at - self._at) * 1e3


class _StreamMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        # The compute stream, also when called from code that runs on a communication stream.
        self._event.record(torch.cuda.default_stream())

    def ms_until(self, end: "_StreamMark") -> float:
        end._event.synchronize()
        return self._event.elapsed_time(end._event)


@final
class Stalls:
    """Adds up stalls of one kind between two readings. Measures from the first reading on.

    Args:
        on_cpu: whether tensors lie on the CPU.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._mark: Callable[[], Any] = _HostMark if on_cpu else _StreamMark
        self._armed = False
        self._stalls: list[tuple[Any, Any]] = []

    def begin(self) -> Any:
        """Return a mark for `end`; None while nothing is measured. No host sync."""
        return self._mark() if self._armed else None

    def end(self, start: Any) -> None:
        """Count the time since a mark, unless it is None. No host sync."""
        if start is not None:
            self._stalls.append((start, self._mark()))

    def take_ms(self) -> float | None:
        """Milliseconds of stall since the last reading; None at the first.

        Cost: on an accelerator waits for the last mark.
        """
        if not self._armed:
            self._armed = True
            return None
        stalls, self._stalls = self._stalls, []
        return sum(start.ms_until(end) for start, end in stalls)


@final
class StallClock:
    """The stalls that collectives cause.

    Args:
        units: the sharded modules.
        on_cpu: whether tensors lie on the CPU.
    """

    def __init__(self, units: Sequence[FSDPModule], *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._stalls = Stalls(on_cpu=on_cpu)
        self._last_reduction: Any = None
        for unit in units:
            self._surround_gathers(unit)
            unit.set_custom_reduce_scatter(cast(Any, _MarkedReduceScatter(self)))

    def take_ms(self) -> float | None:
        """As `Stalls.take_ms`."""
        return self._stalls.take_ms()

    def after_backward(self) -> None:
        """Close the stall of the last reduction of a backward."""
        self._stalls.end(self._last_reduction)
        self._last_reduction = None

    def reduce(self, scatter: Callable[[], Any]) -> Any:
        """Run one reduction and note what of it shows."""
        start = self._stalls.begin()
        work = scatter()
        if self._on_cpu:
            self._stalls.end(start)
        else:
            self._last_reduction = start
        return work

    def _surround_gathers(self, unit: FSDPModule) -> None:
        assert isinstance(unit, nn.Module), "a sharded module is a module"
        waiting: list[Any] = []

        def start(*_: Any) -> None:
            waiting.append(self._stalls.begin())

        def stop(*_: Any) -> None:
            if waiting:
                self._stalls.end(waiting.pop())
                waiting.clear()

        unit.register_forward_pre_hook(start, prepend=True)
        unit.register_forward_pre_hook(stop)
        # FSDP2 gathers for backward in a hook on the output, set by its own forward hook: ours
        # are set before and after it, and hooks on a tensor run in the order they were set.
        unit.register_forward_hook(lambda _m, _a, output: _on_gradient(output, start), prepend=True)
        unit.register_forward_hook(lambda _m, _a, output: _on_gradient(output, stop))


def _on_gradient(output: Any, hook: Callable[..., None]) -> None:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)
            return


class _MarkedReduceScatter:
    """FSDP2's reduction, with marks around it; satisfies its `ReduceScatter` by shape."""

    def __init__(self, clock: StallClock) -> None:
        self._clock = clock

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        scatter = getattr(dist, _REDUCE_SCATTER)
        return self._clock.reduce(
            lambda: scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        )
