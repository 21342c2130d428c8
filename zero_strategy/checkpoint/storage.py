"""The seam to the disk: a checkpoint is a directory of sharded tensors and one metadata file.

    step-100.ckpt/
      .metadata, __0_0.distcp, ...   torch.distributed.checkpoint: tensors by canonical name
      meta.pt                        everything else, plain data, read with weights_only=True

A save writes beside its target and renames, so the target is never half written and an
existing checkpoint of the same name stays whole until the new one is complete.
"""

import difflib
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

META_FILE = "meta.pt"


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a complete checkpoint of ours."""
    return (path / META_FILE).is_file()


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint directory; every rank calls it with the same path and names.

    Args:
        path: the directory; replaced as a whole if it exists.
        tensors: canonical name -> DTensor, or a tensor equal on all ranks.
        meta: plain data, rank 0's is written.
    Raises: ValueError: the path is a directory that is no checkpoint.
    Cost: collective; each rank writes its shards.
    """
    beside = path.with_name(f".{path.name}.inprogress")

    def begin() -> None:
        if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
            raise ValueError(
                f"{path}: must be a checkpoint or not exist, but is a directory with other files. "
                "Choose another path, or move them away."
            )
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)

    def commit() -> None:
        # The file that makes a directory a checkpoint comes last.
        torch.save(dict(meta), beside / META_FILE)
        _swap(beside, path)

    _on_first_rank(begin)
    dcp.save(dict(tensors), checkpoint_id=beside)
    _on_first_rank(commit)


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run an action on rank 0 and let every rank know how it ended. Collective.

    Raises: the action's exception on rank 0, and a RuntimeError with its text on the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        action()
        return
    failure: list[str | None] = [None]
    try:
        if dist.get_rank() == 0:
            action()
    except Exception as error:
        failure[0] = f"{type(error).__name__}: {error}"
        raise
    finally:
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint: {failure[0]}")


def _swap(beside: Path, path: Path) -> None:
    old = set_aside(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        path.rename(old)
    beside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Where the checkpoint that a save replaces lies until the new one has its name."""
    return path.with_name(f".{path.name}.replaced")


def recover(path: Path) -> None:
    """Bring back the checkpoint that an interrupted save had just moved aside.

    A process killed between the two renames of a save leaves its target missing and the earlier
    checkpoint under another name. Does nothing otherwise.
    """
    if not path.exists() and is_checkpoint(set_aside(path)):
        set_aside(path).rename(path)


def load_meta(path: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint directory. Runs no code from the file.

    Raises: ValueError: the path is no complete checkpoint, or is damaged.
    """
    if not dist.is_initialized():
        recover(path)
    if not is_checkpoint(path):
        raise ValueError(_why_not_a_checkpoint(path))
    with _damage_named(path):
        meta = torch.load(path / META_FILE, map_location="cpu", weights_only=True)
    if not isinstance(meta, dict):
        raise ValueError(_why_not_a_checkpoint(path))
    return meta


def check_exists(path: Path) -> None:
    """Refuse a path under which there is nothing.

    Raises: ValueError: naming the nearest entry of its folder.
    """
    if path.exists():
        return
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    advice = f"Use {path.parent / near[0]}." if near else "Check the path."
    raise ValueError(f"{path}: does not exist, must be a checkpoint. {advice}")


def _why_not_a_checkpoint(path: Path) -> str:
    check_exists(path)
    if path.is_file():
        return (
            f"{path}: is a file, must be a checkpoint directory. Give the directory, or read a "
            'Lightning file by torch.load(path, weights_only=True)["state_dict"].'
        )
    return (
        f"{path}: must be a checkpoint directory with {META_FILE}. The save did not complete, "
        "or this is another program's directory. Choose an earlier checkpoint."
    )


@contextmanager
def _damage_named(path: Path) -> Generator[None, None, None]:
    """Name the checkpoint in whatever error reading a spoilt file ends with."""
    try:
        yield
    except Exception as error:
        raise ValueError(_damage(path, error)) from error


def _damage(path: Path, cause: BaseException) -> str:
    lines = str(cause).splitlines() or [""]
    return (
        f"{path}: cannot be read ({type(cause).__name__}: {lines[0]}), must be whole and as it was "
        "written. Choose an earlier checkpoint."
    )


def stored(path: Path) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of the tensors in a checkpoint directory.

    Raises: ValueError: the directory is damaged.
    """
    with _damage_named(path):
        metadata: Metadata = dcp.FileSystemReader(path).read_metadata()
        entries = metadata.state_dict_metadata
    return {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}


def load(path: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill tensors in place from a checkpoint directory, whatever ranks wrote it.

    Args:
        path: the directory.
        tensors: canonical name -> destination.
        alone: read in this process only, also inside a process group.
    Raises: ValueError: a name is missing, its shape or dtype differs, or a file is damaged.
    Cost: collective unless `alone`; each rank reads what its shards need.
    """
    there = stored(path)
    problems = [f"{n}: not in {path}" for n in tensors if n not in there]
    for name, tensor in tensors.items():
        entry = there.get(name)
        if entry is None:
            continue
        if tuple(entry.size) != tuple(tensor.shape) or entry.properties.dtype != tensor.dtype:
            problems.append(
                f"{name}: stored as {tuple(entry.size)} {entry.properties.dtype}, must be "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
    if problems:
        raise ValueError("\n".join(problems))
    if not tensors:
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.distributed is disabled")
            dcp.load(dict(tensors), checkpoint_id=path, no_dist=alone)
    except CheckpointException as error:
        # Its own text lists a traceback per rank.
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(_damage(path, cause)) from error


def remove(path: Path) -> None:
    """Delete a checkpoint of ours, or a link to one; leaves any other directory alone."""
    if path.is_symlink():
        path.unlink()
    elif is_checkpoint(path):
        doomed = path.with_name(f".{path.name}.deleting")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    elif path.is_file():
        path.unlink()
