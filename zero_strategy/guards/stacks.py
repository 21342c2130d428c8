"""Where a thread is, read from another one: its stack as text, and whether it waits for ranks."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

# Code that calls into C on behalf of its caller says nothing of what is waited for.
_TRANSPARENT = ("torch._ops", "torch.utils._contextlib", "contextlib")
_COLLECTIVE = "torch.distributed"
_OWN_WAITS = ("zero_strategy.control", "zero_strategy.guards.uneven")
_AUTOGRAD = "torch.autograd"
# torchrun's wrapper of a program's main function surrounds everything, and waits for nothing.
_LAUNCHER = "torch.distributed.elastic"
_SHOWN_CALLS = 24


def stack_text(thread: int) -> str:
    """Return the inner calls of a thread, innermost last, and those of torch's own threads.

    Args:
        thread: its identifier, as `threading.get_ident` gives it there.
    """
    frames = _stacks(thread)
    titles = ["", *["in a thread of torch:\n"] * (len(frames) - 1)]
    texts = ("".join(traceback.format_stack(frame, limit=_SHOWN_CALLS)) for frame in frames)
    return "".join(title + text for title, text in zip(titles, texts, strict=True))


def waits_for_ranks(thread: int) -> bool:
    """Whether a thread is inside a collective, or waits for the end of one."""
    main, *others = _stacks(thread) or [None]
    if main is None:
        return False
    # On an accelerator the backward, with its collectives, runs in torch's threads.
    return _is_collective(main) or (
        _module(main).startswith(_AUTOGRAD) and any(map(_is_collective, others))
    )


def innermost_call(thread: int) -> str:
    """Return the function that a thread is in."""
    frame = sys._current_frames().get(thread)
    return frame.f_code.co_name if frame else "?"


def handles_exception(thread: int) -> bool:
    """Whether a thread is handling an exception."""
    caught = sys._current_exceptions().get(thread)
    # Before Python 3.12 it is a triple.
    return bool(caught[0] if isinstance(caught, tuple) else caught)


def _stacks(thread: int) -> list[FrameType]:
    """Innermost frames: of the thread, then of threads that Python did not start."""
    frames = sys._current_frames()
    known = {t.ident for t in threading.enumerate()}
    own = [frames[thread]] if thread in frames else []
    return own + [frame for ident, frame in frames.items() if ident not in {*known, thread}]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_collective(frame: FrameType | None) -> bool:
    while frame is not None and _module(frame) in _TRANSPARENT:
        frame = frame.f_back
    name = _module(frame) if frame else ""
    return name in _OWN_WAITS or (name.startswith(_COLLECTIVE) and not name.startswith(_LAUNCHER))
