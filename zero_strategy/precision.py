"""Precision of a sharded run: what dtype is stored, computed with, and reduced.

| name         | stored (masters) | computed | reduced |
|--------------|------------------|----------|---------|
| `32-true`    | fp32             | fp32     | fp32    |
| `bf16-mixed` | fp32             | bf16     | fp32    |
| `16-mixed`   | fp32             | fp16     | fp32    |
| `bf16-true`  | bf16             | bf16     | bf16    |
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from zero_strategy import seams
from zero_strategy.config import GuardConfig, PrecisionName, refusal
from zero_strategy.gradient import ShardNorms, clip_by_norm_, clip_by_value_, global_norm
from zero_strategy.guards.non_finite import (
    Culprits,
    Evidence,
    FiniteWatch,
    GradientNorms,
    NonFiniteGuard,
    ScalesBack,
    SkipsStep,
    StopsRun,
)
from zero_strategy.guards.steps import StepWatch
from zero_strategy.offloading import Offloading
from zero_strategy.scaler import LossScaler

_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_HALF = (torch.bfloat16, torch.float16)


class ZeroPrecision(Precision):
    """Casts, clips and steps for sharded parameters.

    Args:
        precision: one of the names above.
        device_type: device of the autocast region, "cpu" or "cuda".
    """

    def __init__(self, precision: PrecisionName = "32-true", device_type: str = "cpu") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(refusal("trainer.precision", precision, get_args(PrecisionName)))
        self.precision = precision
        self.device_type = device_type
        self._grad_norm: Tensor | None = None
        self._unclipped: Optimizer | None = None
        self._clipped_by_hand: dict[int, tuple[GradientNorms, Tensor]] = {}
        """id(optimizer) -> its norm, where a manual step clipped before it steps."""
        self._guard: NonFiniteGuard | None = None
        self._steps: StepWatch | None = None
        self._number = 0
        """Of the optimizer step in progress, from 1."""
        self._drops_step = False
        self.step_taken = True
        """Whether the last optimizer step changed weights, and was not undone since."""
        self.offloading: Offloading | None = None
        """Steps on the host; takes over the norm and the clipping."""
        self.scaler = LossScaler() if precision == "16-mixed" else None
        self._compute_dtype = _COMPUTE.get(precision)
        self._stored_dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's policy for the units; the root differs in not casting the user's inputs."""
        if self._compute_dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm of the last step's gradients; computed anew between backward and clipping."""
        if self._unclipped is not None:
            if self.offloading:
                return self.offloading.norm()
            return global_norm(self.main_params(self._unclipped))
        return self._grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken because the norm of their gradients was not finite."""
        return self._guard.num_skipped if self._guard else 0

    def guard_steps(
        self, config: GuardConfig, *, steps: StepWatch, watch: FiniteWatch, culprits: Culprits
    ) -> None:
        """Set what is done about norms that are not finite, for a run.

        Args:
            config: of the strategy.
            steps: knows the losses of the step in progress.
            watch: judges norms that the host does not wait for.
            culprits: names what a norm came from.
        """
        self._steps = steps
        self.step_taken, self._drops_step = True, False
        if self.scaler:
            self._guard = ScalesBack(self.scaler, culprits, config.max_skipped)
        elif config.non_finite == "skip":
            self._guard = SkipsStep(culprits, config.max_skipped)
        else:
            self._guard = StopsRun(watch)

    def drop_step(self) -> None:
        """Take back the last step, and do not take the one in progress, if there is one."""
        assert self._steps is not None, "a run has begun"
        self.step_taken = False
        self._drops_step = self._steps.in_progress
        self._steps.forget()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.precision == "bf16-true":
            return module.to(torch.bfloat16)
        if self._compute_dtype is not None:
            # Masters are fp32; frozen parameters are never stepped and stay as loaded.
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.dtype in _HALF:
                    parameter.data = parameter.data.float()
        return module

    @override
    def tensor_init_context(self) -> Any:
        return (
            _default_dtype(self._stored_dtype) if self.precision == "bf16-true" else nullcontext()
        )

    @override
    def module_init_context(self) -> Any:
        return self.tensor_init_context()

    @override
    def forward_context(self) -> Any:
        if self._compute_dtype is not None:
            return torch.autocast(self.device_type, dtype=self._compute_dtype)
        return self.tensor_init_context()

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(
            data, Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t
        )

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        scaled = tensor * self.scaler.scale if self.scaler else tensor
        return super().pre_backward(scaled, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Steppable,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        self._grad_norm = None
        self.step_taken = True
        self._number = model.trainer.global_step + 1

        def backward() -> Any:
            result = closure()
            if self.scaler:
                self.scaler.unscale_(self.main_params(cast(Any, optimizer)))
            self._unclipped = cast(Any, optimizer)
            return result

        try:
            return self._step(optimizer, model, backward, **kwargs)
        finally:
            self._unclipped = None
            self._clipped_by_hand.pop(id(optimizer), None)

    def _step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self.scaler and isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "trainer.precision = '16-mixed': LBFGS calls its closure several times per step, "
                "which a loss scale does not allow. Use 'bf16-mixed' or '32-true'."
            )
        if self._drops_step:
            self._drops_step = self.step_taken = False
            result = closure()
            if self.offloading:
                self.offloading.abandon()
            return result

        def judged() -> Any:
            result = closure()
            self._after_closure(model, optimizer)
            if self._unclipped is not None:
                # Manual optimization, or a hook for clipping that does not call `clip_gradients`.
                self._decide(optimizer, max_norm=0.0)
            return result

        assert self._guard is not None, "a run has begun"
        if not self._guard.reads_norm:
            return optimizer.step(closure=judged, **kwargs)
        result = judged()
        if self.step_taken:
            optimizer.step(**kwargs)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Measure the global norm, act on one that is not finite, and clip if asked.

        Lightning calls this before every optimizer step of automatic optimization, with
        `clip_val=0` when clipping is off. In a manual step it clips alone: the norm is acted on
        when the optimizer steps.
        """
        by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        if self.offloading and by_value and clip_val > 0:
            raise ValueError(
                "trainer.gradient_clip_algorithm = 'value': must be 'norm' under offload, where "
                "gradients have left the device. Use 'norm', or train without offload."
            )
        if self._unclipped is not None:
            self._decide(optimizer, max_norm=clip_val)
            if not self.step_taken:
                return
        else:
            norms, self._grad_norm = self._measure(optimizer)
            if self.scaler is None:  # else it is of gradients that are still scaled
                by_hand = (norms, self._grad_norm)
                self._clipped_by_hand[id(seams.unwrapped(optimizer))] = by_hand
        if self.offloading or clip_val <= 0:
            return
        parameters = list(self.main_params(optimizer))
        if by_value:
            clip_by_value_(parameters, clip_val)
        else:
            assert self._grad_norm is not None, "it was measured"
            clip_by_norm_(parameters, clip_val, self._grad_norm)

    def _measure(self, optimizer: Optimizer) -> tuple[GradientNorms, Tensor]:
        """Return the norms of what an optimizer is about to apply, and the global one."""
        offloading = self.offloading
        norms = offloading.norms() if offloading else ShardNorms(self.main_params(optimizer))
        return norms, norms.total()

    def _decide(self, optimizer: Optimizer, *, max_norm: float) -> None:
        """Have the guard decide whether the step is taken, and under offload its scale."""
        self._unclipped = None
        clipped = self._clipped_by_hand.pop(id(optimizer), None)
        norms, norm = clipped or self._measure(optimizer)
        self._grad_norm = norm
        assert self._guard is not None, "a run has begun"
        assert self._steps is not None, "a run has begun"
        if self.offloading and not bool(norm.isfinite()):
            self.offloading.abandon()
        evidence = Evidence(step=self._number, norms=norms, losses=self._steps.losses)
        self.step_taken = self._guard.admits(norm, evidence)
        if self.offloading and self.step_taken:
            self.offloading.decide(max_norm, norm)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._guard.state_dict() if self._guard else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._guard:
            self._guard.load_state_dict(state_dict)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
