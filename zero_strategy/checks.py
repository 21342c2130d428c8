"""What must hold before a module is sharded, told apart before the first collective hangs.

Every check raises with the name of what is wrong; those that need all ranks exchange a few bytes
over the control group first, so that all ranks raise together.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from zero_strategy.blocks import Units, parameter_names

_REFUSED_OPTIMIZERS = {
    "LBFGS": "flattens all parameters into one vector",
    "Adafactor": "takes means over whole rows and columns",
    "Rprop": "assigns by a mask, which torch cannot do in a sharded tensor",
    "SparseAdam": "needs sparse gradients, and sharded ones are dense",
}
_SETTINGS = (bool, int, float, str, tuple, torch.Tensor, type(None))
"""Kinds of values of a parameter group that mean the same in every process."""
_AVERAGING = (
    "copies whole tensors and cannot average sharded ones: must be zero_strategy.ShardedEMA. "
    "Replace it by ShardedEMA(decay=...)."
)
_REFUSED_CALLBACKS = {
    "WeightAveraging": _AVERAGING,
    "EMAWeightAveraging": _AVERAGING,
    "StochasticWeightAveraging": _AVERAGING,
    "ModelPruning": (
        "ranks the elements of whole tensors and puts masks beside the parameters, which sharded "
        'ones do not allow: must be left out. Prune in one process, under strategy="auto" or after '
        "`zs checkpoint export`."
    ),
}


def check_module(module: nn.Module, *, manual_optimization: bool) -> None:
    """Refuse a module that cannot be sharded exactly.

    Raises: ValueError: naming the parameter and the way out.
    """
    for name, parameter in parameter_names(module):
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is already a DTensor: must be a plain parameter, the strategy shards it. "
                "Remove fully_shard or parallelize_module from configure_model."
            )
        if isinstance(parameter, UninitializedParameter | UninitializedBuffer):
            raise ValueError(
                f"{name} has no shape yet (lazy module): must be known before sharding. Call the "
                "module once on a sample in configure_model."
            )
    if manual_optimization:
        bare = [n for n, _ in module.named_parameters(recurse=False)]
        if bare:
            raise ValueError(
                f"{', '.join(bare)}: parameters of the LightningModule itself must not exist under "
                "manual optimization, because their gradients would be reduced too late. Put them "
                "into a child nn.Module."
            )


def check_units(module: nn.Module, units: Units) -> None:
    """Refuse trainable parameters of several dtypes in one unit.

    Raises: ValueError: naming one parameter of each dtype.
    """
    inner = {id(p) for u in units.modules.values() for p in u.parameters()}
    groups = {n: list(u.named_parameters()) for n, u in units.modules.items()}
    groups[""] = [(n, p) for n, p in module.named_parameters() if id(p) not in inner]
    for unit, named in groups.items():
        by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
        for name, parameter in named:
            if parameter.requires_grad:
                by_dtype[parameter.dtype].append(f"{unit}.{name}" if unit else name)
        if len(by_dtype) > 1:
            listed = ", ".join(f"{names[0]} is {dtype}" for dtype, names in by_dtype.items())
            raise ValueError(
                f"unit {unit or 'root'!r}: trainable parameters must have one dtype, but {listed}. "
                "Cast them, or name the odd module's class in ZeroStrategy(blocks=[...])."
            )


def check_same_module(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse ranks that built different modules. Collective.

    Raises: ValueError: on every rank, naming the ranks that differ from rank 0.
    """
    if group is None:
        return
    lines = [
        f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in parameter_names(module)
    ]
    lines += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in module.named_buffers()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[tuple[str, int]] = [("", 0)] * dist.get_world_size(group)
    dist.all_gather_object(digests, (digest, len(lines)), group=group)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        counts = {rank: digests[rank][1] for rank in (0, *different)}
        raise ValueError(
            f"ranks {different} built another module than rank 0 (tensors per rank: {counts}): "
            "must be the same names, shapes, dtypes and requires_grad. Do not let the rank decide "
            "what is built."
        )


def check_optimizers(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer that steps parameters the module no longer holds.

    Raises: ValueError: naming the optimizer.
    """
    held = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if name in _REFUSED_OPTIMIZERS:
            raise ValueError(
                f"{name} {_REFUSED_OPTIMIZERS[name]}: must be an optimizer that runs on sharded "
                "tensors. Use AdamW, Adam or SGD."
            )
        groups = optimizer.param_groups
        lost = sum(id(p) not in held for g in groups for p in g["params"])
        if lost:
            raise ValueError(
                f"{type(optimizer).__name__} holds {lost} parameters that are not the module's: "
                "must be created in configure_optimizers from self.parameters(), which runs after "
                "sharding. Do not build it in __init__ or from a copy."
            )


def check_trainable_sharded(module: nn.Module, world_size: int) -> None:
    """Refuse a trainable parameter that escaped sharding: each rank would train its own.

    Raises: ValueError: naming the parameters.
    """
    if world_size == 1:
        return
    plain = [
        n for n, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)
    ]
    if plain:
        raise ValueError(
            f"{', '.join(plain[:5])}{' ...' if len(plain) > 5 else ''}: trainable parameters must "
            "be part of the module when it is sharded. Add adapters and heads in configure_model, "
            "before the strategy sets up."
        )


def check_same_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], group: dist.ProcessGroup | None
) -> None:
    """Refuse ranks whose optimizers differ: each would train its shards by rules of its own.

    Raises: ValueError: on every rank, naming the first difference from rank 0.
    Cost: collective; a few kilobytes of names and numbers.
    """
    if group is None:
        return
    names = {id(p): n for n, p in module.named_parameters()}
    told: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(told, _described(optimizers, names), group=group)
    for rank, other in enumerate(told):
        for key in (k for k in {**told[0], **other} if told[0].get(k) != other.get(k)):
            raise ValueError(
                f"{key} = {other.get(key)} on rank {rank}, {told[0].get(key)} on rank 0: must be "
                "the same on all ranks, which step one model together. Do not let the rank, or "
                "data that only it sees, decide in configure_optimizers."
            )


def _described(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, str]:
    """What each parameter group steps and with which settings, as "optimizer 0, group 1, lr"."""
    described = {"number of optimizers": str(len(optimizers))}
    for i, optimizer in enumerate(optimizers):
        described[f"optimizer {i}"] = type(optimizer).__name__
        for j, group in enumerate(optimizer.param_groups):
            steps = " ".join(names.get(id(p), "another module's") for p in group["params"])
            where = f"optimizer {i}, group {j}"
            digest = hashlib.sha256(steps.encode()).hexdigest()[:8]
            described[f"{where}, parameters"] = f"{len(group['params'])} ({digest})"
            for key, value in group.items():
                if isinstance(value, _SETTINGS):
                    # A tensor is a setting of its own on each device.
                    plain = value.tolist() if isinstance(value, torch.Tensor) else value
                    described[f"{where}, {key}"] = repr(plain)
    return described


def check_callbacks(class_names: Iterable[Iterable[str]]) -> None:
    """Refuse callbacks that need whole tensors.

    Args:
        class_names: for each callback the names of its classes.
    Raises: ValueError: naming the callback and what to do instead.
    """
    for names in class_names:
        own, *_ = listed = list(names)
        for name in _REFUSED_CALLBACKS.keys() & set(listed):
            raise ValueError(f"trainer.callbacks: {own} {_REFUSED_CALLBACKS[name]}")
