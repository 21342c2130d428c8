"""Every place where the strategy reaches past Lightning's hooks, in one file.

Each is an attribute set on one object, never on a class, and each says what Lightning would do
otherwise. An upgrade of Lightning has this page to check; `tests/test_seams.py` does.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zero_strategy.guards.uneven import EvenLoader
from zero_strategy.protocols import AddsUp, SchedulesAccumulation


def evaluation_loops(trainer: Any) -> list[Any]:
    """The trainer's four loops that evaluate."""
    return [
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
        trainer.fit_loop.epoch_loop.val_loop,
    ]


def without_inference_mode(loop: Any) -> None:
    """Evaluate under `no_grad` instead.

    FSDP2 keeps gathered tensors and writes into them in later steps; tensors made in inference
    mode refuse that, so the first training step after a validation would fail.
    """
    loop.inference_mode = False


def at_end_of_batches(loop: Any, stepped: Callable[[], bool], finish: Callable[[], None]) -> None:
    """Run `finish` once this rank has no batch left, before any hook or metric of the epoch's end.

    Lightning notices the end when the loader stops; the hooks and reductions that follow may hold
    collectives, which must not meet another rank's gathers.

    Args:
        loop: one of `evaluation_loops`.
        stepped: whether a step ran since it was last asked.
        finish: serves the ranks that still have batches.
    """
    kind = type(loop)

    def on_iteration_done() -> None:
        kind.on_iteration_done(loop)
        if not stepped():
            finish()

    def on_run_end() -> Any:
        # The prediction loop tells of no iteration, but does nothing between its last and this.
        finish()
        return kind.on_run_end(loop)

    loop.on_iteration_done = on_iteration_done
    loop.on_run_end = on_run_end


def around_fetches(trainer: Any, *, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call functions before and after a batch is taken from a loader, in every loop.

    Lightning surrounds it by calls to its profiler, which are methods of the loop.
    """
    for loop in (trainer.fit_loop.epoch_loop, *evaluation_loops(trainer)):
        for name, call in (("_on_before_fetch", before), ("_on_after_fetch", after)):
            method = getattr(loop, name)
            # A run before this one may have surrounded it already.
            inner = method.inner if isinstance(method, _After) else method
            setattr(loop, name, _After(call, inner))


class _After(NamedTuple):
    """A method that is called after something else."""

    first: Callable[[], None]
    inner: Callable[[], None]

    def __call__(self) -> None:
        self.first()
        self.inner()


def without_stop_broadcast(
    trainer: Any, on_signal: Callable[[int, FrameType | None], None]
) -> None:
    """Learn of SIGTERM through the control poll.

    Lightning broadcasts a tensor on the accelerator before every micro-batch and waits for it: a
    host sync that forbids any overlap across steps (Lightning issue 20825). Its signal handler
    broadcasts too, from inside the handler.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    trainer._signal_connector._sigterm_notifier_fn = on_signal


def hold_schedules(trainer: Any, held: Callable[[], bool]) -> None:
    """Leave learning rates as they are after an optimizer step that was not taken.

    Lightning steps the schedules of interval "step" after every optimizer step, also one that a
    precision plugin skipped. Those of interval "epoch" are left alone: the epoch has passed.

    Args:
        trainer: of the run.
        held: whether the last step was not taken.
    """
    loop = trainer.fit_loop.epoch_loop
    kind = type(loop)

    def update(interval: str, update_plateau_schedulers: bool) -> None:
        if not (interval == "step" and held()):
            kind.update_lr_schedulers(loop, interval, update_plateau_schedulers)

    loop.update_lr_schedulers = update


def on_requeue_signal(trainer: Any, on_signal: Callable[[int, FrameType | None], None]) -> None:
    """Learn of the signal by which SLURM announces the end of a job's time.

    Lightning saves and requeues from inside the handler, in the middle of whatever collective this
    rank is in. It registers it only under SLURM.
    """
    trainer._signal_connector._slurm_sigusr_handler_fn = on_signal


def requeue(trainer: Any, signum: int) -> None:
    """Save and put the job back into the queue, as Lightning does. Every rank must call it."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signum, None)


def request_stop(trainer: Any) -> None:
    """Make every later check of `trainer.received_sigterm` true."""
    trainer._signal_connector.received_sigterm = True


def before_batch(trainer: Any, action: Callable[[], None]) -> None:
    """Act before each training batch is asked for, when all draws and hooks before it are past.

    Lightning's hooks come after: a dataset may have drawn random numbers by then, and a batch that
    was asked for may never be trained on.
    """
    loop = trainer.fit_loop.epoch_loop
    kind = type(loop)

    def on_before_fetch() -> None:
        action()
        kind._on_before_fetch(loop)

    loop._on_before_fetch = on_before_fetch


def around_validation(trainer: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Validate inside a context while fitting.

    The hooks of a validation come after its loader has drawn a seed for its workers.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    for method in ("run", "increment_progress_to_evaluation_end"):
        _inside(loop, method, context)


def around_epoch_iterators(
    trainer: Any, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Start the training loaders of each epoch inside a context.

    A run that resumes starts those of its first epoch earlier, when it sets its data up.
    """
    _inside(trainer.fit_loop.epoch_loop, "on_run_start", context)


def _inside(loop: Any, method: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
    run = vars(type(loop))[method]

    def run_inside(*args: Any) -> Any:
        with context():
            return run(loop, *args)

    setattr(loop, method, run_inside)


def training_loaders(trainer: Any) -> list[Any]:
    """The loaders of a fit as they are by themselves, in the order in which they are asked."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [loader.loader if isinstance(loader, EvenLoader) else loader for loader in loaders]


def reads_ahead(trainer: Any) -> bool:
    """Whether a batch is asked for while the one before it is trained.

    Lightning does so where the loaders of a fit have no length, to know which batch is the last.
    What a loader tells of its position is then one batch ahead of what was trained.
    """
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher.length is None and "batches" in vars(fetcher)


class BatchesTrained(NamedTuple):
    """How many micro-batches were trained.

    Attributes:
        in_epoch: of the epoch in progress; at its end all of them.
        in_all: since the first run began.
        at_end: the epoch has no batch left.
    """

    in_epoch: int
    in_all: int
    at_end: bool


def batches_trained(trainer: Any) -> BatchesTrained:
    """Count a micro-batch once its `training_step` and optimizer step are done."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    at_end = progress.is_last_batch and progress.current.ready == progress.current.processed
    return BatchesTrained(progress.current.processed, progress.total.processed, at_end)


def rewind(loops: dict[str, Any], to: BatchesTrained) -> None:
    """Let the state of the Trainer's loops, about to be saved, be that of an earlier micro-batch.

    Args:
        loops: `loops` of Lightning's checkpoint dictionary.
        to: what was trained then, in the same epoch.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    counts = ("ready", "started", "processed", "completed")
    progress["current"].update(dict.fromkeys(counts, to.in_epoch))
    progress["total"].update(dict.fromkeys(counts, to.in_all))
    progress["is_last_batch"] = False


def leave_epoch_open(loops: dict[str, Any]) -> None:
    """Let the state of the Trainer's loops, about to be saved, be that inside an epoch.

    Where `max_steps` ends a run, Lightning counts the epoch as done, and a run that goes on would
    leave the rest of its samples out. Does nothing to a state inside an epoch.

    Args:
        loops: `loops` of Lightning's checkpoint dictionary.
    """
    for counts in (loops["fit_loop"]["epoch_progress"][span] for span in ("total", "current")):
        counts["processed"] = counts["completed"] = counts["started"] - 1


def recount(trainer: Any, in_epoch: int) -> None:
    """Count the micro-batches of an epoch in progress anew, before a resumed run goes on with it.

    Lightning would go on with the number of a run of other ranks or another batch size.
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = in_epoch - current.processed
    for count in ("ready", "started", "processed", "completed"):
        setattr(current, count, getattr(current, count) + shift)


def schedule_accumulation(trainer: Any) -> None:
    """Let a run that resumes inside an epoch accumulate as this epoch's start has set it.

    Lightning's scheduler acts at the start of an epoch, which such a run has behind it.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, SchedulesAccumulation):
            steps = callback.get_accumulate_grad_batches(trainer.current_epoch)
            trainer.accumulate_grad_batches = steps


def end_restart(trainer: Any) -> None:
    """Let the epoch that goes on end like any other.

    Lightning counts all of it as restarting, and takes no step of `ReduceLROnPlateau` at its end.
    """
    trainer.fit_loop._restarting = False


def epoch_metrics(trainer: Any) -> list[str]:
    """Names of what adds up over the training epoch that runs: logged values, metric modules."""
    results = trainer.fit_loop.epoch_loop._results.values()
    logged = {result.meta.name for result in results if result.meta.on_epoch}
    modules = trainer.lightning_module.named_modules()
    return sorted(logged) + [name for name, module in modules if isinstance(module, AddsUp)]


def start_next_epoch(trainer: Any) -> None:
    """Let a run that resumes at the end of an epoch start the next one, and run its hooks.

    Where the save was made decides what Lightning would do: leave the hooks of the start out, or
    train a batch more as part of the epoch that is over. Its steps for loggers count on alike.
    """
    fit_loop = trainer.fit_loop
    epoch_loop, epochs = fit_loop.epoch_loop, fit_loop.epoch_progress
    if epochs.total.processed < epochs.total.started:
        epoch_loop._batches_that_stepped += 1
    for counts in (epochs.total, epochs.current):
        counts.ready = counts.processed = counts.completed = counts.started
    for loop in (fit_loop, epoch_loop, epoch_loop.val_loop):
        loop._restarting = False
        loop.reset_restart_stage()


def without_replay_warning(trainer: Any) -> None:
    """Leave it to `resuming.py` to say which loaders start an epoch again.

    Lightning says so of every loader without a `state_dict`.
    """
    loop = trainer.fit_loop.epoch_loop
    kind = type(loop)

    def reset() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended")
            kind.reset(loop)

    loop.reset = reset


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper, or the optimizer itself."""
    inner = vars(optimizer).get("_optimizer")
    return optimizer if inner is None else inner


def log_whole_tensors(module: nn.Module) -> None:
    """Let `self.log` take a DTensor; the logged value is the whole tensor's.

    Lightning would keep the DTensor in `callback_metrics`, where comparing it fails.
    """
    if "log" in vars(module):
        return
    log: Callable[..., None] = module.log  # type: ignore[assignment]

    def log_whole(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log(name, value.full_tensor() if isinstance(value, DTensor) else value, *args, **kwargs)

    vars(module)["log"] = log_whole
