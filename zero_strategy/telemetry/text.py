"""Figures as a reader takes them in: three digits and a unit."""

import math

ABSENT = "-"


def count(value: float | None) -> str:
    """A count with a thousands letter: 41234 is `41.2k`, 134500000 is `134.5M`."""
    if value is None:
        return ABSENT
    for letter, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999950 and above round to the next letter.
        if abs(value) >= scale * 0.99995:
            scaled = value / scale
            return f"{scaled:.2f}{letter}" if letter in "TB" else f"{scaled:.1f}{letter}"
    return f"{value:.0f}"


def gib(num_bytes: float | None) -> str:
    """Bytes with a binary unit: `3.9 GiB`, `512 MiB`."""
    if num_bytes is None:
        return ABSENT
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            scaled = num_bytes / scale
            return f"{scaled:.1f} {unit}" if scaled < 100 else f"{scaled:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as `40ms`, `0.9s`, `42s`, `12m04s`, `3h07m` or `2d05h`."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if 0 < seconds < 0.0995:
        return f"{seconds * 1e3:.0f}ms"
    if 0 < seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def percent(share: float | None) -> str:
    """A share of 1 in whole percent, and in tenths below one: `38%`, `0.4%`."""
    if share is None:
        return ABSENT
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def number(value: float | None, spec: str) -> str:
    """A number in a format of Python's, or the sign for none."""
    return ABSENT if value is None else format(value, spec)
