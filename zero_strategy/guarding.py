"""What of a strategy watches the steps of a run: gradients, losses, and the state that is saved."""

from collections.abc import Callable
from typing import Any, cast

import lightning.pytorch as pl
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from zero_strategy import seams
from zero_strategy.blocks import parameter_names
from zero_strategy.control import NonFiniteGradientError
from zero_strategy.events import RunEvents
from zero_strategy.guards.buffers import KeptBuffers
from zero_strategy.guards.non_finite import Culprits, FiniteWatch
from zero_strategy.guards.poisoned import PoisonCheck
from zero_strategy.guards.rollback import Rollbacks
from zero_strategy.guards.spikes import SpikeGuard, SpikeWatch
from zero_strategy.guards.steps import StepWatch
from zero_strategy.precision import ZeroPrecision
from zero_strategy.saving import SavingStrategy


class GuardedStrategy(SavingStrategy):
    """The part of `ZeroStrategy` that decides whether a step is taken, and what it leaves."""

    mesh: DeviceMesh

    def __init__(self, **lightning: Any) -> None:
        super().__init__(**lightning)
        self._steps = StepWatch(None)
        self._spikes: SpikeGuard | None = None
        self._rollbacks: Rollbacks | None = None

    @property
    def zero_precision(self) -> ZeroPrecision:
        """The precision plugin, which is always ours."""
        return cast(ZeroPrecision, self.precision_plugin)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped on all ranks since the norm of their gradients was not finite."""
        return self.zero_precision.skipped_steps

    @property
    def step_taken(self) -> bool:
        """Whether the last optimizer step changed the weights, and was not undone since."""
        return self.zero_precision.step_taken

    @property
    def num_rollbacks(self) -> int:
        """How often this run went back to a checkpoint because of a loss spike."""
        return self._rollbacks.num_done if self._rollbacks else 0

    def _guard_steps(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        """Set what a run's steps are watched for, and who acts on it."""
        guards, precision = self.config.guards, self.zero_precision
        culprits = Culprits(parameter_names(self._module), self._control)
        finite = FiniteWatch(culprits)
        self._spikes = None
        if fitting:
            # A step that is not taken must leave no trace in buffers.
            undoes = precision.scaler or guards.non_finite == "skip" or guards.spike == "rollback"
            self._steps = StepWatch(KeptBuffers(self.sharded.root) if undoes else None)
            precision.guard_steps(guards, steps=self._steps, watch=finite, culprits=culprits)
            seams.hold_schedules(trainer, lambda: not precision.step_taken)
            self._resumable = None
        if fitting and guards.spike_sigmas is not None:
            group = self.mesh.get_group() if self.world_size > 1 else None
            self._rollbacks = Rollbacks(
                cast(Any, self),
                trainer,
                newest=self._newest_resumable,
                drop_step=self._drop_step,
            )
            self._spikes = SpikeGuard(
                SpikeWatch(guards.spike_sigmas, group, self.root_device),
                guards.spike,
                go_back=self._rollbacks.go_back,
                speaks=self.is_global_zero,
            )
        self._events = RunEvents(
            trainer, self._control, finite, self._spikes, self._saver, fitting=fitting
        )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._poison = PoisonCheck(self._module, self._control)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._steps.begin_micro_batch()
        output = super().training_step(*args, **kwargs)
        self._steps.saw(output)
        if not self._module.automatic_optimization:
            self._end_step(self._module.trainer.global_step)
        return output

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except NonFiniteGradientError:
            # What is saved because of it must be the state before the step.
            self._steps.stepped(taken=False)
            self._steps.end()
            raise
        self._steps.stepped(taken=self.zero_precision.step_taken)
        if self._module.automatic_optimization:
            self._end_step(self._module.trainer.global_step + 1)
            # Lightning zeroes gradients before the next backward, so they would lie beside the
            # activations of the next forward: 4 bytes per parameter of the peak.
            optimizer.zero_grad()
        return output

    def _end_step(self, step: int) -> None:
        """Look at the losses of an optimizer step, or undo what is left of one not taken."""
        losses = self._steps.end()
        if self._spikes is None or losses is None:
            return
        if not losses and not self._module.automatic_optimization:
            raise ValueError(
                f"zero.guards.spike_sigmas = {self.config.guards.spike_sigmas}: must be None where "
                "training_step returns no loss. Return it, also under manual optimization."
            )
        self._spikes.watch.watch(losses, step)

    def _drop_step(self) -> None:
        """Take back the last optimizer step, and forget the gradients of the one in progress."""
        self.zero_precision.drop_step()
        for optimizer in self._plain_optimizers:
            optimizer.zero_grad()
        if self.sharded.offloading:
            self.sharded.offloading.abandon()
