"""Rules of a configuration, each with the requirement and the fix that its error line states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zero_strategy.config import refusal


class ConfigError(ValueError):
    """A configuration that cannot run; the text lists every problem, one line each."""


class Rule(NamedTuple):
    """One condition on a field."""

    name: str
    """Field that is named as wrong."""
    holds: bool
    requirement: str
    """Reads on after "must be"."""
    fix: str
    """What to do, a whole sentence."""


def broken(path: str, config: object, rules: Iterable[Rule]) -> list[str]:
    """Return one error line for each rule that does not hold.

    Args:
        path: dotted path of the section; empty for the top.
        config: the section; its field values are shown.
        rules: the conditions.
    """
    prefix = f"{path}." if path else ""
    return [
        refusal(f"{prefix}{rule.name}", value_at(config, rule.name), [rule.requirement], rule.fix)
        for rule in rules
        if not rule.holds
    ]


def value_at(config: object, path: str) -> object:
    """Return a field's value by its dotted path below `config`."""
    for name in path.split("."):
        config = getattr(config, name)
    return config


def at_least(config: object, smallest: float, *names: str) -> list[Rule]:
    """Return one rule per field: its value is at least `smallest`."""
    return [
        Rule(n, value_at(config, n) >= smallest, f"at least {smallest}", f"Use {smallest} or more.")  # type: ignore[operator]
        for n in names
    ]


def above_zero(config: object, *names: str) -> list[Rule]:
    """Return one rule per field: its value is positive."""
    return [
        Rule(n, value_at(config, n) > 0, "above 0", "Use a positive number.")  # type: ignore[operator]
        for n in names
    ]
