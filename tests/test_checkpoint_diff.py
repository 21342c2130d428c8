"""`zs checkpoint diff`: equal is equal in every bit, and what differs is named."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import ranks
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.diff import diff
from zero_strategy.experiments.cli import main


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return {
        "model.a": torch.randn(31, 7, generator=draw),
        "model.b": torch.randn(12, generator=draw).bfloat16(),
        "model.nan": torch.tensor([float("nan"), 0.0]),
        "model.flags": torch.tensor([True, False]),
    }


def save(path: Path, meta: dict[str, Any] | None = None, **changed: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {**tensors(), **{f"model.{name}": value for name, value in changed.items()}}
        kept = {name: value for name, value in state.items() if value is not None}
        storage.save(path, kept, meta or {"step": 3, "rng": torch.arange(4)})
    return path


def save_sharded(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in tensors().items()}
    storage.save(Path(path), shards, {"step": 3, "rng": torch.arange(4)})


def test_the_same_state_is_equal_however_it_is_sharded(tmp_path):
    one, other = save(tmp_path / "one"), tmp_path / "other"
    ranks(2).run(save_sharded, str(other))
    assert list(diff(one, other)) == []
    assert len(storage.contents(other).tensors["model.a"].chunks) == 2


def test_each_kind_of_difference_is_named(tmp_path, capsys):
    one = save(tmp_path / "one")
    moved = tensors()["model.a"].clone()
    moved[3, 2] += 0.5
    moved[9, 0] -= 0.25
    other = save(
        tmp_path / "other",
        {"step": 4, "rng": torch.arange(4) + 1, "more": {"x": 1}},
        a=moved,
        b=tensors()["model.b"].float(),
        nan=torch.tensor([float("nan"), -0.0]),
        flags=None,
        extra=torch.zeros(2),
    )
    assert list(diff(one, other)) == [
        f"model.flags: only in {one}",
        f"model.extra: only in {other}",
        "model.a: 2 of 217 elements differ, by at most 0.5",
        "model.b: (12,) torch.bfloat16 against (12,) torch.float32",
        "model.nan: 1 of 2 elements differ, by at most 0",
        "meta.more: only in the second",
        "meta.rng: another tensor",
        "meta.step: 3 against 4",
    ]
    assert main(["checkpoint", "diff", str(one), str(other)]) == 1
    assert main(["checkpoint", "diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out.endswith("equal, every bit\n")
    assert main(["checkpoint", "diff", str(one), str(tmp_path)]) == 2


def test_a_damaged_checkpoint_is_equal_to_nothing(tmp_path, capsys):
    one, other = save(tmp_path / "one"), save(tmp_path / "other")
    file = other / "tensors-0.safetensors"
    file.write_bytes(file.read_bytes()[:-5] + b"\xff" + file.read_bytes()[-4:])
    for pair in ([one, other], [other, one]):
        assert main(["checkpoint", "diff", *map(str, pair)]) != 0
        assert f"{other}: " in capsys.readouterr().err
