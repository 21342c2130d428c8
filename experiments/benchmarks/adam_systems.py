"""The optimizers of the case `adam_cpu`, run at equal wire format, and what a worker does with one.

Every step takes a bf16 gradient from host memory and leaves bf16 weights there, with master weights
and moments in fp32 precision. An optimizer over fp32 tensors needs a pass before its own that
widens the gradient, and one after it that rounds the weights.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from zero_strategy.kernels import adam
from zero_strategy.kernels.adam import AdamState, AdamStep, Pending
from zero_strategy.offload.host import Memory, buffers

OURS = "zero_strategy adam"
DEEPSPEED = "deepspeed cpu_adam"
TORCH = "torch fused"

LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
# Whole vectors, since torch's scalar tail fuses another product; neither whole blocks nor tiles.
PARITY_PARAMS = (1 << 20) + 48
PARITY_STEPS = 3
# Random values that longer tensors repeat: drawing 256 Mi of them takes seconds.
DISTINCT = 1 << 20
# More work than this share of what the threads can do shows that a setting did not arrive. Threads
# spin for a moment where a parallel region ends, and the system tells each one's time ms late.
MAX_BUSY, LATE_S = 1.5, 0.2


class Pass(NamedTuple):
    """Something of a system that is timed."""

    metric: str
    about: str
    """What the pass includes."""
    run: Callable[[int], None]
    """Runs it with so many threads."""


class System(Protocol):
    """An optimizer over one flat parameter, the best case for all."""

    grad: Tensor
    """(n,), bf16; what the next step takes."""

    @property
    def passes(self) -> Sequence[Pass]:
        """The whole step, then parts and variants of it."""
        ...

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return exact weights and both moments, each (n,), fp32."""
        ...


@final
class SplitAdam(System):
    """Ours on split master weights, in memory as the offload engine allocates it.

    Args:
        start: weights, (n,), fp32.

    Raises:
        RuntimeError: the C kernel is not what would run.
    """

    def __init__(self, start: Tensor) -> None:
        if adam.backend().name != "c":
            raise RuntimeError(f"Adam's passes run as {adam.describe()}: must run in C.")
        length = start.numel()
        dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32)
        upper, lower, m, v = (Memory(length, dtype).values for dtype in dtypes)
        self._state = AdamState(upper=upper, lower=lower, m=m, v=v)
        adam.split(start, upper, lower)
        self.grad, self._next_grad, self._wire = buffers(3, length, torch.bfloat16, pinned=False)
        # Pages that nobody wrote to are all the same one, which stays in the cache.
        fill(self._next_grad, seed=1)
        self._num_steps = 0

    @property
    @override
    def passes(self) -> Sequence[Pass]:
        how = f"{adam.describe()}, the engine's memory in large pages"
        return (
            Pass("speed", f"the step, whose upper halves are the wire; {how}", self._step),
            Pass(
                "commit and preview",
                f"a step and the preview of the next one in one pass; {how}",
                self._commit_and_preview,
            ),
            Pass("preview", f"the weights after a step that is not taken; {how}", self._preview),
        )

    @override
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        state = self._state
        return adam.join(state.upper, state.lower), state.m, state.v

    def _step(self, threads: int) -> None:
        adam.step(self._state, self.grad, self._take_step(), 1.0, threads=threads)

    def _commit_and_preview(self, threads: int) -> None:
        pending, following = Pending(self.grad, self._take_step(), 1.0), self._following()
        wire = self._wire
        adam.commit_and_preview(
            self._state, pending, self._next_grad, following, 1.0, wire, threads=threads
        )

    def _preview(self, threads: int) -> None:
        following = self._following()
        adam.preview(self._state, self.grad, following, 1.0, self._wire, threads=threads)

    def _take_step(self) -> AdamStep:
        taken = self._following()
        self._num_steps = taken.step
        return taken

    def _following(self) -> AdamStep:
        return AdamStep(
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            step=self._num_steps + 1,
        )


@final
class WidenedAdam(System):
    """An optimizer over fp32 tensors between the two casts, in memory as torch allocates it.

    Args:
        start: weights, (n,), fp32; becomes the master weights.
        make: gives the optimizer of the parameters.
        about_step: what is to be known of the optimizer's step without the casts.
    """

    def __init__(
        self, start: Tensor, make: Callable[[list[nn.Parameter]], Optimizer], about_step: str
    ) -> None:
        self._param = nn.Parameter(start)
        self._param.grad = self._wide_grad = torch.zeros_like(start)
        self.grad = torch.zeros_like(start, dtype=torch.bfloat16)
        self._wire = torch.empty_like(self.grad)
        self._optimizer = make([self._param])
        self._about_step = about_step

    @property
    @override
    def passes(self) -> Sequence[Pass]:
        about = "gradient cast to fp32, step, weights copied to bf16; memory as torch allocates it"
        return (
            Pass("speed", about, self._whole_step),
            Pass("step alone", self._about_step, self._step),
        )

    @override
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        state = self._optimizer.state[self._param]
        return self._param.detach(), state["exp_avg"], state["exp_avg_sq"]

    def _whole_step(self, threads: int) -> None:
        self._wide_grad.copy_(self.grad)
        self._step(threads)
        self._wire.copy_(self._param.detach())

    def _step(self, threads: int) -> None:
        assert torch.get_num_threads() == threads, "torch's setting decides"
        self._optimizer.step()


def torch_fused(start: Tensor) -> WidenedAdam:
    """Return torch's fused AdamW over weights, (n,), fp32."""

    def make(params: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(
            params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    return WidenedAdam(start, make, "without the two casts")


def deepspeed_cpu_adam(start: Tensor) -> WidenedAdam:
    """Return DeepSpeed's CPU Adam over weights, (n,), fp32; compiles it at its first use.

    Its OpenMP loops take their threads from the runtime that torch uses, so `set_num_threads`
    counts for them too.

    Raises:
        ModuleNotFoundError: DeepSpeed is not installed.
        RuntimeError: its operation cannot be compiled.
    """
    # The compilation looks for `ninja`, which is installed beside this interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    module: Any = importlib.import_module("deepspeed.ops.adam")

    def make(params: list[nn.Parameter]) -> Optimizer:
        return module.DeepSpeedCPUAdam(
            params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True
        )

    about = (
        "without the two casts; DeepSpeed's engine casts gradients on the GPU and sends them as "
        "fp32, 4 bytes per parameter"
    )
    return WidenedAdam(start, make, about)


SYSTEMS: dict[str, Callable[[Tensor], System]] = {
    OURS: SplitAdam,
    DEEPSPEED: deepspeed_cpu_adam,
    TORCH: torch_fused,
}


# What a worker runs. `build_folder` is where an operation that has to be compiled is kept.


def build(*, system: str, build_folder: str) -> float:
    """Return the seconds until a system is ready for a first step, its import left out."""
    os.environ["TORCH_EXTENSIONS_DIR"] = build_folder
    if system == DEEPSPEED:
        importlib.import_module("deepspeed.ops.adam")
    started = time.perf_counter()
    SYSTEMS[system](torch.zeros(16))
    return time.perf_counter() - started


def compare(*, system: str, threads: int, build_folder: str) -> dict[str, Any]:
    """Step a system and torch's fused AdamW from the same start with the same gradients.

    Returns:
        The largest relative difference of a weight after each step, and whether weights and
        moments have the same bits after the last.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = build_folder
    torch.set_num_threads(threads)
    candidate, reference = (
        make(start_weights(PARITY_PARAMS)) for make in (SYSTEMS[system], torch_fused)
    )
    gaps = []
    for index in range(PARITY_STEPS):
        for one in (candidate, reference):
            fill(one.grad, seed=index)
            one.passes[0].run(threads)
        weights, expected = candidate.tensors()[0], reference.tensors()[0]
        gaps.append(((weights - expected) / expected).abs().max().item())
    pairs = zip(candidate.tensors(), reference.tensors(), strict=True)
    same_bits = all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)
    return {"gaps": gaps, "same_bits": same_bits}


def time_passes(
    *, system: str, num_params: int, repeats: int, threads: list[int], build_folder: str
) -> list[dict[str, Any]]:
    """Time the whole step with each number of threads, the other passes with the largest.

    Args:
        system: name in `SYSTEMS`.
        num_params: parameters.
        repeats: measured runs of each, after one that is not.
        threads: rising.
        build_folder: see above.

    Raises:
        RuntimeError: the system worked on more cores than it was told.
    """
    os.environ["TORCH_EXTENSIONS_DIR"] = build_folder
    torch.set_num_threads(threads[-1])
    one = SYSTEMS[system](start_weights(num_params))
    fill(one.grad, seed=0)
    whole, *others = one.passes
    # All threads together touch the moments first, so that no single core's memory holds them.
    whole.run(threads[-1])
    timed = [*((whole, count) for count in threads), *((other, threads[-1]) for other in others)]
    return [_timed(one_pass, count, repeats) for one_pass, count in timed]


def _timed(one_pass: Pass, threads: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    one_pass.run(threads)
    seconds = []
    began_cpu = time.process_time()
    for _ in range(repeats):
        began = time.perf_counter()
        one_pass.run(threads)
        seconds.append(time.perf_counter() - began)
    cpu_s, wall_s = time.process_time() - began_cpu, sum(seconds)
    check_threads(one_pass.metric, threads, cpu_s=cpu_s, wall_s=wall_s)
    cores = f"; {cpu_s / wall_s:.1f} cores at work" if wall_s > LATE_S else ""
    metric = metric_of(one_pass.metric, threads)
    return {"metric": metric, "seconds": seconds, "about": f"{one_pass.about}{cores}"}


def check_threads(metric: str, threads: int, *, cpu_s: float, wall_s: float) -> None:
    """Raise RuntimeError where more threads worked than were asked for.

    Args:
        metric: of what was timed, for the error.
        threads: that were asked for.
        cpu_s: of all threads of the process together.
        wall_s: meanwhile.
    """
    if cpu_s > MAX_BUSY * threads * wall_s + LATE_S:
        cores = cpu_s / wall_s
        raise RuntimeError(f"{metric}: {cores:.1f} cores were at work, must be {threads}.")


def metric_of(name: str, threads: int) -> str:
    """Return the metric of a pass with so many threads.

    Example:
        >>> metric_of("speed", 1), metric_of("speed", 16)
        ('speed, 1 thread', 'speed, 16 threads')
    """
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def start_weights(num_params: int) -> Tensor:
    """Return weights, (n,), fp32, whose size lies in [0.5, 1.5): no step brings one near zero."""
    weights = torch.empty(num_params)
    generator = torch.Generator().manual_seed(1)
    values = 0.5 + torch.rand(DISTINCT, generator=generator)
    return _repeat(values * torch.randn(DISTINCT, generator=generator).sign(), weights)


def fill(grad: Tensor, *, seed: int) -> None:
    """Write a gradient of normal values."""
    _repeat(torch.randn(DISTINCT, generator=torch.Generator().manual_seed(seed)), grad)


def _repeat(values: Tensor, out: Tensor) -> Tensor:
    for part in out.split(values.numel()):
        part.copy_(values[: part.numel()])
    return out
