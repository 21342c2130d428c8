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

from zero_strategy.config import PrecisionName, refusal
from zero_strategy.control import FiniteWatch, NonFiniteGradientError
from zero_strategy.gradient import clip_by_norm_, clip_by_value_, first_non_finite, global_norm
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
        self.finite_watch = FiniteWatch()
        self._norms_seen = 0
        self._module: nn.Module | None = None
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
        """Steps skipped for an overflow of the scaled gradients."""
        return self.scaler.skipped_steps if self.scaler else 0

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        self._module = model
        return super().connect(model, optimizers, lr_schedulers)

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

    def _step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "trainer.precision = '16-mixed': LBFGS calls its closure several times per step, "
                "which a loss scale does not allow. Use 'bf16-mixed' or '32-true'."
            )
        return self._scaled_step(self.scaler, optimizer, model, closure, **kwargs)

    def _scaled_step(
        self,
        scaler: LossScaler,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        norm = self.grad_norm
        assert norm is not None, "measured by clipping, or on demand"
        finite = bool(norm.isfinite())
        if finite:
            optimizer.step(**kwargs)
        scaler.update(finite=finite)
        return result

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Measure the global norm, refuse a non-finite one, and clip if asked.

        Lightning calls this before every optimizer step of automatic optimization, with
        `clip_val=0` when clipping is off.
        """
        if self.offloading:
            self._clip_offloaded(self.offloading, clip_val, gradient_clip_algorithm)
            return
        parameters = list(self.main_params(optimizer))
        self._unclipped = None
        self._grad_norm = norm = global_norm(parameters)
        if self.scaler is None:
            self._judge(norm, optimizer)
        elif not bool(norm.isfinite()):
            return
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clip_by_value_(parameters, clip_val)
        else:
            clip_by_norm_(parameters, clip_val, norm)

    def _clip_offloaded(
        self, offloading: Offloading, clip_val: float, algorithm: GradClipAlgorithmType
    ) -> None:
        if algorithm == GradClipAlgorithmType.VALUE and clip_val > 0:
            raise ValueError(
                "trainer.gradient_clip_algorithm = 'value': must be 'norm' under offload, where "
                "gradients have left the device. Use 'norm', or train without offload."
            )
        self._unclipped = None
        self._grad_norm = offloading.clip(float(clip_val))

    def _judge(self, norm: Tensor, optimizer: Optimizer) -> None:
        self._norms_seen += 1
        if not self.finite_watch.watch(norm, self._norms_seen):
            raise NonFiniteGradientError(self._non_finite_message(optimizer))

    def _non_finite_message(self, optimizer: Optimizer) -> str:
        parameters = {id(p) for p in self.main_params(optimizer)}
        assert self._module is not None, "connect() runs before the first step"
        named = [(n, p) for n, p in self._module.named_parameters() if id(p) in parameters]
        culprit = first_non_finite(named)
        where = f"first in {culprit!r} on this rank" if culprit else "in another rank's shard"
        return (
            f"gradient norm = {float(self._grad_norm or 0.0)} at optimizer step "
            f"{self._norms_seen}, {where}: must be finite. No weight was changed by this step. "
            "Lower the learning rate, check the batch, or use precision='bf16-mixed'."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return dict(self.scaler.state_dict()) if self.scaler else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler:
            self.scaler.load_state_dict(state_dict)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
