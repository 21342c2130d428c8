"""Which implementation of Adam's passes works on a device, and why."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.kernels.adam import cpu
from zero_strategy.kernels.adam.reference import ReferenceAdam
from zero_strategy.kernels.adam.state import AdamState, Pending
from zero_strategy.kernels.build import BuildError

CHOICES = ("auto", "c", "reference")
VARIABLE = "ZERO_STRATEGY_ADAM"


class Passes(Protocol):
    """What every implementation offers; arguments are checked before they come here."""

    name: str

    def run(
        self,
        state: AdamState,
        *,
        commit: Pending | None,
        preview: Pending | None,
        wire: Tensor | None,
        threads: int | None,
    ) -> None:
        """Commit one step, preview one into `wire`, or both in that order."""
        ...

    def split(self, master: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Write the halves of fp32 weights."""
        ...

    def join(self, upper: Tensor, lower: Tensor) -> Tensor:
        """Return the fp32 weights of two halves."""
        ...

    def sum_of_squares(self, grad: Tensor, *, threads: int | None) -> Tensor:
        """Return the 0-dim fp64 sum of squares."""
        ...


def backend(choice: str | None = None) -> Passes:
    """Return the implementation that works on CPU tensors.

    Args:
        choice: "c", "reference", or "auto" for C with the reference as fallback. By default the
            variable ZERO_STRATEGY_ADAM, else "auto".

    Returns:
        The implementation; the same object at every call.

    Raises:
        ValueError: no such choice.
        BuildError: "c" was asked for and cannot be had.

    Warns once, with the cause and the price, when "auto" falls back.
    """
    choice = choice or os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} = '{choice}': must be one of {', '.join(CHOICES)}.")
    if choice == "reference":
        return _reference()
    if choice == "c":
        return cpu.best()
    return _c_or_reference()


def backend_for(device: torch.device) -> Passes:
    """Return the implementation that works on tensors of a device.

    Raises:
        ValueError: the device is neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return backend()
    if device.type == "cuda":
        # Triton is imported only where there is a GPU.
        from zero_strategy.kernels.adam.triton import TritonAdam

        return TritonAdam()
    raise ValueError(f"adam.device = {device}: must be a CPU or CUDA device. Move the state.")


def describe() -> str:
    """Tell in a line which implementation works on the CPU and, if it is not C, why."""
    if os.environ.get(VARIABLE) == "reference":
        return f"reference (asked for by {VARIABLE})"
    try:
        return f"C for {cpu.best().isa}"
    except BuildError as error:
        return f"reference (no C kernel: {error})"


@cache
def _reference() -> ReferenceAdam:
    return ReferenceAdam()


@cache
def _c_or_reference() -> Passes:
    try:
        return cpu.best()
    except BuildError as error:
        warnings.warn(
            "Adam on the CPU runs in plain torch, with equal results in about ten times the time, "
            f"because its C kernel is not there. {error}",
            stacklevel=2,
        )
        return _reference()
