"""Which rank a run hangs on, judged from what each rank last said of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a rank says of itself, again and again."""

    rank: int
    beats: int
    """How many it has sent."""
    stalled_s: float
    """How long it has made no progress."""
    place: tuple[int, int, int]
    """Micro-batch, phase and unit, as `Progress.place`."""
    step: int
    """Optimizer steps taken."""
    phase: str
    call: str = ""
    """The function it is in; only once it is stalled."""
    waits: bool = False
    """Whether it waits for other ranks; only once it is stalled."""
    ended: bool = False
    """Whether its run is over."""

    def to_json(self) -> str:
        """Return a text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"place": tuple(fields["place"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Why a run ends."""

    ranks: tuple[int, ...]
    """Those it hangs on."""
    told: str
    """What each of them does, and what the others wait in; a line each."""


def judge(
    beats: Mapping[int, Beat], silent: frozenset[int], *, timeout_s: float, units: tuple[str, ...]
) -> Verdict | None:
    """Name the ranks that hold up the run, or none while it may still get on.

    A rank that waits in a collective is held up by one that does not. Of those that do not, the
    run hangs on the one that is furthest behind; if that one makes progress, it is only slow. If
    all wait, they wait for different things, and the one furthest behind is where they parted.

    Args:
        beats: last of each rank.
        silent: ranks that send no beats any more.
        timeout_s: how long a rank may make no progress.
        units: names of the units, for the text.
    """
    running = [beat for beat in beats.values() if not beat.ended]
    free = [b for b in running if not b.waits or b.rank in silent] or running
    if not free:
        return None
    furthest_behind = min(beat.place for beat in free)
    held = [beat for beat in free if beat.place == furthest_behind]
    if any(beat.stalled_s < timeout_s and beat.rank not in silent for beat in held):
        return None
    ranks = tuple(sorted(beat.rank for beat in held))
    others = [beat for beat in running if beat.rank not in ranks]
    lines = [_about(beat, beat.rank in silent, units) for beat in held]
    lines += [f"rank {b.rank} waits in {b.call}, {_position(b, units)}" for b in others]
    return Verdict(ranks=ranks, told="\n".join(lines))


def _about(beat: Beat, is_silent: bool, units: tuple[str, ...]) -> str:
    where = _position(beat, units)
    if is_silent:
        return (
            f"rank {beat.rank} gives no sign of life, last {where}: its process was stopped, is in "
            "code that never lets Python run, or its machine is gone"
        )
    return f"rank {beat.rank} made no progress for {beat.stalled_s:.0f} s in {beat.call}, {where}"


def _position(beat: Beat, units: tuple[str, ...]) -> str:
    batch, _, unit = beat.place
    entered = f", last unit {units[unit]}" if 0 <= unit < len(units) else ""
    return f"phase {beat.phase!r} of step {beat.step}, micro-batch {batch}{entered}"
