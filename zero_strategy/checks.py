"""What must hold before a module is sharded, told apart before the first collective hangs.

Every check raises with the name of what is wrong; those that need all ranks exchange a few bytes
over the control group first, so that all ranks raise together.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from zero_strategy.blocks import Units, parameter_names

_WHOLE_TENSOR_OPTIMIZERS = {"LBFGS", "Adafactor", "Rprop", "SparseAdam"}
"""Fail inside torch on sharded parameters, with an error about DTensors."""
_WEIGHT_AVERAGING = {"WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"}


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
        if name in _WHOLE_TENSOR_OPTIMIZERS:
            raise ValueError(
                f"{name} works on whole tensors, which no rank holds: must be an optimizer that "
                "treats each element by itself. Use AdamW, Adam or SGD."
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


def check_callbacks(class_names: Iterable[Iterable[str]]) -> None:
    """Refuse callbacks that average whole tensors.

    Args:
        class_names: for each callback the names of its classes.
    Raises: ValueError: naming the callback and its sharded replacement.
    """
    for names in class_names:
        if _WEIGHT_AVERAGING.intersection(names):
            raise ValueError(
                f"trainer.callbacks: {next(iter(names))} copies whole tensors and cannot average "
                "sharded ones: must be zero_strategy.ShardedEMA. Replace it by "
                "ShardedEMA(decay=...)."
            )
