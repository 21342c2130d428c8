"""What offload takes over of a user's run and optimizer, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from zero_strategy.kernels.adam import AdamStep
from zero_strategy.protocols import SchedulesAccumulation

_DRIVEN = (torch.optim.AdamW, torch.optim.Adam)
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")


def accumulates(trainer: Any) -> bool:
    """Whether some optimizer step of a Trainer takes several micro-batches."""
    scheduled = any(isinstance(c, SchedulesAccumulation) for c in trainer.callbacks)
    return scheduled or trainer.accumulate_grad_batches > 1


def check_offload(module: Any, *, precision: str) -> None:
    """Refuse what cannot be stepped on the host.

    Args:
        module: the user's LightningModule, with its Trainer.
        precision: name of the precision.

    Raises: ValueError: lists each problem.
    """
    problems = []
    if precision != "bf16-mixed":
        problems.append(
            f"trainer.precision = {precision!r}: must be 'bf16-mixed' under offload, which keeps "
            "bf16 weights on the device and exact fp32 ones on the host. Use 'bf16-mixed'."
        )
    if not module.automatic_optimization:
        problems.append(
            "module.automatic_optimization = False: must be True under offload. Return the loss "
            "from training_step, or train without offload."
        )
    problems += [
        f"trainer.callbacks: {type(callback).__name__} freezes parameters before they are sharded "
        "and trains them later: must train what is trained at set-up under offload, which gives "
        "the rest no state. Freeze in on_fit_start, in a callback of your own, or train without "
        "offload."
        for callback in module.trainer.callbacks
        if "BaseFinetuning" in [kind.__name__ for kind in type(callback).__mro__]
    ]
    if problems:
        raise ValueError("\n".join(problems))


def warn_of_gradient_hooks(module: Any) -> None:
    """Say that hooks which may want gradients will find none."""
    overridden = [
        name
        for name in ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
        if not getattr(module, name).__module__.startswith("lightning.")
    ]
    if overridden:
        warnings.warn(
            f"{', '.join(overridden)}: under offload gradients leave the device as they arise, so "
            "p.grad is None there and changes of it have no effect. Use "
            "trainer.strategy.grad_norm for their norm, gradient_clip_val to clip, the loss for "
            "penalties.",
            stacklevel=2,
        )


def looks_between_steps(module: Any, callbacks: Iterable[Any]) -> bool:
    """Whether code of the user's own runs between an optimizer step and the next forward."""
    return any(
        not getattr(hooked, name).__module__.startswith(("lightning.", "zero_strategy."))
        for hooked in (module, *callbacks)
        for name in ("on_train_batch_end", "on_before_zero_grad")
    )


def optimizer_problems(optimizer: Optimizer) -> list[str]:
    """Return a line for each thing about an optimizer that the engine does not do."""
    if not optimizer.param_groups:
        return []  # what Lightning puts in the place of none
    kind = type(optimizer).__name__
    if type(optimizer) not in _DRIVEN:
        return [
            f"optimizer = {kind}: must be torch.optim.AdamW or torch.optim.Adam, which the offload "
            "engine steps on the host. Return one of them, or train without offload."
        ]
    return [
        f"optimizer.{key} = {group[key]!r}: must be False under offload. Leave it out."
        for group in optimizer.param_groups
        for key in _UNSUPPORTED
        if group[key]
    ]


@final
class Adopted:
    """The groups of a user's optimizers, by which the engine steps.

    Args:
        optimizers: as `configure_optimizers` made them.
        names: id(parameter) -> its name.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self.names = names
        self._optimizers = tuple(optimizers)

    def hyper(self, steps: Mapping[str, int]) -> dict[str, AdamStep | None]:
        """Read the groups, which schedulers change and callbacks add to.

        Args:
            steps: offloaded parameter -> optimizer steps it has taken.

        Returns: parameter -> the hyperparameters of its next step; None where no group has it.

        Raises:
            ValueError: an optimizer, a setting or a trained parameter that the engine does not
                know.
        """
        problems = [p for optimizer in self._optimizers for p in optimizer_problems(optimizer)]
        if problems:
            raise ValueError("\n".join(problems))
        hyper: dict[str, AdamStep | None] = dict.fromkeys(steps)
        for group in (group for o in self._optimizers for group in o.param_groups):
            for parameter in group["params"]:
                name = self.names[id(parameter)]
                if name in hyper:
                    hyper[name] = adam_step(group, steps[name] + 1)
                elif parameter.requires_grad:
                    raise ValueError(
                        f"{name} is trained but was frozen when the strategy set up: must require "
                        "a gradient then to be offloaded. Freeze it later, in on_fit_start, or "
                        "train without offload."
                    )
        return hyper


def adam_step(group: Mapping[str, Any], step: int) -> AdamStep:
    """Return the hyperparameters of a group's next step, as a schedule left them."""
    beta1, beta2 = group["betas"]
    return AdamStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        decoupled=group["decoupled_weight_decay"],
    )
