"""Every place where the strategy reaches past Lightning's hooks, in one file.

Each is an attribute set on one object, never on a class, and each says what Lightning would do
otherwise. An upgrade of Lightning has this page to check; `tests/test_seams.py` does.
"""

from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


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


def request_stop(trainer: Any) -> None:
    """Make every later check of `trainer.received_sigterm` true."""
    trainer._signal_connector.received_sigterm = True


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
