"""The seam to the disk: a checkpoint is a directory of sharded tensors and one manifest.

    step-100.ckpt/
      tensors-0.safetensors, ...   the shards of each rank, tensors by canonical name
      manifest.json                where each is, checksums of all bytes, everything else as JSON

A save writes beside its target and changes places with it, so the target is never half written,
and an existing checkpoint of the same name stays whole until the new one is complete.
"""

import difflib
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero_strategy.checkpoint import codec, files, manifest, room
from zero_strategy.checkpoint.casts import Casts, Pair
from zero_strategy.checkpoint.late import Late, LateLoadPlanner, LateSavePlanner, stand_in
from zero_strategy.checkpoint.shards import ShardReader, ShardWriter, read_tensor, stored_tensors


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a complete checkpoint of ours."""
    return (path / manifest.NAME).is_file()


@final
class Save:
    """A checkpoint that is about to be written; every rank makes it with the same path and names.

    Args:
        path: the directory; replaced as a whole if it exists.
        tensors: canonical name -> DTensor, or a tensor equal on all ranks; late or not.
        meta: plain data, rank 0's is written.
    Raises: ValueError: some metadata has no plain form; names its path.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Tensor | Late], meta: Mapping[str, Any]
    ) -> None:
        self.path = path
        self._described, in_meta = codec.encode(dict(meta))
        self.tensors = {**tensors, **in_meta} if _is_first_rank() else dict(tensors)
        """What this rank is asked for, with tensors of the metadata."""

    def write(
        self, planner: LateSavePlanner | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Write it. Collective; each rank writes its shards.

        Args:
            planner: gives the shards when they are written; None makes one at a time.
            group: of all ranks, with host tensors; None takes the default group.
        Raises: ValueError: the path is a directory that is no checkpoint.
        """
        planner = planner or LateSavePlanner(self.tensors)
        path, beside = self.path, self.path.with_name(f".{self.path.name}.inprogress")

        def begin() -> None:
            if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
                raise ValueError(
                    f"{path}: must be a checkpoint or not exist, but is a directory with other "
                    "files. Choose another path, or move them away."
                )
            _discard(beside)
            room.check_save(path, room.stored_bytes(stand_ins.values()))
            beside.mkdir(parents=True)

        stand_ins = {name: stand_in(tensor) for name, tensor in self.tensors.items()}
        _on_first_rank(begin, group)
        writer = ShardWriter(beside, self._described, commit=lambda: _swap(beside, path))
        try:
            dcp.save(stand_ins, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            # Its own text lists a traceback per rank.
            rank, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeError(
                f"{path}: rank {rank} could not write the checkpoint ({_brief(cause)}). What was "
                "there before is whole."
            ) from error
        finally:
            if _is_first_rank():
                _discard(beside)


def save(path: Path, tensors: Mapping[str, Tensor | Late], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint directory, as `Save` does. Host memory of one shard at a time."""
    Save(path, tensors, meta).write()


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_first_rank(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
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
        dist.broadcast_object_list(failure, src=0, group=group)
    if failure[0] is not None:
        raise RuntimeError(f"rank 0 could not write the checkpoint: {failure[0]}")


def _swap(beside: Path, path: Path) -> None:
    """Give a complete checkpoint its name, and what had the name the other one, or no place.

    Raises: OSError: the name would not last. It is given back to what had it.
    """
    if not os.path.lexists(path):
        back = _renamed(beside, path)
    elif files.exchange(beside, path):
        back = partial(files.exchange, beside, path)
    else:
        back = _moved_aside(beside, path)
    try:
        files.sync_folder(path.parent)
    except OSError:
        back()
        raise
    _discard(set_aside(path))


def _renamed(beside: Path, path: Path) -> Callable[[], object]:
    """Rename, and return what renames back."""
    beside.rename(path)
    return lambda: path.rename(beside)


def _moved_aside(beside: Path, path: Path) -> Callable[[], object]:
    """Exchange two names where the file system cannot do it in one step; return what undoes it."""
    old = set_aside(path)
    _discard(old)
    path.rename(old)

    def back() -> None:
        if path.exists():
            path.rename(beside)
        old.rename(path)

    try:
        beside.rename(path)
    except OSError:
        back()
        raise
    return back


def _discard(path: Path) -> None:
    """Delete whatever has a name, if it can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def set_aside(path: Path) -> Path:
    """Where the checkpoint that a save replaces lies until the new one has its name."""
    return path.with_name(f".{path.name}.replaced")


def recover(path: Path) -> None:
    """Bring back the checkpoint that an interrupted save had just moved aside.

    A process killed between the two renames of a save leaves its target missing and the earlier
    checkpoint, or file, under another name. Does nothing otherwise.
    """
    old = set_aside(path)
    if not path.exists() and (is_checkpoint(old) or old.is_file()):
        old.rename(path)


def load_meta(path: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint directory. Runs no code from the file.

    Raises: ValueError: the path is no complete checkpoint, or is damaged.
    """
    if not dist.is_initialized():
        recover(path)
    if not is_checkpoint(path):
        raise ValueError(why_not_a_checkpoint(path))
    with damage_named(path):
        there = manifest.Manifest.read(path)
        meta = codec.decode(there.meta, lambda name: read_tensor(path, there, name))
    if not isinstance(meta, dict):
        raise ValueError(why_not_a_checkpoint(path))
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


def why_not_a_checkpoint(path: Path) -> str:
    """Return an error's text for a path that is no checkpoint."""
    check_exists(path)
    if path.is_file():
        return (
            f"{path}: is a file, must be a checkpoint directory. Give the directory, or read a "
            'Lightning file by torch.load(path, weights_only=True)["state_dict"].'
        )
    return (
        f"{path}: must be a checkpoint directory with {manifest.NAME}. The save did not complete, "
        "or this is another program's directory. Choose an earlier checkpoint."
    )


@contextmanager
def damage_named(path: Path) -> Generator[None, None, None]:
    """Name the checkpoint in whatever error reading a spoilt file ends with."""
    try:
        yield
    except Exception as error:
        raise ValueError(_damage(path, error)) from error


def _damage(path: Path, cause: BaseException) -> str:
    return (
        f"{path}: cannot be read ({_brief(cause)}), must be whole and as it was written. Choose an "
        "earlier checkpoint."
    )


def _brief(cause: BaseException) -> str:
    lines = str(cause).splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"


def stored(path: Path) -> dict[str, TensorStorageMetadata]:
    """Names, shapes and dtypes of the tensors in a checkpoint directory.

    Raises: ValueError: the directory is damaged.
    """
    return dict(stored_tensors(contents(path)))


def contents(path: Path) -> manifest.Manifest:
    """Return what a checkpoint directory says of itself.

    Raises: ValueError: there is none, or it is damaged.
    """
    with damage_named(path):
        return manifest.Manifest.read(path)


def read(path: Path, there: manifest.Manifest, name: str) -> Tensor:
    """Read one whole tensor in this process alone.

    Raises: ValueError: the directory is damaged.
    """
    with damage_named(path):
        return read_tensor(path, there, name)


def load(path: Path, tensors: Mapping[str, Tensor | Late], casts: Casts) -> None:
    """Fill tensors in place from a checkpoint directory, whatever ranks wrote it.

    Args:
        path: the directory.
        tensors: canonical name -> destination, late or not.
        casts: decides where a dtype differs.
    Raises: ValueError: a name is missing, its shape or dtype does not fit, or a file is damaged.
    Cost: collective; each rank reads what its shards need.
    """
    whole = contents(path)
    there = stored_tensors(whole)
    stand_ins = {name: stand_in(tensor) for name, tensor in tensors.items()}
    problems = [f"{n}: not in {path}" for n in tensors if n not in there]
    if problems:
        raise ValueError("\n".join(problems))
    casts.check(_pair(n, there[n], tensor) for n, tensor in stand_ins.items())
    if not tensors:
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.distributed is disabled")
            planner = LateLoadPlanner(tensors)
            reader = ShardReader(path, whole)
            dcp.load(stand_ins, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        # Its own text lists a traceback per rank.
        cause, _ = next(iter(error.failures.values()))
        raise ValueError(_damage(path, cause)) from error


def _pair(name: str, there: TensorStorageMetadata, here: Tensor) -> Pair:
    return Pair(name, tuple(there.size), there.properties.dtype, tuple(here.shape), here.dtype)


def remove(path: Path, *, newest: Path | None = None) -> None:
    """Delete a checkpoint of ours, or a link to one; leaves any other directory alone.

    Args:
        path: the directory.
        newest: the checkpoint that was saved last. Where it is another one and cannot be opened,
            nothing is deleted, with a warning: the older may be all there is.
    """
    if newest is not None and newest != path:
        try:
            contents(newest)
        except ValueError as error:
            warnings.warn(f"{path} is kept, since the newest one is damaged. {error}", stacklevel=2)
            return
    if path.is_symlink():
        path.unlink()
    elif is_checkpoint(path):
        doomed = path.with_name(f".{path.name}.deleting")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
    elif path.is_file():
        path.unlink()
