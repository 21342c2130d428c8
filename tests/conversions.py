"""What tests of conversions share: a state, how others save it, and what ours then holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.zero_files import Trained
from zero_strategy.checkpoint import storage
from zero_strategy.checkpoint.verify import verify

SLOTS = ("exp_avg", "exp_avg_sq")
GROUPS = (["a", "norm", "layers.0.w", "layers.1.w"], ["layers.0.b", "one", "layers.1.b"])
SHAPES = {
    "a": (7, 5),
    "norm": (5,),
    "layers.0.w": (5, 11),
    "layers.0.b": (11,),
    "layers.1.w": (3, 3, 2),
    "layers.1.b": (2,),
    "one": (1,),
    "frozen.w": (5, 3),
    "frozen.b": (3,),
    "frozen.empty": (0, 4),
}


def trained() -> Trained:
    """Odd sizes, two groups, a tied weight, frozen weights, buffers."""
    draw = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    # What is frozen was never more exact than the module.
    weights |= {n: w.bfloat16().float() for n, w in weights.items() if n.startswith("frozen")}
    slots = {
        name: {slot: torch.randn(SHAPES[name], generator=draw) for slot in SLOTS}
        for group in GROUPS
        for name in group
    }
    settings = [{"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": d} for d in (0.1, 0.0)]
    return Trained(
        weights=weights,
        slots=slots,
        groups=[{**s, "params": names} for s, names in zip(settings, GROUPS, strict=True)],
        buffers={"seen": torch.tensor(7), "scale": torch.randn(4, generator=draw)},
        shared={"head": "a"},
    )


def stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint that is whole in every byte."""
    assert verify(path, deep=True).problems == ()
    there = storage.contents(path)
    return {n: storage.read(path, there, n) for n in there.tensors if not n.startswith("meta.")}


def expected(run: Trained) -> dict[str, Tensor]:
    weights = {**run.weights, **run.buffers, **{n: run.weights[s] for n, s in run.shared.items()}}
    slots = {f"{n}.{slot}": t for n, of in run.slots.items() for slot, t in of.items()}
    return {
        **{f"model.{n}": w for n, w in weights.items()},
        **{f"optim.0.{n}": t for n, t in slots.items()},
    }


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_optimizer(path: Path, run: Trained) -> None:
    (optimizer,) = storage.load_meta(path)["optimizers"]
    assert optimizer["param_groups"] == [dict(group) for group in run.groups]
    steps = {name: slots["step"] for name, slots in optimizer["scalars"].items()}
    assert steps == dict.fromkeys(run.slots, torch.tensor(float(run.step)))


def named_optimizer(run: Trained) -> dict[str, Any]:
    step = torch.tensor(float(run.step))
    state = {n: {"step": step, **of} for n, of in run.slots.items()}
    return {"state": state, "param_groups": [dict(group) for group in run.groups]}


def lightning_file(path: Path, weights: dict[str, Any], optimizer: Any, **more: Any) -> Path:
    checkpoint = {"pytorch-lightning_version": "2.6.0", "epoch": 2, "state_dict": weights}
    torch.save({**checkpoint, "optimizer_states": [optimizer], **more}, path)
    return path
