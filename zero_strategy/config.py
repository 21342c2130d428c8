"""What a user may ask of the strategy, validated once with every problem listed.

Each default has its one home here; everything below takes the values as required arguments.
"""

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeGuard, cast, get_args

from torch import nn

from zero_strategy.kernels.adam.cpu import MAX_THREADS

ZeroStage = Literal[1, 2, 3]
PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
InitDevice = Literal["cpu", "meta"]
Placement = Literal["auto", "host"]
GradDtype = Literal["auto", "bf16", "fp32"]
Lanes = Literal["auto", "cpu", "stream", "both"]
Moments = Literal["fp32", "bf16"]
NonFinite = Literal["stop", "skip"]
Spike = Literal["warn", "stop", "rollback"]
Uneven = Literal["error", "drop", "pad"]
_PLACEMENTS = get_args(Placement)

_PLANNED = {
    "pipeline": "pipeline stages",
    "tensor": "tensor parallelism",
    "sequence": "sequence parallelism",
    "expert": "expert parallelism",
    "micro_batches": "pipeline stages",
}


def refusal(path: str, value: object, allowed: Iterable[object], fix: str = "") -> str:
    """One error line: what is wrong, what is required, what to do.

    Args:
        path: dotted name of the setting.
        value: what the user gave.
        allowed: what the setting may be.
        fix: what to do; by default the nearest allowed name is suggested.
    """
    options = [str(a) for a in allowed]
    near = difflib.get_close_matches(str(value), options, n=1)
    advice = fix or f"Use {near[0] if near else options[0]!s}."
    return f"{path} = {value!r}: must be {' or '.join(options)}. {advice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Where optimizer state lies, and what works on it there."""

    placement: Placement | float = "auto"
    """The part of the state in host memory, as a share of the trained parameters; "host" is 1.
    "auto" takes the first step with as much there as fits, then moves to the GPU what has room."""
    grad_dtype: GradDtype = "auto"
    """Of gradients on their way to the host: "auto" takes bf16 where nothing is rounded by it (one
    rank, no accumulation) and fp32 elsewhere; "bf16" rounds the step's whole gradient once."""
    lanes: Lanes = "auto"
    """What steps the state in host memory: the host's "cpu", the GPU, through which it is streamed
    ("stream"), or "both", each taking what is most urgent. "auto" takes the first steps
    each way and keeps the fastest. Without a GPU it is the CPU."""
    moments: Moments = "fp32"
    """Of Adam; "bf16" rounds them at every step and is not exact: 8 bytes per parameter of state
    instead of 12. Checkpoints hold fp32 in either case."""
    pin_budget_gib: float | None = None
    """Host memory that may be pinned for state that is streamed; None for all of it. What is not
    pinned is stepped by the CPU."""
    threads: int | None = None
    """Of a pass over the state; None takes this rank's share of the cores but two, which queue the
    device's work and the copies."""
    chunk_elements: int = 8 << 20
    """Parameters that are copied and stepped together, a multiple of 64."""

    def problems(self) -> list[str]:
        """Every rule this configuration breaks, one line each."""
        found = []
        placement = self.placement
        if placement not in _PLACEMENTS and not _is_share(placement):
            allowed = [*_PLACEMENTS, "in [0, 1]"]
            found.append(refusal("zero.offload.placement", placement, allowed))
        if self.grad_dtype not in get_args(GradDtype):
            found.append(refusal("zero.offload.grad_dtype", self.grad_dtype, get_args(GradDtype)))
        if self.lanes not in get_args(Lanes):
            found.append(refusal("zero.offload.lanes", self.lanes, get_args(Lanes)))
        if self.moments not in get_args(Moments):
            found.append(refusal("zero.offload.moments", self.moments, get_args(Moments)))
        budget = self.pin_budget_gib
        if budget is not None and not (_is_number(budget) and 0 <= budget < math.inf):
            fix = "Use None to pin what is needed."
            allowed = ["None, or 0 and more"]
            found.append(refusal("zero.offload.pin_budget_gib", budget, allowed, fix))
        threads = self.threads
        if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
            fix = "Use None for one per core."
            allowed = [f"None, or in [1, {MAX_THREADS}]"]
            found.append(refusal("zero.offload.threads", threads, allowed, fix))
        chunk = self.chunk_elements
        if type(chunk) is not int or chunk < 64 or chunk % 64:
            fix = "Use 8388608."
            found.append(refusal("zero.offload.chunk_elements", chunk, ["a multiple of 64"], fix))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """How checkpoints are written, and what may be read."""

    background: bool = False
    """Write while training goes on. A save then takes as long as copying what changes from the
    device; one is in flight at a time, and one that failed ends the run at the next step."""
    staging_gib: float = 8.0
    """Host memory for these copies, on each rank. Where they need more, training waits until so
    much was written. Offloaded state is written from where it lies; what of it is stepped before
    it was written is copied within as much again."""
    casts: bool = False
    """Let a checkpoint of another precision load: its floating-point tensors, weights and moments,
    are converted, and a warning says how many. Otherwise it is refused."""

    def problems(self) -> list[str]:
        """Every rule this configuration breaks, one line each."""
        found = []
        if type(self.background) is not bool:
            found.append(refusal("zero.saving.background", self.background, [True, False]))
        if type(self.casts) is not bool:
            found.append(refusal("zero.saving.casts", self.casts, [True, False]))
        size = self.staging_gib
        if not (_is_number(size) and 0 < size < math.inf):
            found.append(refusal("zero.saving.staging_gib", size, ["above 0"], "Use 8."))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What is watched while a run trains, and what is done about it; alike on all ranks."""

    non_finite: NonFinite = "stop"
    """A gradient norm that is not finite: "stop" ends the run; "skip" leaves weights, moments,
    learning rates, step counts and buffers as they were, counts the step and goes on. For "skip"
    the host reads the norm once per optimizer step, and buffers are held twice."""
    max_skipped: int = 5
    """Steps skipped in a row after which the run ends; under 16-mixed, at the lowest loss scale."""
    spike_sigmas: float | None = None
    """A loss so many robust standard deviations above the last ones is a spike; None looks at
    none. 8 is a sane choice."""
    spike: Spike = "warn"
    """What a spike does: "rollback" goes back to the last checkpoint of the run and leaves out the
    batches since, at most three times."""
    hang_timeout: timedelta | None = timedelta(minutes=20)
    """A rank that does nothing for so long ends the run, named with its stack; None waits."""
    uneven: Uneven = "error"
    """Where some rank runs out of batches first: "error" ends the run, "drop" ends the epoch on all
    ranks, "pad" repeats that rank's last batch with a loss of weight 0, and lets the others' count
    for it."""
    check_flow: bool = False
    """Compare before every call of a unit which one each rank calls: for finding code that depends
    on the rank. Costs a message on the CPU per call, for which the hosts wait."""

    def problems(self) -> list[str]:
        """Every rule this configuration breaks, one line each."""
        found = []
        for name, allowed in (("non_finite", NonFinite), ("spike", Spike), ("uneven", Uneven)):
            value = getattr(self, name)
            if value not in get_args(allowed):
                found.append(refusal(f"zero.guards.{name}", value, get_args(allowed)))
        if type(self.max_skipped) is not int or self.max_skipped < 1:
            found.append(refusal("zero.guards.max_skipped", self.max_skipped, ["at least 1"]))
        sigmas = self.spike_sigmas
        if sigmas is not None and not (_is_number(sigmas) and 0 < sigmas < math.inf):
            allowed_sigmas = ["None, or above 0"]
            found.append(refusal("zero.guards.spike_sigmas", sigmas, allowed_sigmas, "Use 8."))
        limit = cast(object, self.hang_timeout)
        if limit is not None and not (isinstance(limit, timedelta) and limit > timedelta(0)):
            fix = "Use timedelta(minutes=20)."
            must = ["None, or a datetime.timedelta above 0"]
            found.append(refusal("zero.guards.hang_timeout", limit, must, fix))
        if type(self.check_flow) is not bool:
            found.append(refusal("zero.guards.check_flow", self.check_flow, [True, False]))
        return found


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and not isinstance(value, bool)


def grad_itemsize(grad_dtype: GradDtype, *, sums: bool) -> int:
    """Return the bytes of an offloaded parameter's gradient on its way to the host.

    Args:
        grad_dtype: as in `OffloadConfig`.
        sums: whether a step's gradient is a sum over ranks or micro-batches. A single gradient of
            bf16 weights is bf16 already; a sum needs more.
    """
    return 4 if grad_dtype == "fp32" or (grad_dtype == "auto" and sums) else 2


def as_offload_config(offload: object) -> object:
    """Return what a placement's name alone stands for; anything else as it is."""
    return OffloadConfig(placement=cast(Placement, offload)) if offload in _PLACEMENTS else offload


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """The strategy's settings."""

    zero_stage: ZeroStage = 3
    """1 shards optimizer state, 2 also gradients, 3 also parameters."""
    blocks: tuple[type[nn.Module], ...] | None = None
    """Module classes to shard as units; None finds the repeated blocks."""
    compile: Literal["blocks"] | None = None
    """"blocks" compiles every unit with torch.compile before it is sharded."""
    init: InitDevice = "cpu"
    """Where `configure_model` builds: "cpu", or "meta" to peak at one unit per rank."""
    offload: OffloadConfig | None = None
    """Where optimizer state lies; None keeps it on the device."""
    guards: GuardConfig = field(default_factory=GuardConfig)
    """What is watched while training."""
    saving: SaveConfig = field(default_factory=SaveConfig)
    """How checkpoints are written, and what may be read."""

    def problems(self) -> list[str]:
        """Every rule this configuration breaks, one line each."""
        found = []
        if self.zero_stage not in (1, 2, 3) or isinstance(self.zero_stage, bool):
            found.append(refusal("zero.stage", self.zero_stage, (1, 2, 3)))
        if self.blocks is not None:
            found += _block_problems(self.blocks)
        if self.compile not in (None, "blocks"):
            found.append(refusal("zero.compile", self.compile, ("blocks", None)))
        if self.init not in ("cpu", "meta"):
            found.append(refusal("zero.init", self.init, ("cpu", "meta")))
        offload = cast(object, self.offload)
        if isinstance(offload, OffloadConfig):
            found += offload.problems()
        elif offload == "disk":
            found.append(
                "zero.offload = 'disk': must be None or an OffloadConfig, the disk tier is not "
                f"part of this release. Use strategy='zero{self.zero_stage}_offload', which keeps "
                "the same state in host memory."
            )
        elif offload is not None:
            must = ["None", *_PLACEMENTS, "an OffloadConfig"]
            found.append(refusal("zero.offload", offload, must, "Use 'auto'."))
        guards = cast(object, self.guards)
        if isinstance(guards, GuardConfig):
            found += guards.problems()
        else:
            fix = "Use GuardConfig(non_finite='skip')."
            found.append(refusal("zero.guards", guards, ["a GuardConfig"], fix))
        saving = cast(object, self.saving)
        if isinstance(saving, SaveConfig):
            found += saving.problems()
        else:
            fix = "Use SaveConfig(background=True)."
            found.append(refusal("zero.saving", saving, ["a SaveConfig"], fix))
        return found

    def validate(self) -> None:
        """Raise one ValueError that lists every problem."""
        found = self.problems()
        if found:
            raise ValueError("\n".join(found))


def _block_problems(blocks: object) -> list[str]:
    if not isinstance(blocks, Sequence) or not blocks:
        return [f"zero.blocks = {blocks!r}: must be a list of module classes. Use [Block]."]
    return [
        f"zero.blocks[{i}] = {block!r}: must be a class derived from torch.nn.Module. "
        f"Use {getattr(block, '__name__', type(block).__name__)} itself, not its name or an object."
        for i, block in enumerate(blocks)
        if not (isinstance(block, type) and issubclass(block, nn.Module))
    ] + [
        f"zero.blocks[{i}] = {block.__name__}: must be a class with a forward, which is where its "
        "parameters are gathered. Name the class of its members."
        for i, block in enumerate(blocks)
        if isinstance(block, type) and issubclass(block, nn.ModuleList | nn.ModuleDict)
    ]


def unknown_options(options: dict[str, Any], known: Iterable[str]) -> list[str]:
    """One error line for each option the strategy does not have."""
    lines = []
    for name, value in options.items():
        if name in _PLANNED:
            lines.append(
                f"zero.{name} = {value!r}: must be left out, {_PLANNED[name]} are not part of this "
                "release. Remove the option."
            )
            continue
        near = difflib.get_close_matches(name, list(known), n=1)
        advice = f"Use {near[0]!r}." if near else f"Known: {', '.join(sorted(known))}."
        lines.append(f"zero.{name} = {value!r}: must be an option of ZeroStrategy. {advice}")
    return lines
