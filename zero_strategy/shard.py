"""The sole caller of `fully_shard`: a module becomes units on a mesh.

Unit by unit, in the order of registration: build on the device if it lies on meta, take rank 0's
values, shard, free. A rank therefore never holds more than its shards, one whole unit and the
root's own parameters. What was built without values (`deferred`) is cut empty and filled last.
"""

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zero_strategy.blocks import Units, num_parameters
from zero_strategy.config import ZeroStage
from zero_strategy.deferred import deferred_in, fill
from zero_strategy.gradient import local
from zero_strategy.offloading import Offloading
from zero_strategy.planning.estimate import MemoryPlan
from zero_strategy.stalls import StallClock

_WARM_UP = object()


class ZeroRoot(nn.Module):
    """The root unit: holds the user's module and whatever no other unit holds.

    Its hooks surround each whole step, so code inside a step may use any parameter of the root,
    and a nested call of the user's module gathers nothing twice.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the user's module."""
        if args == (_WARM_UP,):
            return None
        return self.module(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class BackwardPolicy:
    """What a backward does with gradients and parameters; by default, all there is to do."""

    last: bool = True
    """No other backward comes before the optimizer steps."""
    reduces: bool = True
    """Gradients go to the ranks that own them."""
    lets_go: bool = True
    """Parameters are let go as soon as their unit's gradients are there."""


IN_STEP = BackwardPolicy(lets_go=False)
"""For a gradient that a step takes itself, to penalize it: the graph is gone through again, and
what would be let go in between is read as memory that is no longer there."""


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A module after sharding."""

    root: ZeroRoot
    units: dict[str, nn.Module]
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    leaves: tuple[str, ...]
    tied_out: tuple[str, ...]
    unit_classes: str
    source: str
    num_params: int
    num_trainable: int
    stalls: StallClock | None
    """Measures exposed communication; None where there is none to wait for."""
    offloading: Offloading | None
    """Optimizer state in host memory; None where it lies beside the parameters."""

    @property
    def modules(self) -> list[FSDPModule]:
        """Every unit, the root last."""
        return [m for m in (*self.units.values(), self.root) if isinstance(m, FSDPModule)]

    @property
    def checks(self) -> dict[str, str]:
        """What was found at set-up, check by check."""
        return {
            "dtype": "ok",
            "tied": f"{len(self.tied_out)} in root" if self.tied_out else "ok",
            "initial state": "broadcast" if self.mesh.size() > 1 else "own",
            "units": f"{self.source}, {self.unit_classes}",
        }

    def reshard(self) -> None:
        """Let all gathered parameters go. No collective; does nothing where nothing is gathered."""
        for module in self.modules:
            module.reshard()

    def sync_buffers(self) -> None:
        """Give every rank rank 0's buffers, for example the running statistics of a BatchNorm.

        Cost: collective; one broadcast of the buffers' bytes per dtype.
        """
        kind = self.mesh.device_type
        buffers = [b for b in self.root.buffers() if b.device.type == kind]
        if self.mesh.size() > 1 and buffers:
            with torch.no_grad():
                _broadcast(buffers, self.mesh)

    def abandon_step(self) -> None:
        """Let parameters go after an exception inside a forward or backward."""
        root: Any = self.root
        if "reset_iter_state" in dir(FSDPModule):
            # From torch 2.13 on, the module can even be used again.
            root.reset_iter_state()
        # A module that stays gathered after forward is not let go while in it.
        root.set_reshard_after_forward(True, recurse=False)
        self.reshard()
        root.set_reshard_after_forward(False, recurse=False)
        if self.offloading:
            self.offloading.abandon()

    def use_backward(self, policy: BackwardPolicy) -> None:
        """Set what the next backward does."""
        root: Any = self.root
        root.set_is_last_backward(policy.last)
        for module in self.modules:
            module.set_requires_gradient_sync(policy.reduces, recurse=False)
            module.set_reshard_after_backward(policy.lets_go, recurse=False)
        if self.offloading:
            self.offloading.last = policy.last
            self.offloading.in_step = policy == IN_STEP

    def use_stage(self, zero_stage: ZeroStage) -> None:
        """Set for a run what stays gathered between forward and backward."""
        for name, unit in self.units.items():
            assert isinstance(unit, FSDPModule), "units are sharded before a stage is chosen"
            lets_go = zero_stage == 3 and name not in self.leaves
            unit.set_reshard_after_forward(lets_go, recurse=False)


def shard_module(
    module: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    policy: MixedPrecisionPolicy,
    compile_blocks: bool,
    offloading: Offloading | None,
) -> Sharded:
    """Shard a module in place.

    Args:
        module: the user's module, on CPU, meta or the device.
        units: what `find_units` chose.
        mesh: one axis; parameters are cut along their first dim over it.
        device: this rank's device.
        policy: dtypes of compute and reduction.
        compile_blocks: call `.compile()` on each unit first.
        offloading: takes the weights of each unit before it is sharded.
    Cost: collective; one broadcast of the module's bytes, unit by unit.
    """
    num_params = num_parameters(module)
    unit_classes = units.class_names  # FSDP2 renames the classes it shards
    num_trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    build = _Builder(module, mesh, device)
    # Inputs of a whole step may be targets or indices kept as floats: the root must not cast them.
    root_policy = dataclasses.replace(policy, cast_forward_inputs=False)
    leaves = [units.modules[name] for name in units.leaves]
    for unit in units.modules.values():
        if compile_blocks:
            unit.compile()
    for sub, finished in _post_order(module, set(map(id, units.modules.values()))):
        build.materialize(sub)
        for unit in finished:
            build.prepare(unit)
            if offloading:
                offloading.take(unit)
            # A layer outside the blocks gets its inputs as it would in the root.
            keeps = unit in leaves
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=True,
                mp_policy=root_policy if keeps else policy,
            )
    build.prepare(module)
    if offloading:
        offloading.take(module)
    root = ZeroRoot(module)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=root_policy)
    assert isinstance(root, FSDPModule), "fully_shard gives a module its methods"
    with torch.no_grad():
        # FSDP2 takes the first module to run as the root of all: it must be this one, even if
        # the user's first call is to a block.
        nn.Module.__call__(root, _WARM_UP)
    root.reshard()
    gathered = [m for m in (*units.modules.values(), root) if isinstance(m, FSDPModule)]
    stalls = StallClock(gathered, on_cpu=device.type == "cpu") if mesh.size() > 1 else None
    if offloading:
        # After the clock, whose marks must not span the wait for offloaded weights.
        offloading.start(root, units.modules)
    fill(module, offloading.writes if offloading else None, mesh)
    return Sharded(
        stalls=stalls,
        offloading=offloading,
        root=root,
        units=units.modules,
        mesh=mesh,
        policy=policy,
        leaves=units.leaves,
        tied_out=units.tied_out,
        unit_classes=unit_classes,
        source=units.source,
        num_params=num_params,
        num_trainable=num_trainable,
    )


def _post_order(
    module: nn.Module, unit_ids: set[int]
) -> list[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Modules in registration order, each with the units whose last module it is, inner first."""
    order = list(module.modules())
    last: dict[int, list[nn.Module]] = defaultdict(list)
    position = {id(m): i for i, m in enumerate(order)}
    for sub in reversed(order):
        if id(sub) in unit_ids:
            last[max(position[id(m)] for m in sub.modules())].append(sub)
    return [(sub, tuple(last.get(i, ()))) for i, sub in enumerate(order)]


class _Builder:
    """Brings a module's tensors onto the device with the same values on every rank."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._names = {id(sub): name for name, sub in module.named_modules()}
        self._ties = _ties(module)
        deferred = deferred_in(module)
        self._values = list(deferred.values())
        self._in_deferred = {id(sub) for model in deferred for sub in model.modules()}

    def materialize(self, sub: nn.Module) -> None:
        """Build the tensors a module owns itself, if they lie on meta."""
        on_meta = [name for name, t in _own_tensors(sub).items() if t.is_meta]
        if on_meta and id(sub) in self._in_deferred:
            self._lay_out(sub, on_meta)
        elif on_meta:
            self._build(sub)
        for name, value in vars(sub).items():
            if _lies_on_meta(value):
                raise ValueError(
                    f"{'.'.join(filter(None, (self._names[id(sub)], name)))} is a tensor on the "
                    "meta device, but neither a parameter nor a buffer: must be one of them to be "
                    f"built. Use self.register_buffer({name!r}, ..., persistent=False) and fill it "
                    "in reset_parameters()."
                )

    def _awaits(self, sub: nn.Module, name: str) -> bool:
        """Whether a tensor of a module gets its values after sharding."""
        return any(values.fills(sub, name) for values in self._values)

    def _lay_out(self, sub: nn.Module, names: list[str]) -> None:
        """Take memory for tensors of a module that get their values later."""
        for name in names:
            if not self._awaits(sub, name):
                raise ValueError(
                    f"{self._names[id(sub)]}.{name} lies on the meta device and is not in the "
                    "files that its model is loaded from: must have values. Add adapters by "
                    "zero_strategy.hf.add_adapter, and build other layers on the CPU."
                )
            tensor = getattr(sub, name)
            empty = torch.empty_like(tensor, device=self._device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            setattr(sub, name, empty)

    def _build(self, sub: nn.Module) -> None:
        reset = getattr(sub, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"{self._names[id(sub)]} ({type(sub).__name__}) lies on the meta device: must have "
                "a reset_parameters() that fills its own parameters and buffers. Add one, or build "
                "the module on CPU."
            )
        sub.to_empty(device=self._device, recurse=False)
        with torch.no_grad():
            reset()

    def prepare(self, module: nn.Module) -> None:
        """Tie, move to the device and take rank 0's values for what is not yet sharded."""
        self._tie(module)
        tensors = (*module.parameters(), *module.buffers())
        fresh = [t for t in tensors if not isinstance(t, DTensor)]
        for tensor in fresh:
            if tensor.device != self._device:
                tensor.data = tensor.data.to(self._device)
        if self._mesh.size() > 1:
            awaiting = {
                id(t)
                for sub in module.modules()
                for name, t in _own_tensors(sub).items()
                if self._awaits(sub, name)
            }
            _broadcast([t for t in fresh if id(t) not in awaiting], self._mesh)

    def _tie(self, module: nn.Module) -> None:
        inside = set(map(id, module.modules()))
        for (owner, name), *others in self._ties:
            for other, other_name in others:
                if id(owner) in inside and id(other) in inside:
                    setattr(other, other_name, getattr(owner, name))


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a module holds itself, by their names in it."""
    return dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])


def _lies_on_meta(value: object) -> bool:
    """Whether an attribute is, or holds in a plain container, a tensor without values."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(map(_lies_on_meta, value.values()))
    return isinstance(value, list | tuple) and any(map(_lies_on_meta, value))


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Groups of (module, attribute) that hold one and the same parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for sub in module.modules():
        for name, parameter in sub.named_parameters(recurse=False):
            places[id(parameter)].append((sub, name))
    return [group for group in places.values() if len(group) > 1]


def _broadcast(tensors: list[Tensor], mesh: DeviceMesh) -> None:
    """Overwrite the tensors by rank 0's, one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([t.detach().reshape(-1) for t in same])
        if not flat.numel():
            continue
        # As bytes, since not every backend moves every dtype.
        dist.broadcast(flat.view(torch.uint8), src=0, group=mesh.get_group())
        for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def local_bytes(module: nn.Module, *, trainable_only: bool = False) -> int:
    """Bytes of parameters this rank holds."""
    return sum(
        local(p).numel() * p.element_size()
        for p in module.parameters()
        if p.requires_grad or not trainable_only
    )


def memory_plan(
    sharded: Sharded, zero_stage: ZeroStage, precision: str, *, optimizer_slots: int = 2
) -> MemoryPlan:
    """Per-rank bytes of what the strategy holds, from shapes alone.

    Args:
        sharded: the module after sharding.
        zero_stage: what is kept sharded between uses.
        precision: name of the precision.
        optimizer_slots: tensors of optimizer state per parameter; Adam has 2.
    """
    compute = sharded.policy.param_dtype
    world = sharded.mesh.size()

    def gathered(module: nn.Module, inner: set[int]) -> int:
        own = [p for p in module.parameters() if id(p) not in inner]
        return sum(p.numel() * (compute or p.dtype).itemsize for p in own)

    inner = {id(p) for u in sharded.units.values() for p in u.parameters()}
    root_bytes = gathered(sharded.root, inner)
    unit_bytes = [gathered(u, set()) for u in sharded.units.values()]
    # Stage 3 holds a unit in use and the next one on its way; below, every unit stays.
    held = sum(sorted(unit_bytes)[-2:]) if zero_stage == 3 else sum(unit_bytes)
    trainable = local_bytes(sharded.root, trainable_only=True)
    offloading = sharded.offloading
    grads = trainable if zero_stage > 1 else trainable * world
    return MemoryPlan(
        strategy=f"zero{zero_stage}_offload" if offloading else f"zero{zero_stage}",
        precision=precision,
        world_size=world,
        num_units=len(sharded.units),
        unit_class=sharded.unit_classes,
        num_params=sharded.num_params,
        num_trainable=sharded.num_trainable,
        params_bytes=local_bytes(sharded.root),
        grads_bytes=grads,
        optimizer_bytes=0 if offloading else trainable * optimizer_slots,
        host_bytes=offloading.host_bytes if offloading else 0,
        unsharded_bytes=root_bytes + held,
    )
