"""Tensors of a checkpoint that are not there before they are written or read.

What a run holds in another form than it is stored in would lie there a second time while it is
saved. A `Late` tensor is made when its turn comes and let go before the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from typing_extensions import override


@final
@dataclass(frozen=True, slots=True, eq=False)
class Late:
    """A tensor that a run can make, and take.

    Attributes:
        like: on the meta device: its shape, its dtype and how it is sharded.
        read: makes it, as it is now.
        write: takes it, whole or this rank's shard of it as `read` gave it.
        stays: it can be held as it is, and read while the run goes on.
    """

    like: Tensor
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]
    stays: bool = False


@final
class LateDict(MutableMapping[str, Any]):
    """A dictionary whose late tensors are made whenever they are asked for.

    Args:
        entries: name -> `Late`, or the value itself.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = dict(entries)
        """As they are, for who can do without the values."""

    def __getitem__(self, name: str) -> Any:
        value = self.entries[name]
        return value.read() if isinstance(value, Late) else value

    def __setitem__(self, name: str, value: Any) -> None:
        self.entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def entries(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a dictionary holds, with late tensors as such."""
    return values.entries if isinstance(values, LateDict) else values


def stand_in(value: Tensor | Late) -> Tensor:
    """Return a tensor's shape, dtype and sharding as a tensor; the tensor itself if it is there."""
    return value.like if isinstance(value, Late) else value


class LateSavePlanner(DefaultSavePlanner):
    """Makes each tensor when it is written.

    Args:
        tensors: canonical name -> tensor; the state that is saved holds their stand-ins.
    """

    def __init__(self, tensors: Mapping[str, Tensor | Late]) -> None:
        super().__init__()
        self._tensors = tensors

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return find_state_dict_object({index.fqn: _made(self._tensors[index.fqn])}, index)


class LateLoadPlanner(DefaultLoadPlanner):
    """Makes each tensor for a part that is read, and hands it over once that is there.

    Args:
        tensors: as in `LateSavePlanner`.
    """

    def __init__(self, tensors: Mapping[str, Tensor | Late]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._made: Tensor | None = None

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # Not the default's, which allocates what lies on meta.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        self._made = _made(self._tensors[index.fqn])
        return find_state_dict_object({index.fqn: self._made}, index)

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        target = self._tensors[read_item.dest_index.fqn]
        if isinstance(target, Late):
            assert self._made is not None, "looked up before it is filled"
            target.write(self._made)
        self._made = None


def _made(value: Tensor | Late) -> Tensor:
    return value.read() if isinstance(value, Late) else value
