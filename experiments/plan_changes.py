"""Which settings to change so that a run fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zero_strategy.experiments.plan_job import Planned, default_share, job_of, planned
from zero_strategy.experiments.rules import value_at
from zero_strategy.experiments.schema import RunConfig
from zero_strategy.planning.machines import Machine
from zero_strategy.planning.offload_plan import missing_bytes
from zero_strategy.presets import PRESETS

ENOUGH = 3
MAX_EDITS = 3
NODE_FACTORS = (2, 4, 8, 16)


class Change(NamedTuple):
    """Settings that differ, as a user would type them, and the configuration with them."""

    words: str
    config: RunConfig

    @property
    def num_nodes(self) -> int:
        """Nodes of the changed run."""
        return self.config.trainer.num_nodes


def fitting_changes(config: RunConfig, machine: Machine) -> list[tuple[Change, Planned]]:
    """Return changes with which a run fits, the cheapest first: few nodes, then little time.

    Each is small: none holds another that is enough with as few nodes. The tokens of a rank's step
    stay as many as they were.
    """
    found: dict[frozenset[str], Change] = {}
    for size in range(1, MAX_EDITS + 1):
        for edits in _unions(config, size):
            change = _combined(config, edits)
            paths = frozenset(path for path, _ in edits)
            smaller = [other for had, other in found.items() if had <= paths]
            if any(other.num_nodes <= change.num_nodes for other in smaller):
                continue
            job = job_of(change.config, machine)
            if not any(missing_bytes(job, machine, default_share(change.config, job, machine))):
                found[paths] = change
        if len(found) >= ENOUGH:
            break
    return sorted(((c, planned(c.config, machine)) for c in found.values()), key=_cost)


def _cost(pair: tuple[Change, Planned]) -> tuple[int, float]:
    change, (job, plan) = pair
    return change.num_nodes, plan.time.clipped_step_s / job.tokens_per_step


Edit = tuple[str, object]
"""A setting's path and its new value."""


def _edits(config: RunConfig) -> Iterator[tuple[Edit, ...]]:
    """Yield the kinds of changes, each with its possible values as groups of settings."""
    trainer, data = config.trainer, config.data
    preset: Any = PRESETS[trainer.strategy]
    if not config.model.recompute:
        yield (("model.recompute", True),)
    if preset["stage"] < 3:
        yield (("trainer.strategy", trainer.strategy.replace(str(preset["stage"]), "3")),)
    if "offload" not in preset and trainer.precision == "bf16-mixed":
        yield (("trainer.strategy", f"zero{preset['stage']}_offload"),)
    if data.batch_size % 2 == 0:
        yield (
            ("data.batch_size", data.batch_size // 2),
            ("trainer.accumulate", trainer.accumulate * 2),
        )
    if trainer.accumulate > 1:
        batch_size = data.batch_size * trainer.accumulate
        yield ("data.batch_size", batch_size), ("trainer.accumulate", 1)
    for factor in NODE_FACTORS:
        yield (("trainer.num_nodes", trainer.num_nodes * factor),)


def _unions(config: RunConfig, size: int) -> Iterator[tuple[Edit, ...]]:
    """Yield unions of some kinds of changes that touch no setting twice, fewest nodes first."""
    for kinds in itertools.combinations(_edits(config), size):
        edits = tuple(edit for kind in kinds for edit in kind)
        if len({path for path, _ in edits}) == len(edits):
            yield edits


def _combined(config: RunConfig, edits: Sequence[Edit]) -> Change:
    changed = config
    for path, value in edits:
        section, name = path.split(".")
        old: Any = value_at(changed, section)
        sections: Any = {section: replace(old, **{name: value})}
        changed = replace(changed, **sections)
    words = " ".join(f"{path}={str(value).lower()}" for path, value in edits)
    return Change(words, changed)
