"""Fixed-length windows of a token stream, and a loader that knows how far it was read."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zero_strategy.checkpoint.random_state import stream_seed
from zero_strategy.data.sampler import ResumableSampler


@final
class Windows(Dataset[Tensor]):
    """Rows of seq_len + 1 tokens, each starting at the last token of the one before.

    A row holds its inputs and, shifted by one, its targets, so every token but the very first is
    predicted once. Tokens after the last whole row are not used.

    Args:
        ids: a token stream, 1-D, any unsigned dtype.
        seq_len: predicted tokens per row.
    """

    def __init__(self, ids: np.ndarray, seq_len: int) -> None:
        self.ids = ids
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.seq_len

    def __getitem__(self, index: int) -> Tensor:
        """Return row `index`, (seq_len + 1,), int64."""
        start = index * self.seq_len
        return torch.from_numpy(self.ids[start : start + self.seq_len + 1].astype(np.int64))


@final
class ResumableLoader(DataLoader):
    """A loader that counts what it handed out, not what its workers read ahead.

    A batch counts when it is asked for, so a state taken after a training step covers that step.
    The state is Lightning's loader protocol and that of plain loops:

    Example:
        >>> loader = ResumableLoader(rows, sampler=ResumableSampler(rows), batch_size=8)
        >>> for batch in loader:
        ...     train_on(batch)
        ...     state = loader.state_dict()

    Args:
        dataset: rows by number.
        sampler: this rank's order.
        batch_size: rows per batch on this rank; an incomplete batch is left for the next pass.
        options: anything else DataLoader takes.
    """

    def __init__(
        self, dataset: Dataset, *, sampler: ResumableSampler, batch_size: int, **options: Any
    ) -> None:
        # Torch draws the workers' seed from it, in place of the stream that training draws from.
        self._draws = None if "generator" in options else torch.Generator()
        options = {"generator": self._draws, **options}
        super().__init__(dataset, sampler=sampler, batch_size=batch_size, drop_last=True, **options)
        self.order = sampler
        self.global_batch = batch_size * sampler.num_replicas

    def __iter__(self) -> Any:
        # A generator: workers start reading at the first batch, after any state was loaded.
        order = self.order
        if self._draws is not None:
            self._draws.manual_seed(stream_seed(order.seed, order.rank, order.consumed))
        for batch in super().__iter__():
            order.consumed += self.global_batch
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state, equal on all ranks."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; before the pass starts."""
        self.order.load_state_dict(state)
