"""Which tensors of a checkpoint do not fit where they are to go, and which may be cast.

Shapes must be the same. A floating-point tensor of another dtype is rounded where the run asked for
it, and told; integers and booleans are never cast.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch

_SHOWN = 3


@final
@dataclass(frozen=True, slots=True)
class Pair:
    """A stored tensor and its destination."""

    name: str
    """Canonical."""
    stored_shape: tuple[int, ...]
    stored_dtype: torch.dtype
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def can_be_cast(self) -> bool:
        """Whether both are floating-point numbers."""
        return self.stored_dtype.is_floating_point and self.dtype.is_floating_point

    def __str__(self) -> str:
        return (
            f"{self.name}: stored as {self.stored_shape} {self.stored_dtype}, must be {self.shape} "
            f"{self.dtype}"
        )


@final
class Casts:
    """Looks at what is loaded before it is loaded, and counts what is cast.

    Args:
        allowed: whether a dtype may differ.
    """

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._counts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def check(self, pairs: Iterable[Pair]) -> None:
        """Refuse what does not fit. No collective.

        Raises: ValueError: shows the first few names, and what would let them load.
        """
        pairs = list(pairs)
        reshaped = [p for p in pairs if p.stored_shape != p.shape]
        retyped = [p for p in pairs if p.stored_dtype != p.dtype]
        fixed = [p for p in retyped if not p.can_be_cast]
        if reshaped or fixed:
            raise ValueError(f"{_list(reshaped or fixed)}\nLoad a checkpoint of the same model.")
        if retyped and not self._allowed:
            raise ValueError(
                f"{_list(retyped)}\nThe precision differs: weights are bfloat16 under 'bf16-true', "
                "and float32 under '32-true', 'bf16-mixed' and '16-mixed'. Use that of the run "
                "that was saved, or ZeroStrategy(saving=SaveConfig(casts=True)), which converts."
            )
        self._counts.update((p.stored_dtype, p.dtype) for p in retyped)

    def told(self) -> str:
        """Return what was cast since the last call, or nothing."""
        counts, self._counts = self._counts, Counter()
        done = [f"{n} tensors from {there} to {here}" for (there, here), n in counts.items()]
        return (
            f"zero.saving.casts = True: the checkpoint was cast, {', '.join(done)}" if done else ""
        )


def _list(pairs: list[Pair]) -> str:
    lines = [str(pair) for pair in pairs[:_SHOWN]]
    rest = len(pairs) - _SHOWN
    return "\n".join([*lines, *([f"and {rest} more"] if rest > 0 else [])])
