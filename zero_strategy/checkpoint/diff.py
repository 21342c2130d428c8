"""What two checkpoint directories hold that differs, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint import codec, storage
from zero_strategy.checkpoint.manifest import Manifest, TensorEntry
from zero_strategy.checkpoint.verify import verify


def diff(one: str | Path, other: str | Path) -> Iterator[str]:
    """Yield a line for each difference; none where both hold the same, however it is sharded.

    Args:
        one: a checkpoint directory.
        other: another.

    Raises:
        ValueError: one is no checkpoint, or damaged.

    Cost: no collective; reads every byte once, and tensors whose shards have other checksums once
        more; memory of the largest tensor, twice.

    Example:
        >>> list(diff("step-100.ckpt", "step-100-resumed.ckpt"))
        []
    """
    paths = Path(one), Path(other)
    for path in paths:
        _refuse_damaged(path)
    metas = tuple(storage.load_meta(path) for path in paths)
    there = storage.contents(paths[0]), storage.contents(paths[1])
    names = [set(_tensors(manifest)) for manifest in there]
    for path, mine, others in ((paths[0], *names), (paths[1], *reversed(names))):
        for name in sorted(mine - others):
            yield f"{name}: only in {path}"
    for name in sorted(names[0] & names[1]):
        yield from _of_tensor(name, paths, there)
    yield from _of_meta("meta", *metas)


def _refuse_damaged(path: Path) -> None:
    """Checksums stand for bytes only where the bytes are still those that were written."""
    problems = verify(path, deep=True).problems
    if problems:
        more = f" and {len(problems) - 1} more" if problems[1:] else ""
        raise ValueError(
            f"{path}: {problems[0]}{more}; must be as it was written. `zs checkpoint verify "
            "--deep` lists what is damaged; choose another checkpoint."
        )


def _tensors(manifest: Manifest) -> Iterator[str]:
    """Names of tensors that are no part of the plain data."""
    return (name for name in manifest.tensors if not name.startswith(codec.PREFIX))


def _of_tensor(
    name: str, paths: tuple[Path, Path], there: tuple[Manifest, Manifest]
) -> Iterator[str]:
    one, other = (manifest.tensors[name] for manifest in there)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        yield f"{name}: {one.shape} {one.dtype} against {other.shape} {other.dtype}"
        return
    if _sums(one) == _sums(other):
        return
    a, b = (storage.read(path, m, name) for path, m in zip(paths, there, strict=True))
    # Bits, so that a NaN equals itself and zeros of both signs do not.
    differ = (a.flatten().view(torch.uint8) != b.flatten().view(torch.uint8)).view(-1, a.itemsize)
    places = differ.any(dim=1)
    if places.any():
        most = float((a.flatten()[places].double() - b.flatten()[places].double()).abs().max())
        count = int(places.sum())
        yield f"{name}: {count} of {a.numel()} elements differ, by at most {most:.3g}"


def _sums(entry: TensorEntry) -> list[Any]:
    """What identifies a tensor's bytes where it is cut in one way."""
    return sorted((chunk.offset, chunk.shape, chunk.checksums) for chunk in entry.chunks)


def _of_meta(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            if key not in one or key not in other:
                yield f"{path}.{key}: only in the {'second' if key not in one else 'first'}"
            else:
                yield from _of_meta(f"{path}.{key}", one[key], other[key])
    elif isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _of_meta(f"{path}[{index}]", *pair)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield f"{path}: another tensor"
    elif type(one) is not type(other) or one != other:
        yield f"{path}: {_shown(one)} against {_shown(other)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
