"""What of a strategy is saved and read again: canonical names, in a directory, by all ranks."""

import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from zero_strategy import seams
from zero_strategy.checkpoint import matching, state, storage, trainer_state
from zero_strategy.checkpoint.background import BackgroundSaver
from zero_strategy.checkpoint.casts import Casts
from zero_strategy.checkpoint.late import LateDict
from zero_strategy.checkpoint.plain import changed
from zero_strategy.config import ZeroConfig
from zero_strategy.control import join_after_exception
from zero_strategy.events import RunEvents
from zero_strategy.guards.poisoned import PoisonCheck
from zero_strategy.resuming import Resuming
from zero_strategy.shard import Sharded


class SavingStrategy(DDPStrategy):
    """The part of `ZeroStrategy` that saves a sharded run and goes on with it."""

    config: ZeroConfig

    def __init__(self, **lightning: Any) -> None:
        super().__init__(**lightning)
        self.last_save: tuple[str, float] | None = None
        """Name of the last checkpoint, and the seconds its save took."""
        self._saver: BackgroundSaver | None = None
        self._newest: Path | None = None
        self._loaded: Path | None = None
        self._resumable: Path | None = None
        """The last checkpoint of this run that it can go on from."""
        self._casts = Casts(allowed=self.config.saving.casts)
        self._stepped_by: dict[str, Any] = {}
        """What `configure_optimizers` returned. A search for a learning rate puts in its own."""
        self._poison: PoisonCheck | None = None
        self._resuming: Resuming | None = None
        """Of a fit: where it goes on, and where one would that resumes from a save of it."""
        self._sharded: Sharded | None = None
        self._events: RunEvents | None = None
        self._control: dist.ProcessGroup | None = None

    @property
    def sharded(self) -> Sharded:
        """The module's units."""
        assert self._sharded is not None, "the module is sharded when the strategy sets up"
        return self._sharded

    @property
    def events(self) -> RunEvents:
        """What one rank sees and all act on."""
        assert self._events is not None, "signals are registered at set-up"
        return self._events

    @property
    def _plain_optimizers(self) -> list[Optimizer]:
        return [seams.unwrapped(o) for o in self.optimizers]

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "Lightning connects the module first"
        return self.lightning_module

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        join_after_exception(self._control)
        return super().broadcast(obj, src)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        join_after_exception(self._control)
        super().barrier(*args, **kwargs)

    def masters(self) -> dict[str, Tensor]:
        """Copies of the fp32 weights that lie in host memory, by parameter name; none elsewhere.

        Cost: under offload, waits until every step is committed.
        """
        return self.sharded.offloading.masters() if self.sharded.offloading else {}

    def write_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Replace weights that lie in host memory, and the module's rounded ones."""
        if self.sharded.offloading:
            self.sharded.offloading.write_masters(masters)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self._stepped_by = matching.described(self._plain_optimizers, schedulers)

    # Checkpoints.

    def _names(self) -> dict[int, str]:
        """id(parameter) -> its name in the state dict, where wrappers leave no prefix."""
        self.sharded.reshard()
        names: dict[int, str] = {}
        for name, parameter in self._module.state_dict(keep_vars=True).items():
            names.setdefault(id(parameter), name)
        return names

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's weights as DTensors, offloaded ones once asked for, and rank 0's buffers.

        What a save collects first: a loss spike is acted on before.
        """
        self.sharded.reshard()
        if sys.exc_info()[0] is None:
            self.events.before_save()
            self.sharded.sync_buffers()
        tensors, extra = state.model_state(self._module)
        late = self.sharded.offloading.late_masters() if self.sharded.offloading else {}
        values = {**tensors, **late, **extra}
        return cast(dict[str, Any], LateDict(values)) if late else values

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name, as this rank's DTensors."""
        described = state.optimizer_state(seams.unwrapped(optimizer), self._names())
        if self.sharded.offloading:
            described["state"] = self.sharded.offloading.optimizer_state(seams.unwrapped(optimizer))
        return described

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint directory, or begin to. Every rank must call it.

        Raises:
            RuntimeError: the save before, in the background, failed.
            NonFiniteGradientError: the weights to be saved are spoilt; LossSpikeError likewise.
            NonFiniteStateError: they, moments or buffers hold an inf or a NaN.
        """
        if storage_options is not None:
            raise ValueError(
                "storage_options: must be left out, the strategy writes a directory. Remove it."
            )
        if "://" in str(filepath):
            raise ValueError(
                f"{filepath}: must be a path of a file system, the strategy writes to no remote "
                "store. Save to a folder, and copy what lies there."
            )
        began_s = time.perf_counter()
        path = Path(self.broadcast(str(filepath)))
        self.events.refuse_spoilt()
        if self._poison:
            self._poison.refuse(checkpoint)
        if self._resuming and "optimizer_states" in checkpoint:
            checkpoint = self._resuming.described(checkpoint)
            checkpoint[matching.KEY] = self._stepped_by
        self._tell_changed(checkpoint.get("hyper_parameters", {}))
        save = trainer_state.to_save(path, checkpoint)
        # After the run there is no step that would raise what a save in the background failed with.
        runs = self._module.trainer.state.status == TrainerStatus.RUNNING
        if self._saver and runs and sys.exc_info()[0] is None:
            self._saver.start(save, self._hold())
        else:
            self.wait_for_save()
            save.write()
        self.last_save = (path.name, time.perf_counter() - began_s)
        self._newest = path
        if "optimizer_states" in checkpoint:
            self._resumable = path

    def _tell_changed(self, hyper_parameters: Any) -> None:
        names = list(changed(hyper_parameters, "hyper_parameters"))
        if names and self.is_global_zero:
            warnings.warn(
                f"{', '.join(names)}: stored as plain data (a path as text, a member of an enum as "
                "its value, a dataclass as a dictionary, an array as a tensor), and come back as "
                "that. Leave them out by save_hyperparameters(ignore=[...]) where that matters.",
                stacklevel=2,
            )

    def _hold(self) -> Callable[[], None]:
        """Let offloaded state be read while the run goes on; returns what ends it."""
        offloading = self.sharded.offloading
        return offloading.hold(self._staging_bytes) if offloading else lambda: None

    @property
    def _staging_bytes(self) -> int:
        return int(self.config.saving.staging_gib * 2**30)

    def _set_up_saving(self) -> None:
        """Make what writes in the background, where it is wanted. Every rank calls it."""
        if not self.config.saving.background or self._saver is not None:
            return
        # Its collectives meet none of the training's, whatever thread is first.
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._saver = BackgroundSaver(
            cast(Any, group),
            budget_bytes=self._staging_bytes,
            pinned=self.root_device.type == "cuda",
        )

    def wait_for_save(self) -> None:
        """Wait until the save in flight is on the disk. Every rank calls it.

        Raises: what it failed with.
        """
        if self._saver:
            self._saver.wait()

    def _newest_resumable(self) -> Path | None:
        self.wait_for_save()
        return self._resumable

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint directory of ours, or a plain Lightning file.

        Returns: the metadata; weights of a directory are read later, straight into the shards.
        """
        self.wait_for_save()
        path = Path(self.broadcast(str(checkpoint_path)))
        if self.is_global_zero:
            storage.recover(path)
        self.barrier()
        self._loaded = path
        return trainer_state.read(path, weights_only=weights_only, casts=self._casts)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._fitting and "optimizer_states" in checkpoint:
            self._check_stepped_alike(checkpoint)
        self.sharded.reshard()
        offloading = self.sharded.offloading
        with offloading.writing() if offloading else nullcontext({}) as masters:
            trainer_state.load_module(
                checkpoint, self._module, strict=strict, masters=masters, casts=self._casts
            )
        if not self._fitting:
            self._tell_casts()

    @property
    def _fitting(self) -> bool:
        return self._module.trainer.state.fn == TrainerFn.FITTING

    def _check_stepped_alike(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._loaded is not None, "read before its weights are taken"
        settings = matching.check(
            checkpoint, self._stepped_by, self._plain_optimizers, self._names(), self._loaded
        )
        if settings and self.is_global_zero:
            lines = "\n".join(settings)
            warnings.warn(
                f"{lines}\nThe checkpoint's values count. Set others after the resume, such as in "
                "on_train_start.",
                stacklevel=2,
            )

    def _tell_casts(self) -> None:
        told = self._casts.told()
        if told and self.is_global_zero:
            warnings.warn(told, stacklevel=2)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        optimizers, offloading = self._plain_optimizers, self.sharded.offloading
        late = offloading.fresh_moments() if offloading else {}
        trainer_state.load_optimizers(
            checkpoint, optimizers, self._module, self._names(), late, self._casts
        )
        self._tell_casts()
        if offloading:
            offloading.take_steps(optimizers)
        if self._resuming:
            self._resuming.take(checkpoint)
        if self._loaded is not None and storage.is_checkpoint(self._loaded):
            self._resumable = self._loaded

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._resuming is None or not self._module.trainer.training:
            return dataloader
        return self._resuming.prepared(dataloader)

    @override
    def on_train_start(self) -> None:
        if self._resuming:
            self._resuming.start()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:
            return
        remove = partial(storage.remove, Path(filepath), newest=self._newest)
        if self._saver:
            self._saver.afterwards(remove)
        else:
            remove()
