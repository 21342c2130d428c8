"""What Adam's passes work on: split master weights, moments, and one step's hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

MOMENT_DTYPES = (torch.float32, torch.bfloat16)
GRAD_DTYPES = (torch.bfloat16, torch.float32)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamStep:
    """Hyperparameters of one optimizer step.

    Attributes:
        lr: learning rate.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: AdamW's decay, or Adam's L2 penalty.
        step: number of this step, from 1.
        decoupled: True for AdamW, False for Adam's L2.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int
    decoupled: bool = True

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"adam.step = {self.step}: must count from 1. Add 1.")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"adam.{name} = {beta}: must lie in [0, 1). Try 0.9.")

    @property
    def coefficients(self) -> Coefficients:
        """The numbers the kernels compute with; taken in double, as torch does."""
        has_l2 = not self.decoupled and self.weight_decay != 0
        return Coefficients(
            is_l2=has_l2,
            m_weight=1 - self.beta1,
            v_decay=self.beta2,
            v_weight=1 - self.beta2,
            eps=self.eps,
            weight_scale=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=self.weight_decay,
            step_size=-(self.lr / (1 - self.beta1**self.step)),
            v_correction=math.sqrt(1 - self.beta2**self.step),
        )


class Coefficients(NamedTuple):
    """A step's scalars, each to be rounded to fp32 once; `csrc/adam.c` says what each is."""

    is_l2: bool
    m_weight: float
    v_decay: float
    v_weight: float
    eps: float
    weight_scale: float
    l2: float
    step_size: float
    v_correction: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A gradient with the step it belongs to.

    Attributes:
        grad: (n,), bf16 or fp32, contiguous.
        adam: the step's hyperparameters.
        scale: finite factor of the gradient, rounded to fp32; 1, or the clip coefficient.
    """

    grad: Tensor
    adam: AdamStep
    scale: float


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdamState:
    """Weights and moments of n parameters, 12 bytes each (8 with bf16 moments).

    `bits(upper) << 16 + lower` are the bits of the exact fp32 master weight. `upper` is that
    weight rounded to bf16, half away from zero, so it is also what is sent to the accelerator.

    Attributes:
        upper: (n,), bf16.
        lower: (n,), int16, the signed remainder.
        m: (n,), first moment, fp32; or bf16, rounded half away from zero at each step, which is
            not exact.
        v: (n,), second moment, of the same dtype as `m`.

    Raises:
        ValueError: the tensors are not flat, contiguous, on one device, of one length and of the
            dtypes above.
    """

    upper: Tensor
    lower: Tensor
    m: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        check("adam.upper", self.upper, like=self.upper, dtypes=(torch.bfloat16,))
        check("adam.lower", self.lower, like=self.upper, dtypes=(torch.int16,))
        check("adam.m", self.m, like=self.upper, dtypes=MOMENT_DTYPES)
        check("adam.v", self.v, like=self.upper, dtypes=(self.m.dtype,))

    @property
    def length(self) -> int:
        """Number of parameters."""
        return self.upper.numel()

    @property
    def device(self) -> torch.device:
        """Device of all four tensors."""
        return self.upper.device

    def narrow(self, start: int, length: int) -> AdamState:
        """Return the state of `length` parameters from `start`, as views."""
        return AdamState(
            upper=self.upper.narrow(0, start, length),
            lower=self.lower.narrow(0, start, length),
            m=self.m.narrow(0, start, length),
            v=self.v.narrow(0, start, length),
        )


def check(name: str, tensor: Tensor, *, like: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless a tensor is flat, contiguous, as long as `like` and on its device."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name}.dtype = {found}: must be {allowed}. Convert it.")
    if tensor.dim() != 1 or tensor.shape != like.shape:
        wanted = f"({like.numel()},)"
        raise ValueError(f"{name}.shape = {tuple(tensor.shape)}: must be {wanted}. Flatten it.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}.stride = {tensor.stride()}: must be (1,). Call contiguous().")
    if tensor.device != like.device:
        raise ValueError(f"{name}.device = {tensor.device}: must be {like.device}. Move it.")
