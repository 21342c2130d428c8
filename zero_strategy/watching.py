"""The strategy's hooks that tell where a run is, and see to it that ranks stay together."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from zero_strategy import seams
from zero_strategy.checkpoint import room, storage
from zero_strategy.guarding import GuardedStrategy
from zero_strategy.guards.flow import FlowCheck
from zero_strategy.guards.heartbeat import ENDING, HangWatch, watch_run
from zero_strategy.guards.progress import PROGRESS
from zero_strategy.guards.restarts import check_restarts
from zero_strategy.guards.uneven import EvenLoader, check_epochs, even_loader, weighted

_FP32_BYTES = 4


class WatchedStrategy(GuardedStrategy):
    """The part of `ZeroStrategy` that notices ranks which hang, part or run out of batches."""

    def __init__(self, **lightning: Any) -> None:
        super().__init__(**lightning)
        self._hang_watch: HangWatch | None = None
        self._flow: FlowCheck | None = None
        self._epochs_unchecked = False
        self._padded_anew: list[EvenLoader] = []
        self._padded: EvenLoader | None = None
        self._loss_weight = 1.0

    def alive(self) -> None:
        """Tell the hang guard that this rank works, in a phase of your own that takes long."""
        PROGRESS.made += 1

    def check_room(self, path: str | Path, *, weights_only: bool = False) -> None:
        """Refuse a run whose disk does not hold its next checkpoint. Every rank must call it.

        Args:
            path: of a checkpoint, or of the folder in which they will lie.
            weights_only: whether they hold no optimizer state.
        Raises: NoRoomError: with the sum.
        """
        self.sharded.reshard()
        optimizers = [] if weights_only else self._plain_optimizers
        size = room.planned_size(
            [t for t in self._module.state_dict(keep_vars=True).values() if isinstance(t, Tensor)],
            optimizers,
            trained_itemsize=_FP32_BYTES if self.sharded.offloading else None,
        )
        said, refused = "", ""
        if self.is_global_zero:
            path = Path(path)
            folder = path.parent if storage.is_checkpoint(path) else path
            found = folder.glob("*") if folder.is_dir() else []
            try:
                earlier = any(map(storage.is_checkpoint, found))
                said = room.check_run(path, size, another_is_there=earlier)
            except room.NoRoomError as error:
                refused = str(error)
        refused = self.broadcast(refused)
        if refused:
            raise room.NoRoomError(refused)
        if said:
            warnings.warn(said, stacklevel=2)

    def _check_disks(self, trainer: pl.Trainer) -> None:
        """Ask for room wherever a callback of Lightning's will save."""
        for callback in cast(Any, trainer).callbacks:
            saves = isinstance(callback, ModelCheckpoint) and (
                callback.save_top_k != 0 or callback.save_last
            )
            if saves and callback.dirpath:
                self.check_room(callback.dirpath, weights_only=callback.save_weights_only)

    def _begin_watch(self, trainer: pl.Trainer) -> None:
        """Look out for hangs and, where asked for, for code that depends on the rank. Collective.

        Cost: as of `watch_run`.
        """
        self._end_watch()
        units, guards = self.sharded.units, self.config.guards
        seams.around_fetches(
            trainer,
            before=lambda: PROGRESS.mark("loading data"),
            after=lambda: PROGRESS.mark("hooks"),
        )
        if guards.check_flow and self._control is not None:
            self._flow = FlowCheck(units, self._control)
        if guards.hang_timeout is not None:
            self._hang_watch = watch_run(
                guards.hang_timeout.total_seconds(),
                step=lambda: trainer.global_step,
                units=units,
                group=self._control,
            )

    def _end_watch(self) -> None:
        if self._hang_watch is not None:
            self._hang_watch.stop()
        if self._flow is not None:
            self._flow.detach()
        self._hang_watch = self._flow = None

    @override
    def setup_environment(self) -> None:
        check_restarts()
        super().setup_environment()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._hang_watch is not None and isinstance(exception, Exception):
            self._hang_watch.failed(exception)

    # Loaders of different lengths.

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if not self._module.trainer.training:
            return loader
        policy = self.config.guards.uneven
        even = even_loader(loader, policy, self._control)
        self._epochs_unchecked = True
        if policy == "pad" and isinstance(even, EvenLoader):
            self._padded_anew.append(even)
        return even

    def _check_epochs(self) -> None:
        trainer = self._module.trainer
        if self._control is not None:
            check_epochs(trainer.num_training_batches, self.config.guards.uneven, self._control)
        self._padded = next(iter(self._padded_anew), None)
        self._padded_anew = []
        if self._padded is not None and trainer.train_dataloader is not self._padded:
            raise ValueError(
                "zero.guards.uneven = 'pad': must be 'error' or 'drop' where a step takes batches "
                "of several loaders, since a loss has one weight. Use 'drop'."
            )

    # Where a run is.

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        PROGRESS.begin_batch()
        if self._epochs_unchecked:
            self._epochs_unchecked = False
            self._check_epochs()
        self._loss_weight = 1.0 if self._padded is None else self._padded.take_weight()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._flow.step() if self._flow else nullcontext():
            return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        PROGRESS.mark("backward")
        loss = weighted(closure_loss, self._loss_weight)
        return super().backward(loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._flow:
            self._flow.after_backward()
        PROGRESS.mark("after the backward")

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        PROGRESS.mark("hooks")
        return output

    @override
    def on_train_end(self) -> None:
        PROGRESS.mark(ENDING)

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        PROGRESS.mark("saving")
        super().save_checkpoint(checkpoint, filepath, storage_options)
        PROGRESS.mark("hooks")

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        PROGRESS.mark("loading a checkpoint")
        return super().load_checkpoint(checkpoint_path, weights_only)
