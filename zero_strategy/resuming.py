"""Where a run goes on that resumes: random states, positions in the data, the step in progress.

A checkpoint describes a run as it stood after an optimizer step, since weights and optimizer state
change nowhere else. A save between two steps stores what is there. A save inside a step (in the
middle of accumulation, or because an exception or a signal ended a micro-batch) stores what was
there before the step's first batch was asked for: random states, positions and Lightning's counts.
The resumed run takes the step again from its first micro-batch, which makes the same gradients
without storing any.

Random states are given back as late as the resumed run needs them, so that nothing in between can
draw from them: before its first batch is asked for where an epoch is in progress, and before the
hooks of an epoch's start where one is about to start. What evaluation and loaders draw is no part
of them (`checkpoint/random_state.py`).
"""

from __future__ import annotations

import dataclasses
import json
import warnings
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from zero_strategy import seams
from zero_strategy.checkpoint import codec
from zero_strategy.checkpoint.random_state import RandomState, apart, stream_seed
from zero_strategy.control import gather_alike
from zero_strategy.data.loader import ResumableLoader
from zero_strategy.data.position import GoesOn, Order, Position, can_go_on, that_goes_on
from zero_strategy.protocols import KeepsPosition

KEY = "resume"
"""Of the checkpoint's dictionary: what this file stores."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """A moment between two optimizer steps, on one rank.

    Attributes:
        random: training's random states.
        loaders: the position of each training loader, None where it cannot tell.
        trained: micro-batches.
        in_epoch: the first batch of the epoch was asked for, so the hooks of its start are past.
    """

    random: RandomState
    loaders: list[dict[str, Any] | None]
    trained: seams.BatchesTrained
    in_epoch: bool


@final
class Resuming:
    """Knows of one fit where a resumed run would go on, and lets the fit itself go on.

    Args:
        trainer: about to fit.
        device: that is trained on.
        group: the control group, or None for a single process.
    """

    def __init__(
        self, trainer: Any, *, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._trainer = trainer
        self._device = device
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._world_size = 1 if group is None else dist.get_world_size(group)
        self._before_step: ResumePoint | None = None
        """Before the first batch of the step in progress, or of the last one, was asked for."""
        self._asked_at = -1
        """Micro-batches trained in all when a batch was last asked for."""
        self._of_training: RandomState | None = None
        """Training's random states while others are in force."""
        self._reads_ahead = False
        self._taken: tuple[dict[str, Any] | None] | None = None
        """What the run resumes from, until it starts; None inside: nothing of it was stored."""
        seams.before_batch(trainer, self._before_batch)
        seams.around_validation(trainer, self._validation)
        seams.around_epoch_iterators(trainer, lambda: apart(self._seed("epoch")))
        seams.without_replay_warning(trainer)

    # What is saved.

    def prepared(self, loader: Any) -> Any:
        """Return a training loader as one that can go on, or as it is."""
        if isinstance(loader, ResumableLoader):
            loader.order.goes_on_from = lambda: self._consumed(loader)
            return loader
        if isinstance(loader, KeepsPosition) or not can_go_on(loader):
            return loader
        return that_goes_on(
            loader,
            name=_name(loader),
            rank=self._rank,
            world_size=self._world_size,
            new_seed=self._pass_seed,
        )

    def described(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the Trainer's checkpoint dictionary with what a resumed run needs. Collective.

        Cost: a gather on the CPU, about 14 KB per rank.
        """
        if self._asked_at < 0 and self._taken and self._taken[0] is not None:
            # Nothing was done since the checkpoint that the run resumes from.
            return {**checkpoint, KEY: self._taken[0]}
        point = self._point()
        if point is self._before_step:
            seams.rewind(checkpoint["loops"], point.trained)
        if point.in_epoch:
            seams.leave_epoch_open(checkpoint["loops"])
        own = {"random": point.random.plain(), "loaders": point.loaders}
        kept = {
            "in_epoch": point.in_epoch,
            "ranks": _gathered(own, self._group),
            "metrics": seams.epoch_metrics(self._trainer) if point.in_epoch else [],
        }
        return {**checkpoint, KEY: kept}

    def _point(self) -> ResumePoint:
        """Where a run would go on that resumes from what is saved now."""
        trained = seams.batches_trained(self._trainer)
        lost = self._accumulated(trained) + (self._asked_at == trained.in_all)
        if not lost or self._before_step is None:
            in_epoch = trained.in_epoch > 0 and not trained.at_end
            return self._here(trained, in_epoch=in_epoch)
        for loader in seams.training_loaders(self._trainer):
            if isinstance(loader, KeepsPosition) and not isinstance(loader, ResumableLoader):
                self._warn(
                    f"{_name(loader)} stores a position of its own, which is {lost} batches past "
                    "the last optimizer step: a run that resumes from this checkpoint leaves these "
                    "out. Save after an optimizer step."
                )
                return self._here(trained, in_epoch=True)
        return self._before_step

    def _accumulated(self, trained: seams.BatchesTrained) -> int:
        """Micro-batches of which there is nothing but gradients."""
        if trained.at_end:
            return 0
        return trained.in_epoch % self._trainer.accumulate_grad_batches

    def _here(self, trained: seams.BatchesTrained, *, in_epoch: bool) -> ResumePoint:
        return ResumePoint(
            random=self._of_training or RandomState.now(self._device),
            loaders=[
                # One batch too far where a batch is asked for ahead: that is no position.
                None if self._reads_ahead else _position(loader, at_end=trained.at_end)
                for loader in seams.training_loaders(self._trainer)
            ],
            trained=trained,
            in_epoch=in_epoch,
        )

    def _consumed(self, loader: ResumableLoader) -> int:
        """What the loader's own state is to say."""
        loaders = seams.training_loaders(self._trainer)
        entries = self._point().loaders
        found = [e for one, e in zip(loaders, entries, strict=True) if one is loader and e]
        return found[0]["consumed"] if found else loader.order.consumed

    # Streams that training's does not depend on.

    def _seed(self, *use: int | str) -> int:
        """The seed of such a stream; a resumed run finds the same."""
        trained = seams.batches_trained(self._trainer).in_all
        return stream_seed(*use, torch.initial_seed(), trained)

    def _pass_seed(self, order: Order) -> int:
        loaders = seams.training_loaders(self._trainer)
        orders = [loader.order_shown for loader in loaders if isinstance(loader, GoesOn)]
        return self._seed("pass", orders.index(order))

    @contextmanager
    def _validation(self) -> Generator[None, None, None]:
        with apart(self._seed("validation"), self._device) as outer:
            before = self._of_training
            self._of_training = before or outer
            try:
                yield
            finally:
                self._of_training = before

    # Going on.

    def take(self, checkpoint: Mapping[str, Any]) -> None:
        """Note what the fit is to go on from once it starts."""
        self._taken = (checkpoint.get(KEY),)

    def start(self) -> None:
        """Go on from what was taken. Every rank calls it, before the first epoch starts."""
        self._reads_ahead = seams.reads_ahead(self._trainer)
        if self._taken is None:
            return
        (stored,), self._taken = self._taken, None
        if stored is None:
            self._warn(
                "the checkpoint holds no random states and no position in the data: random draws "
                "differ from those of the run that was saved, and an epoch in progress starts "
                "again. Save it by this version of the strategy."
            )
            return
        state = self._restored([rank["random"] for rank in stored["ranks"]])
        if stored["in_epoch"]:
            self._of_training = state
            seams.schedule_accumulation(self._trainer)
            self._warn_of_metrics(stored["metrics"])
        else:
            state.restore(self._device)
            if seams.batches_trained(self._trainer).at_end:
                seams.start_next_epoch(self._trainer)
        self._read_on([rank["loaders"] for rank in stored["ranks"]], in_epoch=stored["in_epoch"])

    def _warn_of_metrics(self, names: Sequence[str]) -> None:
        if names:
            self._warn(
                f"{', '.join(names)}: over the epoch that goes on, only the batches from here on "
                "count, so that what looks at them at its end (early stopping, ModelCheckpoint, a "
                "plateau scheduler) may decide otherwise. Let these look at a metric of "
                "validation, or save at the end of an epoch."
            )

    def _restored(self, ranks: Sequence[dict[str, Any]]) -> RandomState:
        kind, stored = self._device.type, ranks[self._rank % len(ranks)]
        if len(ranks) != self._world_size:
            changed = f"saved on {len(ranks)} ranks, resumed on {self._world_size}"
        elif kind != "cpu" and stored["device"] is None:
            changed = f"saved on the CPU, resumed on {kind}"
        else:
            return RandomState.from_plain(stored)
        self._warn(
            f"{changed}: random draws such as dropout differ from those of the run that was saved; "
            "the order of samples goes on."
        )
        # Not as this process has them, which the run that was saved has drawn from already.
        with apart(stream_seed(zlib.crc32(stored["cpu"]), self._rank), self._device):
            return RandomState.now(self._device)

    def _before_batch(self) -> None:
        if self._of_training is not None:
            self._of_training.restore(self._device)
            self._of_training = None
            seams.end_restart(self._trainer)
        trained = seams.batches_trained(self._trainer)
        if self._before_step is None or not self._accumulated(trained):
            self._before_step = self._here(trained, in_epoch=True)
        self._asked_at = trained.in_all

    def _read_on(self, ranks: Sequence[Sequence[dict[str, Any] | None]], *, in_epoch: bool) -> None:
        loaders = seams.training_loaders(self._trainer)
        done = seams.batches_trained(self._trainer).in_epoch if in_epoch else 0
        for index, loader in enumerate(loaders):
            entries = [own[index] if index < len(own) else None for own in ranks]
            problem = self._go_on(loader, entries, alone=len(loaders) == 1, done=done)
            if problem and done:
                self._warn(
                    f"{_name(loader)}: {problem}, so it starts the epoch again: its first {done} "
                    "batches come twice, as many at the end not at all. Use "
                    "zero_strategy.data.TokenDataModule, a map-style dataset in torch's DataLoader "
                    "or a loader with state_dict and load_state_dict."
                )
            elif self._reads_ahead and done:
                self._warn(
                    f"{_name(loader)}: has no length, so that a batch is asked for ahead; the one "
                    "that was not trained yet when the run was saved is left out. Give it a "
                    "__len__, or save at the end of an epoch."
                )
        window = self._trainer.accumulate_grad_batches
        trained = seams.batches_trained(self._trainer)
        if in_epoch and (lost := self._accumulated(trained)):
            self._warn(
                f"goes on at micro-batch {lost} of the {window} of an optimizer step: this step "
                f"takes {window - lost}. Resume with the batch size per step of the run that was "
                "saved, or at the end of an epoch."
            )

    def _go_on(
        self, loader: Any, ranks: Sequence[dict[str, Any] | None], *, alone: bool, done: int
    ) -> str | None:
        """Let a loader go on; returns why it cannot."""
        entries = [entry for entry in ranks if entry is not None]
        if isinstance(loader, ResumableLoader) and entries:
            loader.load_state_dict(entries[0])
            if done and alone:
                samples = done * entries[0]["global_batch"]
                batches = samples // loader.global_batch
                window = self._trainer.accumulate_grad_batches
                seams.recount(self._trainer, batches // window * window)
        elif isinstance(loader, GoesOn) and entries:
            order = loader.order_shown
            positions = [Position(**entry) for entry in entries]
            divided_anew = (positions[0].world_size, positions[0].batch_size) != order.division
            if divided_anew and not alone:
                return "several loaders go on with the ranks and batch sizes that were saved alone"
            problem = order.go_on(positions)
            if problem is None and divided_anew and done:
                seams.recount(self._trainer, order.num_shown)
            return problem
        elif isinstance(loader, GoesOn):
            return "the checkpoint holds no position of it"
        elif not isinstance(loader, KeepsPosition):  # pyright: ignore[reportGeneralTypeIssues]
            return "it cannot go on in the middle of an epoch"
        return None

    def _warn(self, text: str) -> None:
        if self._rank == 0:
            warnings.warn(text, stacklevel=3)


def _position(loader: Any, *, at_end: bool) -> dict[str, Any] | None:
    if isinstance(loader, ResumableLoader):
        order = loader.order
        return {**order.state_at(order.consumed), "global_batch": loader.global_batch}
    if isinstance(loader, GoesOn):
        return dataclasses.asdict(loader.order_shown.position(at_end=at_end))
    return None


def _name(loader: Any) -> str:
    kind = type(loader).__name__
    if isinstance(loader, DataLoader):
        return f"training loader {kind}({type(loader.dataset).__name__})"
    return f"training loader {kind}"


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Everybody's plain data on rank 0 in rank order, nothing elsewhere. Collective."""
    if group is None:
        return [value]
    data = np.frombuffer(json.dumps(codec.encode(value)[0]).encode(), dtype=np.uint8).copy()
    sizes = gather_alike(torch.tensor([data.size]), group)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: data.size] = torch.from_numpy(data)
    first = dist.get_rank(group) == 0
    everybodys = [torch.empty_like(padded) for _ in sizes] if first else None
    dist.gather(padded, everybodys, dst=0, group=group)
    return [
        codec.decode(json.loads(bytes(one[: int(size)].tolist())), _no_tensor)
        for one, size in zip(everybodys or [], sizes, strict=False)
    ]


def _no_tensor(name: str) -> Any:
    raise AssertionError(f"{name}: random states and positions hold no tensors")
