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
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from zero_strategy.adopt import Adopted
from zero_strategy.blocks import Units, parameter_names, unit_parameters
from zero_strategy.checkpoint.late import Late, LateDict
from zero_strategy.config import OffloadConfig, ZeroStage
from zero_strategy.gradient import local
from zero_strategy.kernels.adam import join
from zero_strategy.mesh import host_mesh
from zero_strategy.offload.assemble import make_engine
from zero_strategy.offload.chunk import Hyper
from zero_strategy.offload.engine import OffloadEngine
from zero_strategy.offload.figures import OffloadFigures
from zero_strategy.offload.host import HostState
from zero_strategy.offload.layout import Layout
from zero_strategy.offload.resident import ResidentState
from zero_strategy.offload.tiers import TieredState
from zero_strategy.offload.ways import Way, Ways
from zero_strategy.offloaded import ArrivedNorms, Offloaded, Period
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
from zero_strategy.planning.tiers import host_parts, total_bytes
from zero_strategy.reduced import ReducedGradients
from zero_strategy.stalls import Stalls
from zero_strategy.writes import Writes, halves

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
        host_mesh: its ranks, for tensors in host memory.
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
        host_mesh: DeviceMesh,
        device: torch.device,
        config: OffloadConfig,
        job: Job,
        share: float,
    ) -> None:
        self._module, self._mesh, self._device = module, mesh, device
        self._host_mesh = host_mesh
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
        self._moments = torch.bfloat16 if job.moments == "bf16" else torch.float32
        self._host = HostState(self._layout(share), moments=self._moments)
        self._lowers: dict[str, Tensor] = {}
        """Lower halves of weights whose state stays on the device, until they are sharded."""
        self._engine: OffloadEngine | None = None
        self.ways = Ways(can_help=False, tries=False)
        """Chooses how steps are taken."""
        self._adopted = Adopted([], {})
        self._parameters: dict[str, nn.Parameter] = {}
        self._aliases: dict[str, str] = {}
        """Every name of an offloaded parameter -> the one it has here."""
        self.writes = Writes({}, lambda: self.engine)
        """What others write to the weights."""
        self._period = Period()
        """Micro-batches, to tell whether what was read is still so."""
        self._forwards: dict[str, int] = {}
        self._scale = 1.0
        self._watched = False
        self._clip_rate = 0.0
        self._decided = False
        self._moves = config.placement == "auto" and share > 0
        """State is still to be moved to the device, once a step has shown what has room there."""
        self._steps_until_move = 1
        self._reduced = ReducedGradients()

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
                self._lowers[name] = halves(own)[1]
            parameter.data = halves(master.view(-1))[0].view_as(master)

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
        state = self._tiered(self._host, self._lowers)
        for name, lower in self._lowers.items():
            upper = self._weights((name,))[name]
            state.resident.write_master(name, join(upper, lower))
        self._lowers.clear()
        self._start_engine(state)
        self.writes = Writes(parameters, lambda: self.engine)
        for name, parameter in parameters.items():
            num_padded = _rows_per_rank(parameter.shape, self._mesh) * math.prod(
                parameter.shape[1:]
            )
            taker = self._taker(self._unit_of[name], name, num_padded)
            parameter.register_post_accumulate_grad_hook(taker)
        for name, unit in {ROOT: root, **units}.items():
            assert isinstance(unit, FSDPModule), "units are sharded before the engine starts"
            unit.register_forward_pre_hook(self._fetcher(name), prepend=True)
            unit.set_all_reduce_hook(self._reduced.tap)

    def _weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return flat views of this rank's shards.

        `.data` counts its own versions, so what others write to the weights shows in theirs.
        """
        return {n: local(self._parameters[n].detach()).data.view(-1) for n in names}

    def _tiered(self, host: HostState, resident: Iterable[str]) -> TieredState:
        weights = self._weights(resident)
        return TieredState(host, ResidentState(weights, moments=self._moments))

    def _start_engine(self, state: TieredState) -> None:
        weights = self._weights(state.host.layout.sizes)
        self._engine = make_engine(
            state, weights, device=self._device, config=self._config, grad_dtype=self._grad_dtype
        )
        tries = self._config.lanes == "auto" and bool(state.host.layout.chunks)
        self.ways = Ways(can_help=self._engine.can_help, tries=tries)

    def _move_to_device(self) -> None:
        """Move to the device what has room there; between a step's last gradient and its seal."""
        self._moves = False
        if self.writes.was_written or self.engine.way.mode != "staged":
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
        state = self._tiered(HostState(layout, moments=self._moments), resident)
        state.take_over(before, with_moments=any(steps.values()))
        self.share, self._host = share, state.host
        del before
        self._start_engine(state)
        self.engine.steps = steps
        for name, grad in grads.items():
            self.engine.receive(name, grad.to(self._device), self._hyper, last=True)
        self.writes.note()

    def _fetcher(self, unit: str) -> Callable[..., None]:
        def fetch(*_: object) -> None:
            # Elsewhere weights are waited for too, but by what is no part of a step.
            start = self._waits.begin() if self.in_step else None
            self.engine.fetch(unit)
            self._waits.end(start)
            self._forwards[unit] = self._forwards.get(unit, 0) + self.in_step

        return fetch

    @cached_property
    def _waits(self) -> Stalls:
        """Of the forwards of steps, for a unit's weights."""
        return Stalls(on_cpu=self._device.type == "cpu")

    def take_figures(self) -> OffloadFigures:
        """Return what was done and waited for since the last call, on this rank.

        Cost: on an accelerator waits for the last fetch of a step's forward.
        """
        return OffloadFigures(
            host_share=self.share,
            exposed_ms=self._waits.take_ms(),
            engine=self.engine.take_figures(),
        )

    def begin_step(self) -> None:
        """Before the forward of a micro-batch."""
        self._forwards.clear()
        self.writes.begin_step()
        self._period.is_over = True
        self._period = Period()

    def _taker(self, unit: str, name: str, num_padded: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            grad = self._reduced.take(name, parameter, num_padded)
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
        names = {id(p): n for n, p in self._module.named_parameters()}
        self._adopted = Adopted(optimizers, names)
        self._hyper()
        self._watched = watched
        # Until it is known what moves to the device, nothing is sent there. Whoever can look at
        # weights can write to them, which shows before the second step.
        self._steps_until_move = 2 if watched else 1
        if self._moves:
            self.engine.way = Way("staged", True)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: self._step())
        self.abandon()
        self.engine.reset()
        self._reduced.begin_run(self.names)

    def _hyper(self) -> Hyper:
        return self._adopted.hyper(self.engine.steps)

    # The step.

    def norm(self) -> Tensor:
        """Return the global norm of the gradients that arrived, 0-dim, fp32. Collective."""
        square = self.engine.square().to(self._device)
        if self._mesh.size() > 1:
            dist.all_reduce(square, group=self._mesh.get_group())
        return square.sqrt().float()

    def norms(self) -> ArrivedNorms:
        """Return the norms of the gradients that arrived, after the last backward.

        Raises:
            RuntimeError: torch did not hand out the gradients as `reduced.py` says.
        """
        self._reduced.check_taken(self._parameters)
        return ArrivedNorms(self.norm, self.engine.squares, self._parameters)

    def decide(self, max_norm: float, norm: Tensor) -> None:
        """Decide the step's scale.

        Args:
            max_norm: bound of the global norm; 0 for none.
            norm: the global norm, 0-dim, fp32, on the CPU; finite.
        """
        self._decided = True
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0) if max_norm > 0 else 1.0
        self._scale = float(scale)

    def _step(self) -> None:
        assert self._decided, "the precision decides on each step"
        self._decided = False
        self._steps_until_move -= 1
        if self._moves and self._steps_until_move <= 0:
            self._move_to_device()
        clipped = self._scale < 1
        self._clip_rate += (clipped - self._clip_rate) / _CLIP_STEPS
        if not self._moves:
            # Where most steps are clipped, a preview with scale 1 is work for nothing.
            self.engine.way = self.ways.next_step(clips=self._clip_rate > _CLIP_OFTEN)
        self.engine.seal(self._scale, self._hyper())
        if self._watched:
            self.engine.fetch_all()

    # What is read and written between steps.

    def abandon(self) -> None:
        """Drop a step that an exception interrupted, so that the state can be saved."""
        self._decided = False
        self._reduced.forget()
        # A step that is dropped needs no hyperparameters, which may be what went wrong.
        self.engine.seal(None, dict.fromkeys(self.engine.steps))

    def _settle(self) -> None:
        """Have the state as of the last step, also for a save after an exception."""
        if sys.exc_info()[0] is not None:
            self.abandon()
        self.engine.flush()
        self.writes.take_over()

    def pause(self) -> None:
        """End the workers until the next run; what they still had to do is done."""
        self.abandon()
        self.engine.close()
        self.writes.runs = False

    def _offloaded(self) -> Offloaded:
        """Return the state as of the last step, to be read and written until the next begins."""
        self._settle()
        return Offloaded(self.engine.state, self._parameters, self._host_mesh, self._period)

    def hold(self, budget_bytes: int) -> Callable[[], None]:
        """Let what was given to be read of the host's state be read while the run goes on.

        Args:
            budget_bytes: of what is copied because it is stepped before it was read.

        Returns: ends it.
        """
        self._settle()
        # The weights under each of their names, and two moments.
        names = [*self._aliases.values(), *self.names, *self.names]
        held = self.engine.state.host.hold(Counter(names), budget_bytes)
        self._period.held = held
        return held.snapshot.end

    def late_masters(self) -> dict[str, Late]:
        """Return the fp32 weights, sharded as their parameters are, under each of their names."""
        offloaded = self._offloaded()
        shards = {name: offloaded.master(name) for name in self.names}
        return {alias: shards[name] for alias, name in self._aliases.items()}

    def masters(self) -> dict[str, Tensor]:
        """Return copies of the fp32 weights under each of their names, where their state lies."""
        offloaded = self._offloaded()
        shards = {name: offloaded.master(name).read() for name in self.names}
        return {alias: shards[name] for alias, name in self._aliases.items()}

    @contextmanager
    def writing(self) -> Generator[dict[str, Late], None, None]:
        """Give the fp32 weights to be written, under each of their names, then send them."""
        yield self.late_masters()
        self.engine.send()
        self.writes.note()

    def write_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Take fp32 weights, sharded as their parameters are, and send them to the device."""
        with self.writing() as late:
            for alias, master in masters.items():
                late[alias].write(master)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, LateDict]:
        """Return an optimizer's state by parameter name, as the optimizer itself would hold it."""
        offloaded, steps = self._offloaded(), self.engine.steps
        owned = {self._adopted.names[id(p)] for g in optimizer.param_groups for p in g["params"]}
        return {
            name: LateDict({"step": torch.tensor(float(steps[name])), **offloaded.moments(name)})
            for name in self.names
            if name in owned and steps[name]
        }

    def fresh_moments(self) -> dict[str, dict[str, Late]]:
        """Set all moments to zero and return them by parameter name, to be written."""
        self.engine.reset()
        offloaded = self._offloaded()
        return {name: offloaded.moments(name) for name in self.names}

    def take_steps(self, optimizers: Sequence[Optimizer]) -> None:
        """Take over the step counts that were loaded into optimizers, and leave these empty.

        Raises:
            ValueError: one holds slots that the engine does not know.
        """
        for parameter, slots in [item for o in optimizers for item in o.state.items()]:
            name = self._adopted.names[id(parameter)]
            if foreign := sorted(slots.keys() - {"step"}):
                raise ValueError(
                    f"the checkpoint holds {', '.join(foreign)} of {name}: must be the state of "
                    "AdamW or Adam without amsgrad under offload. Load the weights only, or train "
                    "without offload."
                )
            if name in self.engine.steps:
                self.engine.steps[name] = int(slots["step"])
        for optimizer in optimizers:
            optimizer.state.clear()


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
        moments=config.moments,
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
    return Offloading(
        module,
        units,
        mesh,
        host_mesh=host_mesh(mesh, group),
        device=device,
        config=config,
        job=job,
        share=share,
    )


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
