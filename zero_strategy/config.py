"""What a user may ask of the strategy, validated once with every problem listed.

Each default has its one home here; everything below takes the values as required arguments.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

ZeroStage = Literal[1, 2, 3]
PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
InitDevice = Literal["cpu", "meta"]

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
    offload: Literal["host", "disk"] | None = None
    """Slower tier for optimizer state; not part of this release."""

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
        if self.offload is not None:
            found.append(
                f"zero.offload = {self.offload!r}: must be None, the offload engine is not part of "
                f"this release. Use strategy='zero{self.zero_stage}', which shards the same state "
                "over the GPUs."
            )
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
