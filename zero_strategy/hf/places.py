"""Where the tensors of a model lie that its files know by name.

Names change when adapters are injected or a wrapper is put around a model, and sharding replaces
the tensors. The modules that hold them stay.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple, final

from torch import Tensor, nn


class Place(NamedTuple):
    """A module and the name it has for a parameter or buffer of its own."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        """What lies there now."""
        return getattr(self.module, self.name)


@final
class Places:
    """Those of one model, as its state dict names them.

    Args:
        model: as it was built, before anything was added to it.
        derived: also those that the state dict leaves out, such as rotary frequencies.
    """

    def __init__(self, model: nn.Module, *, derived: bool = False) -> None:
        # `state_dict` tells buffers that are stored from those that are not.
        stored = model.state_dict(keep_vars=True).keys()
        found = (
            (f"{path}.{name}" if path else name, Place(module, name))
            for path, module in model.named_modules(remove_duplicate=False)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        )
        self.by_name = {name: place for name, place in found if derived or name in stored}
        self._known = {(id(module), name) for module, name in self.by_name.values()}

    def holds(self, module: nn.Module, name: str) -> bool:
        """Whether a tensor is one of those."""
        return (id(module), name) in self._known


def told_with_nearest(names: Iterable[str], others: Iterable[str]) -> str:
    """Return up to five names, each with the one of the others that is most like it."""
    names, others = sorted(names), sorted(others)
    listed = []
    for name in names[:5]:
        nearest = difflib.get_close_matches(name, others, n=1)
        listed.append(f"{name} (nearest: {nearest[0]})" if nearest else name)
    return ", ".join(listed) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
