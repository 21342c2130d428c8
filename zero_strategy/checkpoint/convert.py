"""A checkpoint directory of ours from one of another program, without running what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint import CheckpointException

from zero_strategy.checkpoint import storage, trainer_state
from zero_strategy.checkpoint.foreign import dcp, deepspeed, lightning_file, zero_files
from zero_strategy.checkpoint.foreign.found import Found
from zero_strategy.checkpoint.foreign.unpickle import RefusedError

Kind = Literal["dcp", "lightning", "deepspeed"]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What was written."""

    kind: Kind
    num_tensors: int
    num_bytes: int
    """Of all tensors."""
    notes: Sequence[str]
    """What was not there, or is not carried over; a line each."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    kind: Kind | None = None,
    weights_only: bool = False,
    stored_dtypes: bool = False,
    unsafe_pickle: bool = False,
) -> Converted:
    """Write another program's checkpoint as a directory that a run resumes from.

    Args:
        source: a directory of `torch.distributed.checkpoint`, also of Lightning's FSDP strategies;
            a Lightning file; or a directory of DeepSpeed's ZeRO stages 1 to 3.
        target: the directory to write, which must not exist.
        kind: what the source is; None looks at it.
        weights_only: leave optimizer states out.
        stored_dtypes: keep frozen weights in the 16 bits that DeepSpeed cast them to; otherwise
            they become float32, which changes no value.
        unsafe_pickle: run what the source's pickles say, in a process of its own.

    Raises:
        ValueError: the source is none of these, is damaged, or refers to what is no plain data,
            which is named; or the target exists or cannot be written.

    Cost: one process, no collective, no GPU. Memory of the largest tensor, and of what the
        checkpoint keeps beside weights and moments.

    Example:
        >>> convert("lightning_logs/last.ckpt", "last-converted.ckpt").kind
        'deepspeed'
    """
    if _URL.match(str(source)):
        raise ValueError(
            f"source = '{source}': must be a path. Download it first; what comes from elsewhere is "
            "not run, whatever the options."
        )
    source, target = Path(source), Path(target)
    storage.check_exists(source)
    _check_target(source, target)
    if unsafe_pickle:
        return _in_own_process(source, target, kind, weights_only, stored_dtypes)
    return run(source, target, kind, weights_only, stored_dtypes, unsafe=False)


def run(
    source: Path,
    target: Path,
    kind: Kind | None,
    weights_only: bool,
    stored_dtypes: bool,
    *,
    unsafe: bool,
) -> Converted:
    """Convert in this process; `convert` has looked at the paths."""
    kind = kind or kind_of(source)
    found = _read(source, kind, weights_only, stored_dtypes, unsafe=unsafe)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*assuming the intent is to save in a single process"
            )
            trainer_state.to_save(target, found.checkpoint).write()
    except RuntimeError as error:
        refused = _refused_while_saved(error)
        raise ValueError(f"{source}: {refused}." if refused else str(error)) from error
    tensors = storage.contents(target).tensors
    return Converted(
        kind=kind,
        num_tensors=len(tensors),
        num_bytes=sum(entry.num_bytes for entry in tensors.values()),
        notes=found.notes,
    )


def _refused_while_saved(error: RuntimeError) -> RefusedError | None:
    """Return why a tensor could not be read when its turn came, if that was it."""
    failed = error.__cause__
    causes = failed.failures.values() if isinstance(failed, CheckpointException) else ()
    return next((cause for cause, _ in causes if isinstance(cause, RefusedError)), None)


def kind_of(source: Path) -> Kind:
    """Return what a path is, by the names of its files.

    Raises:
        ValueError: none of the kinds.
    """
    if source.is_file():
        return "lightning"
    if storage.is_checkpoint(source):
        raise ValueError(f"{source}: is a checkpoint directory already. Use it as it is.")
    if (source / dcp.METADATA).exists():
        return "dcp"
    folders = [source, *(path for path in source.iterdir() if path.is_dir())]
    if (source / zero_files.LATEST).exists() or any(map(zero_files.has_rank_files, folders)):
        return "deepspeed"
    raise ValueError(
        f"{source}: must be a file that a Trainer saved, a directory with {dcp.METADATA} that "
        "torch.distributed.checkpoint wrote, or one of DeepSpeed's with *_optim_states.pt in a "
        "folder. Choose another."
    )


def _read(
    source: Path, kind: Kind, weights_only: bool, stored_dtypes: bool, *, unsafe: bool
) -> Found:
    try:
        match kind:
            case "dcp":
                return dcp.read(source, weights_only=weights_only, unsafe=unsafe)
            case "lightning":
                return lightning_file.read(source, weights_only=weights_only, unsafe=unsafe)
            case "deepspeed":
                return deepspeed.read(
                    source, weights_only=weights_only, stored_dtypes=stored_dtypes, unsafe=unsafe
                )
    except RefusedError as error:
        raise ValueError(f"{source}: {error}.") from error
    except Exception as error:
        # What a crafted file makes of a reader that looks for something else.
        lines = str(error).splitlines() or [""]
        raise ValueError(
            f"{source}: cannot be read as {kind} ({type(error).__name__}: {lines[0]}), must be "
            "whole and as it was written."
        ) from error


def _check_target(source: Path, target: Path) -> None:
    inside = source.resolve() in (target.resolve(), *target.resolve().parents)
    if inside or target.is_symlink() or (target.exists() and not _is_empty_folder(target)):
        raise ValueError(
            f"target = '{target}': must not exist, nor lie in the source. Use "
            f"{source.with_name(f'{source.stem}-converted.ckpt')}."
        )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _in_own_process(
    source: Path, target: Path, kind: Kind | None, weights_only: bool, stored_dtypes: bool
) -> Converted:
    """Whatever the pickles do, they do it elsewhere, and what is read back is a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        request = [str(source), str(target), kind, weights_only, stored_dtypes, str(answer)]
        module = "zero_strategy.checkpoint.foreign.unsafe"
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(request)],
            check=False,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0 or not answer.is_file():
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ValueError(lines[-1])
        told = json.loads(answer.read_bytes())
    storage.contents(target)
    return Converted(**told)
