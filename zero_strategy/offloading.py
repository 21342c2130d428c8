"""Joins the offload engine to a sharded module and to the user's optimizer, by public hooks alone.

Before a unit is sharded its fp32 weights go to the host, and bf16 ones take their place. From then
on gradients are taken at their hooks, so the user's optimizer finds none: its own step does
nothing, and the engine steps by its groups behind it. Schedulers and loggers see the optimizer they
know.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from zero_strategy.adopt import adam_step, optimizer_problems
from zero_strategy.blocks import Units, parameter_names, unit_parameters
from zero_strategy.config import OffloadConfig, ZeroStage
from zero_strategy.control import NonFiniteGradientError
from zero_strategy.gradient import local
from zero_strategy.kernels.adam import AdamStep, join, split
from zero_strategy.offload.assemble import make_engine
from zero_strategy.offload.chunk import Hyper
from zero_strategy.offload.engine import OffloadEngine
from zero_strategy.offload.host import HostState
from zero_strategy.offload.layout import Layout
from zero_strategy.offload.resident import ResidentState
from zero_strategy.offload.tiers import TieredState
from zero_strategy.planning.host_memory import check_host_memory, host_room
from zero_strategy.planning.job import Job, host_units
from zero_strategy.planning.machines import H200
from zero_strategy.planning.placement import (
    device_bytes,
    device_room,
    fitting_share,
    starting_share,
)
from zero_strategy.planning.remedies import host_remedies
from zero_strategy.planning.sizes import ROOT, unit_sizes
from zero_strategy.planning.tiers import RESIDENT_BYTES, host_parts, total_bytes

# Over about so many steps, and above so large a share, steps are taken to be clipped often.
_CLIP_STEPS = 4
_CLIP_OFTEN = 0.3


@final
class Offloading:
    """The optimizer state of one module, in host memory and beside its weights.

    Args:
        module: the user's module, built or on meta, not yet sharded.
        units: what becomes a unit.
        mesh: one axis, over which parameters are cut along their first dim.
        device: this rank's.
        config: what the user asked for.
        job: the same as numbers.
        share: of the trained parameters, whose state lies in host memory at first.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        mesh: DeviceMesh,
        *,
        device: torch.device,
        config: OffloadConfig,
        job: Job,
        share: float,
    ) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._config, self._job = config, job
        self.share = share
        """Of the trained parameters, whose state lies in host memory."""
        self.last = True
        """Whether the backward that runs is the last before the optimizer steps."""
        self.in_step = False
        """Whether a forward is one of a training step, and not repeated in the backward."""
        self._grad_dtype = torch.float32 if job.grad_itemsize == 4 else torch.bfloat16
        self._sizes = _unit_sizes(module, units, mesh)
        self._unit_of = {name: unit for unit, sizes in self._sizes.items() for name in sizes}
        self._host = HostState(self._layout(share))
        self._lowers: dict[str, Tensor] = {}
        """Lower halves of weights whose state stays on the device, until they are sharded."""
        self._engine: OffloadEngine | None = None
        self._optimizers: list[Optimizer] = []
        self._names: dict[int, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._aliases: dict[str, str] = {}
        """Every name of an offloaded parameter -> the one it has here."""
        self._versions: dict[str, int] = {}
        self._was_written = False
        self._runs = False
        self._forwards: dict[str, int] = {}
        self._scale = 1.0
        self._watched = False
        self._clip_rate = 0.0
        self._decided = False
        self._moves = config.placement == "auto" and share > 0
        """State is still to be moved to the device, once a step has shown what has room there."""
        self._steps_until_move = 1
        self._reduced: Tensor | None = None
        self._taken = 0

    @property
    def engine(self) -> OffloadEngine:
        """The engine, once the module is sharded."""
        assert self._engine is not None, "started after sharding"
        return self._engine

    @property
    def host_bytes(self) -> int:
        """What this rank takes of the host's memory."""
        return total_bytes(host_parts(self._job, self.share))

    @property
    def resident_bytes(self) -> int:
        """Device memory of the state that stays there, the weights not counted."""
        on_host = set(host_units(self._job.units, self.share))
        sizes = (n for u, own in self._sizes.items() if u not in on_host for n in own.values())
        return RESIDENT_BYTES * sum(sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters whose optimizer is the engine."""
        return tuple(self._unit_of)

    def _layout(self, share: float) -> Layout:
        """Return the chunks of what lies in host memory."""
        on_host = {unit: self._sizes[unit] for unit in host_units(self._job.units, share)}
        return Layout.of(on_host, self._config.chunk_elements)

    # Set-up.

    @torch.no_grad()
    def take(self, unit: nn.Module) -> None:
        """Keep a unit's fp32 weights as its state and leave bf16 ones; before it is sharded."""
        names = {id(p): n for n, p in self._module.named_parameters()}
        for parameter in unit.parameters():
            name = names[id(parameter)]
            if isinstance(parameter, DTensor) or name not in self._unit_of:
                continue
            master = parameter.detach().contiguous()
            shard = distribute_tensor(master, self._mesh, [Shard(0)], src_data_rank=None)
            own = shard.to_local().flatten()
            if name in self._host.layout.sizes:
                self._host.write_master(name, own)
            else:
                self._lowers[name] = _halves(own)[1]
            parameter.data = _halves(master.view(-1))[0].view_as(master)

    def start(self, root: nn.Module, units: Mapping[str, nn.Module]) -> None:
        """Hang the engine into the sharded module.

        Args:
            root: the root unit's module.
            units: qualified name -> the other units' modules.
        """
        parameters = {n: p for n, p in parameter_names(self._module) if n in self._unit_of}
        self._parameters = parameters
        first = {id(p): n for n, p in parameters.items()}
        self._aliases = {
            n: first[id(p)] for n, p in parameter_names(self._module) if id(p) in first
        }
        state = TieredState(self._host, ResidentState(self._weights(self._lowers)))
        for name, lower in self._lowers.items():
            upper = self._weights((name,))[name]
            state.resident.write_master(name, join(upper, lower))
        self._lowers.clear()
        self._engine = self._make_engine(state)
        self._note_versions()
        for name, parameter in parameters.items():
            num_padded = _rows_per_rank(parameter.shape, self._mesh) * math.prod(
                parameter.shape[1:]
            )
            taker = self._taker(self._unit_of[name], name, num_padded)
            parameter.register_post_accumulate_grad_hook(taker)
        for name, unit in {ROOT: root, **units}.items():
            assert isinstance(unit, FSDPModule), "units are sharded before the engine starts"
            unit.register_forward_pre_hook(self._fetcher(name), prepend=True)
            unit.set_all_reduce_hook(self._tap)

    def _weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return flat views of this rank's shards.

        `.data` counts its own versions, so what others write to the weights shows in theirs.
        """
        return {n: local(self._parameters[n].detach()).data.view(-1) for n in names}

    def _make_engine(self, state: TieredState) -> OffloadEngine:
        weights = self._weights(state.host.layout.sizes)
        return make_engine(
            state, weights, device=self._device, config=self._config, grad_dtype=self._grad_dtype
        )

    def _move_to_device(self) -> None:
        """Move to the device what has room there; between a step's last gradient and its seal."""
        self._moves = False
        if self._was_written or self.engine.mode != "staged":
            return  # Where others write to weights, the host's copy of them is needed.
        share = fitting_share(self._job, self.share, device_room(self._device))
        if share == self.share:
            return
        grads = self.engine.withdraw()
        self.engine.close()
        before, steps = self.engine.state, self.engine.steps
        # Its gradients' memory is let go before the next engine takes its own.
        self._engine = None
        layout = self._layout(share)
        resident = [name for name in self.names if name not in layout.sizes]
        state = TieredState(HostState(layout), ResidentState(self._weights(resident)))
        state.take_over(before, with_moments=any(steps.values()))
        self.share, self._host = share, state.host
        del before
        self._engine = self._make_engine(state)
        self._engine.steps = steps
        for name, grad in grads.items():
            self._engine.receive(name, grad.to(self._device), self._hyper, last=True)
        self._note_versions()

    def _fetcher(self, unit: str) -> Callable[..., None]:
        def fetch(*_: object) -> None:
            self.engine.fetch(unit)
            self._forwards[unit] = self._forwards.get(unit, 0) + self.in_step

        return fetch

    def begin_step(self) -> None:
        """Before the forward of a micro-batch."""
        self._forwards.clear()
        self._take_over_writes()
        self._runs = True

    def _note_versions(self) -> None:
        self._versions = {n: p._version for n, p in self._parameters.items()}

    def _take_over_writes(self) -> None:
        """Bring to the host what others wrote to the device's weights, as far as bf16 holds it.

        Seen by the tensors' version counters, which a write through `parameter.data` goes past.
        """
        written = [n for n, p in self._parameters.items() if p._version != self._versions[n]]
        if not written:
            return
        self._was_written = True
        self.engine.flush()
        state = self.engine.state
        for name in written:
            if name in state.resident:
                self._take_resident(name)
                continue
            there = local(self._parameters[name].detach()).flatten().cpu()
            changed = there != state.host.upper(name)
            if changed.any():
                master = state.master(name)
                master[changed] = there[changed].float()
                state.write_master(name, master)
        self._note_versions()

    def _take_resident(self, name: str) -> None:
        if self._runs:
            raise RuntimeError(
                f"{name} was written to while its fp32 weights are kept beside it on the device: "
                "must be left alone during a run, since which of its elements changed cannot be "
                "told. Keep them in host memory, with OffloadConfig(placement='host')."
            )
        warnings.warn(
            f"{name} was written to between two runs: its fp32 weights are now the bf16 ones.",
            stacklevel=2,
        )
        self.engine.state.resident.take_weights(name)

    def _tap(self, reduced: Tensor) -> None:
        """Keep a unit's gradients as they were reduced: what follows rounds them to bf16.

        Each parameter with a gradient has its shard there, padded, in the order in which their
        hooks are called next.
        """
        self._reduced, self._taken = reduced, 0

    def _taker(self, unit: str, name: str, num_padded: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None, "hooks run where a gradient was accumulated"
            assert self._reduced is not None, "FSDP2 reduced the unit's gradients first"
            num_own = local(parameter.grad).numel()
            parameter.grad = None
            grad = self._reduced.narrow(0, self._taken, num_own)
            self._taken += num_padded
            # A unit that ran several times may be reduced as often, its last time unknown.
            once = self._forwards.get(unit, 0) <= 1
            self.engine.receive(name, grad, self._hyper, last=self.last and once)

        return take

    def adopt(self, optimizers: Sequence[Optimizer], *, watched: bool) -> None:
        """Step by these optimizers' groups from now on, with fresh moments.

        Args:
            optimizers: as `configure_optimizers` made them.
            watched: whether the user's code may look at weights between a step and the next
                forward; each step then ends when they are there.

        Raises:
            ValueError: an optimizer or a setting that the engine does not know.
        """
        problems = [p for optimizer in optimizers for p in optimizer_problems(optimizer)]
        if problems:
            raise ValueError("\n".join(problems))
        self._names = {id(p): n for n, p in self._module.named_parameters()}
        self._optimizers = list(optimizers)
        self._watched = watched
        # Until it is known what moves to the device, nothing is sent there. Whoever can look at
        # weights can write to them, which shows before the second step.
        self._steps_until_move = 2 if watched else 1
        self.engine.mode = "staged" if self._moves else "deferred"
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: self._step())
        self._hyper()
        self.abandon()
        self.engine.reset()

    def _hyper(self) -> Hyper:
        """Read the optimizers' groups, which schedulers change and callbacks add to."""
        hyper: dict[str, AdamStep | None] = dict.fromkeys(self._unit_of)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names[id(parameter)]
                    if name in hyper:
                        hyper[name] = adam_step(group, self.engine.steps[name] + 1)
                    elif parameter.requires_grad:
                        raise ValueError(
                            f"{name} is trained but was frozen when the strategy set up: must "
                            "require a gradient then to be offloaded. Freeze it later, in "
                            "on_fit_start, or train without offload."
                        )
        return hyper

    # The step.

    def norm(self) -> Tensor:
        """Return the global norm of the gradients that arrived, 0-dim, fp32. Collective."""
        square = self.engine.square().to(self._device)
        if self._mesh.size() > 1:
            dist.all_reduce(square, group=self._mesh.get_group())
        return square.sqrt().float()

    def clip(self, max_norm: float) -> Tensor:
        """Decide the step's scale.

        Args:
            max_norm: bound of the global norm; 0 for none.

        Returns: the global norm, 0-dim, fp32, on the CPU.

        Raises:
            NonFiniteGradientError: the norm is not finite; the step is dropped.

        Cost: one host sync, one all-reduce of 8 bytes.
        """
        norm = self.norm().cpu()
        if not math.isfinite(float(norm)):
            step = max(self.engine.steps.values(), default=0) + 1
            self.abandon()
            raise NonFiniteGradientError(
                f"gradient norm = {float(norm)} at optimizer step {step}: must be finite. No "
                "weight was changed by this step. Lower the learning rate, or check the batch."
            )
        self._decided = True
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm > 0 else 1.0
        self._scale = float(scale)
        return norm

    def _step(self) -> None:
        if not self._decided:
            self.clip(0.0)
        self._decided = False
        self._steps_until_move -= 1
        if self._moves and self._steps_until_move <= 0:
            self._move_to_device()
        self.engine.seal(self._scale, self._hyper())
        clipped = self._scale < 1
        self._clip_rate += (clipped - self._clip_rate) / _CLIP_STEPS
        # Where most steps are clipped, a preview with scale 1 is work for nothing.
        if not self._moves:
            self.engine.mode = "late" if self._clip_rate > _CLIP_OFTEN else "deferred"
        if self._watched:
            self.engine.fetch_all()

    # What is read and written between steps.

    def abandon(self) -> None:
        """Drop a step that an exception interrupted, so that the state can be saved."""
        self._decided = False
        self.engine.seal(None, self._hyper())

    def _settle(self) -> None:
        """Have the state as of the last step, also for a save after an exception."""
        if sys.exc_info()[0] is not None:
            self.abandon()
        self.engine.flush()
        self._take_over_writes()

    def pause(self) -> None:
        """End the workers until the next run; what they still had to do is done."""
        self.abandon()
        self.engine.close()
        self._runs = False

    def masters(self) -> dict[str, Tensor]:
        """Return the fp32 weights, sharded as their parameters are, under each of their names."""
        self._settle()
        shards = {n: self._as_shard(n, self.engine.state.master(n)) for n in self.names}
        return {alias: shards[n] for alias, n in self._aliases.items()}

    def write_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take fp32 weights, sharded as their parameters are, and send them to the device."""
        self.engine.flush()
        for alias, master in masters.items():
            self.engine.state.write_master(self._aliases[alias], local(master).flatten().cpu())
        self.engine.send()
        self._note_versions()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, as the optimizer itself would hold it."""
        self._settle()
        state: dict[str, Any] = {}
        owned = {self._names[id(p)] for g in optimizer.param_groups for p in g["params"]}
        for name in self.names:
            if name in owned and self.engine.steps[name]:
                m, v = self.engine.state.moments(name)
                state[name] = {
                    "step": torch.tensor(float(self.engine.steps[name])),
                    "exp_avg": self._as_shard(name, m),
                    "exp_avg_sq": self._as_shard(name, v),
                }
        return state

    def write_optimizer_state(self, optimizer: Optimizer) -> None:
        """Take over the state that was loaded into an optimizer, and leave it empty."""
        self.engine.reset()
        for parameter, slots in optimizer.state.items():
            name = self._names[id(parameter)]
            self.engine.steps[name] = int(slots["step"])
            moments = (local(slots[k]).flatten().float().cpu() for k in ("exp_avg", "exp_avg_sq"))
            self.engine.state.write_moments(name, *moments)
        optimizer.state.clear()

    def _as_shard(self, name: str, flat: Tensor) -> Tensor:
        parameter = self._module.get_parameter(name)
        shard = flat.view(local(parameter).shape).to(self._device)
        if not isinstance(parameter, DTensor):
            return shard
        return DTensor.from_local(
            shard,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
            run_check=False,
        )


def make_offloading(
    module: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    config: OffloadConfig,
    zero_stage: ZeroStage,
    sums: bool,
    group: dist.ProcessGroup | None,
) -> Offloading:
    """Make room for a module's state in host memory.

    Args:
        module: as in `Offloading`, like the next four.
        units: what becomes a unit.
        mesh: over which parameters are cut.
        device: this rank's.
        config: what the user asked for.
        zero_stage: what is sharded.
        sums: whether a step's gradient is a sum over ranks or micro-batches.
        group: the control group, over which all ranks take the smallest of their rooms.

    Raises: ValueError: host memory cannot hold it; raised on all ranks before anything is
        allocated, with the sum, and what would need less.
    """
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    job = Job(
        units=unit_sizes(module, units, mesh.size()),
        zero_stage=zero_stage,
        world_size=mesh.size(),
        num_local_ranks=num_local_ranks,
        grad_dtype=config.grad_dtype,
        lanes=config.lanes,
        chunk_elements=config.chunk_elements,
        micro_batches=2 if sums else 1,
    )
    room = host_room(num_local_ranks)
    available = torch.tensor(room.available_bytes)
    if group is not None:
        dist.all_reduce(available, dist.ReduceOp.MIN, group=group)
    num_bytes = int(available)
    share = starting_share(
        job, config.placement, host_bytes=num_bytes, device_bytes=device_bytes(device)
    )
    parts = {part.purpose: part.num_bytes for part in host_parts(job, share)}
    # Rates decide the order of advice alone, and hardly differ by machine.
    remedies = host_remedies(job, H200, share, num_bytes, fixed=config.placement == "auto")
    check_host_memory(parts, num_bytes, remedies, bound=room.bound)
    return Offloading(module, units, mesh, device=device, config=config, job=job, share=share)


def _halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves of fp32 weights, (n,) each."""
    upper = torch.empty_like(master, dtype=torch.bfloat16)
    lower = torch.empty_like(master, dtype=torch.int16)
    split(master, upper, lower)
    return upper, lower


def _unit_sizes(module: nn.Module, units: Units, mesh: DeviceMesh) -> dict[str, dict[str, int]]:
    """Unit -> trained parameter -> elements of this rank's shard; the root first."""
    sizes: dict[str, dict[str, int]] = {name: {} for name in (ROOT, *units.modules)}
    for unit, name, parameter in unit_parameters(module, units):
        if parameter.requires_grad:
            sizes[unit][name] = _shard_size(parameter.shape, mesh)
    return sizes


def _shard_size(shape: torch.Size, mesh: DeviceMesh) -> int:
    """Elements of this rank's part, cut along the first dim as `torch.chunk` cuts."""
    if not shape:
        raise ValueError(
            "a trained parameter of shape () cannot be sharded: must have at least one dim. Make "
            "it a tensor of shape (1,)."
        )
    rows = _rows_per_rank(shape, mesh)
    own = min(max(shape[0] - mesh.get_local_rank() * rows, 0), rows)
    return own * math.prod(shape[1:])


def _rows_per_rank(shape: torch.Size, mesh: DeviceMesh) -> int:
    return -(-shape[0] // mesh.size())
