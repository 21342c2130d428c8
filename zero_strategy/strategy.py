"""The Lightning strategy: short hooks that hand over to the parts.

One parameter's way: `presets` names the stage, `setup` below finds the units (`blocks`), shards
them (`shard`) and plans their bytes (`planning/estimate`); gradients meet in `gradient`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from zero_strategy import checks, seams
from zero_strategy.adopt import (
    accumulates,
    check_offload,
    looks_between_steps,
    warn_of_gradient_hooks,
)
from zero_strategy.blocks import find_units
from zero_strategy.config import (
    GuardConfig,
    InitDevice,
    OffloadConfig,
    Placement,
    PrecisionName,
    SaveConfig,
    ZeroConfig,
    as_offload_config,
    refusal,
    unknown_options,
)
from zero_strategy.control import control_group
from zero_strategy.deferred import deferring
from zero_strategy.evaluation import Turns
from zero_strategy.explain import explain
from zero_strategy.guards.progress import PROGRESS
from zero_strategy.mesh import build_mesh, same_mesh
from zero_strategy.offload.figures import OffloadFigures
from zero_strategy.offloading import make_offloading
from zero_strategy.planning.estimate import MemoryPlan
from zero_strategy.precision import ZeroPrecision
from zero_strategy.resuming import Resuming
from zero_strategy.shard import IN_STEP, BackwardPolicy, Sharded, memory_plan, shard_module
from zero_strategy.state_dicts import adapt_state_dicts
from zero_strategy.watching import WatchedStrategy

_SHARDED_ATTRIBUTE = "_zero_strategy_sharded"
_OPTIONS = (
    *("stage", "blocks", "compile", "init", "offload", "guards", "saving"),
    *("timeout", "process_group_backend"),
)


class ZeroStrategy(WatchedStrategy):
    """Shard a LightningModule's parameters, gradients and optimizer state over the ranks.

    The module needs no change: `training_step`, `configure_optimizers`, callbacks and loggers
    stay as they are, and what is learned equals what one plain process would learn on the same
    global batches.

    Args:
        stage: 1 shards optimizer state, 2 also gradients, 3 also parameters.
        blocks: module classes to shard as units; None finds the repeated blocks.
        compile: "blocks" compiles each unit with torch.compile.
        init: "meta" builds in `configure_model` without memory, unit by unit on the device.
        offload: where optimizer state lies: "auto" or "host" or an `OffloadConfig`; None keeps it
            on the device.
        guards: what is watched while training, such as a norm that is not finite.
        saving: how checkpoints are written, such as in the background, and what may be read.
        timeout: how long a collective may wait for other ranks.
        process_group_backend: "nccl" or "gloo"; None chooses by device.
    Raises: ValueError: lists every unknown or wrong option.

    Example:
        >>> trainer = lightning.Trainer(devices=8, strategy="zero3", precision="bf16-mixed")
        >>> trainer.fit(module, loader)
    """

    def __init__(
        self,
        stage: int = 3,
        *,
        blocks: Sequence[type[nn.Module]] | None = None,
        compile: Literal["blocks"] | None = None,
        init: InitDevice = "cpu",
        offload: OffloadConfig | Placement | None = None,
        guards: GuardConfig | None = None,
        saving: SaveConfig | None = None,
        timeout: timedelta = timedelta(minutes=30),
        process_group_backend: str | None = None,
        start_method: str = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **unknown: Any,
    ) -> None:
        self.config = ZeroConfig(
            zero_stage=cast(Any, stage),
            blocks=tuple(blocks) if isinstance(blocks, list) else cast(Any, blocks),
            compile=compile,
            init=init,
            offload=cast(Any, as_offload_config(offload)),
            guards=GuardConfig() if guards is None else guards,
            saving=SaveConfig() if saving is None else saving,
        )
        problems = [*self.config.problems(), *unknown_options(unknown, _OPTIONS)]
        if start_method != "popen":
            fix = "Run the script itself or use torchrun; each rank must be its own program."
            problems.append(refusal("zero.start_method", start_method, ["popen"], fix))
        if checkpoint_io is not None:
            problems.append(
                f"zero.checkpoint_io = {type(checkpoint_io).__name__}: must be left out, sharded "
                "checkpoints are written by the strategy itself. Remove the plugin."
            )
        if not isinstance(timeout, timedelta):
            fix = "Use timedelta(minutes=30)."
            problems.append(refusal("zero.timeout", timeout, ["a datetime.timedelta"], fix))
        if problems:
            raise ValueError("\n".join(problems))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.checks: dict[str, str] = {}
        self._policy = BackwardPolicy()
        self._plan: MemoryPlan | None = None
        self._turns: Turns | None = None

    # What the run is told about itself.

    @property
    def plan(self) -> MemoryPlan:
        """Bytes per rank as planned at set-up."""
        assert self._plan is not None, "the plan exists once the strategy is set up"
        return self._plan

    @property
    def grad_norm(self) -> Tensor | None:
        """Global fp32 gradient norm of the last step, before clipping; 0-dim, on the device.

        In `on_before_optimizer_step` it is that of the step to come, computed when asked for.

        Cost: none after the step; before it, a collective that every rank must call.
        """
        return self.zero_precision.grad_norm

    def take_exposed_comm_ms(self) -> float | None:
        """Communication that this rank's compute waited for since the last call, in ms.

        Returns: None at the first call, which starts the measuring; 0 for a single rank.
        """
        stalls = self.sharded.stalls
        return stalls.take_ms() if stalls else 0.0

    def take_offload_figures(self) -> OffloadFigures | None:
        """What offload did on this rank since the last call, or None where there is none."""
        return self.sharded.offloading.take_figures() if self.sharded.offloading else None

    # Lightning's surface.

    @property
    @override
    def precision_plugin(self) -> Precision:
        if self._precision_plugin is None:
            self._precision_plugin = ZeroPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, ZeroPrecision):
            name = cast(PrecisionName, precision_plugin.precision)
            precision_plugin = ZeroPrecision(name)
        self._precision_plugin = precision_plugin

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.zero_precision.device_type = self.root_device.type
        self.mesh = build_mesh(self.root_device.type, self.world_size)
        self._control = control_group()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        device = "meta" if empty_init or self.config.init == "meta" else "cpu"
        with torch.device(device), self.precision_plugin.tensor_init_context(), deferring():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None, "Lightning connects the accelerator first"
        module = self._module
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        checks.check_callbacks(
            [c.__name__ for c in type(cb).__mro__] for cb in cast(Any, trainer).callbacks
        )
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)

        self._sharded = self._previous(module) or self._shard(module)
        self._sharded.use_stage(self.config.zero_stage)
        self.zero_precision.offloading = self._sharded.offloading
        self._plan = memory_plan(
            self._sharded, self.config.zero_stage, str(self.precision_plugin.precision)
        )
        self.model = self._sharded.root
        # Nothing of the units moves any more; metrics and the module's own `.device` do.
        self.model_to_device()
        self._take_turns(trainer)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
            self._set_up_saving()
        self._guard_steps(trainer, fitting=fitting)
        self._resuming = None
        if fitting:
            self._resuming = Resuming(trainer, device=self.root_device, group=self._control)
            self._check_disks(trainer)
        self.setup_precision_plugin()
        seams.log_whole_tensors(module)
        self._begin_watch(trainer)

    def _shard(self, module: pl.LightningModule) -> Sharded:
        manual = not module.automatic_optimization
        checks.check_module(module, manual_optimization=manual)
        if self.config.offload is not None:
            check_offload(module, precision=self.zero_precision.precision)
            warn_of_gradient_hooks(module)
        checks.check_same_module(module, self._control)
        self.precision_plugin.convert_module(module)
        units = find_units(
            module,
            self.config.blocks,
            every_child=manual,
            large_leaves=self.config.offload is not None,
        )
        checks.check_units(module, units)
        offloading = None
        if self.config.offload is not None:
            offloading = make_offloading(
                module,
                units,
                self.mesh,
                device=self.root_device,
                config=self.config.offload,
                zero_stage=self.config.zero_stage,
                sums=self.world_size > 1 or accumulates(module.trainer),
                group=self._control,
            )
        sharded = shard_module(
            module,
            units,
            self.mesh,
            device=self.root_device,
            policy=self.zero_precision.policy,
            compile_blocks=self.config.compile == "blocks",
            offloading=offloading,
        )
        self.checks = sharded.checks
        adapt_state_dicts(module, offloading.writes.load if offloading else None)
        vars(module)[_SHARDED_ATTRIBUTE] = sharded
        return sharded

    def _previous(self, module: pl.LightningModule) -> Sharded | None:
        """What an earlier run of this process made of the module."""
        sharded: Sharded | None = vars(module).get(_SHARDED_ATTRIBUTE)
        if sharded is None:
            return None
        same_policy = sharded.policy == self.zero_precision.policy
        same_offload = (sharded.offloading is None) == (self.config.offload is None)
        if not (same_mesh(sharded.mesh, self.mesh) and same_policy and same_offload):
            raise ValueError(
                "the module was sharded by an earlier run with other ranks, another precision or "
                "another offload: must be the same within one process. Save a checkpoint and load "
                "it into a new module."
            )
        self.checks = {"units": f"{sharded.unit_classes}, sharded by an earlier run"}
        return sharded

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        checks.check_same_optimizers(self._module, self.optimizers, self._control)
        checks.check_optimizers(self._module, self.optimizers)
        checks.check_trainable_sharded(self._module, self.world_size)
        if self.sharded.offloading:
            watched = looks_between_steps(self._module, cast(Any, trainer).callbacks)
            self.sharded.offloading.adopt(self._plain_optimizers, watched=watched)
        if not self._module.automatic_optimization:
            # The next forward of the same step must see the new weights.
            for optimizer in self.optimizers:
                optimizer.register_step_post_hook(lambda *_: self.sharded.reshard())

    # Backward.

    @contextmanager
    def _backward_as(self, policy: BackwardPolicy) -> Generator[None, None, None]:
        outer, self._policy = self._policy, policy
        self.sharded.use_backward(policy)
        try:
            yield
        finally:
            self._policy = outer
            self.sharded.use_backward(outer)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A backward that is not the last before the optimizer steps."""
        stage = self.config.zero_stage
        policy = BackwardPolicy(last=False, reduces=stage > 1, lets_go=stage == 3)
        with self._backward_as(policy):
            yield

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        by_hand = self._policy == IN_STEP and not kwargs.get("create_graph")
        with self._backward_as(BackwardPolicy()) if by_hand else nullcontext():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self.sharded.stalls:
            self.sharded.stalls.after_backward()
        super().post_backward(closure_loss)

    # Evaluation.

    def _take_turns(self, trainer: pl.Trainer) -> None:
        if self._turns is not None:
            self._turns.detach()
        units = cast(list[nn.Module], self.sharded.modules)
        root = len(units) - 1
        stage = self.config.zero_stage
        self._turns = Turns(units, lambda i: stage < 3 or i == root, self._control)
        for loop in seams.evaluation_loops(trainer):
            seams.without_inference_mode(loop)
            seams.at_end_of_batches(loop, self._turns.take_stepped, self._turns.finish)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        assert self._turns is not None, "set up before a step"
        PROGRESS.mark("evaluation step")
        with self._turns.step(), self._sharded_after_exception():
            return step(*args, **kwargs)

    @contextmanager
    def _sharded_after_exception(self) -> Generator[None, None, None]:
        """Callbacks that save on an exception must find shards."""
        try:
            yield
        except BaseException:
            self.sharded.abandon_step()
            raise

    @contextmanager
    def inference(self) -> Generator[None, None, None]:
        """Call the module outside a step, for example to generate text in a callback.

        Every rank must enter; what each does inside, and how often, may differ.
        """
        assert self._turns is not None, "set up before inference"
        context = self.precision_plugin.val_step_context()
        with self._turns.step(), torch.no_grad(), context:
            self._turns.gather(len(self.sharded.modules) - 1)
            yield
        self._turns.finish()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.sharded.offloading:
            self.sharded.offloading.begin_step()
        with self._sharded_after_exception(), self._backward_as(IN_STEP):
            output = super().training_step(*args, **kwargs)
        if not self._module.automatic_optimization:
            self.sharded.reshard()
        return output

    # Each rank's batches move its buffers; all must evaluate the model that is saved.

    @override
    def on_validation_start(self) -> None:
        self.sharded.sync_buffers()

    @override
    def on_test_start(self) -> None:
        self.sharded.sync_buffers()

    @override
    def on_predict_start(self) -> None:
        self.sharded.sync_buffers()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.events.between_batches()

    @override
    def on_train_end(self) -> None:
        self.events.at_end()
        super().on_train_end()
        self.wait_for_save()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain(exception)

    @override
    def teardown(self) -> None:
        # The base class would move module and optimizers to the CPU: shards stay where they are.
        assert self.cluster_environment is not None, "set up before teardown"
        self._end_watch()
        self.wait_for_save()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self._sharded is not None and self._sharded.offloading:
            self._sharded.offloading.pause()
        if self.accelerator is not None:
            self.accelerator.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names are registered by `zero_strategy.autoload`."""
