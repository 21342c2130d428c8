"""A Lightning data module over one token corpus that resumes on the next unseen sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import lightning.pytorch as pl
import numpy as np
from torch.utils.data import DataLoader
from typing_extensions import override

from zero_strategy.data.corpus import CORPORA
from zero_strategy.data.loader import ResumableLoader, Windows
from zero_strategy.data.sampler import ResumableSampler
from zero_strategy.data.tokens import ByteTokenizer, TokenFile


@final
class TokenDataModule(pl.LightningDataModule):
    """Shuffled training windows and, from the end of the corpus, validation windows in order.

    Batches are token ids, (batch_size, seq_len + 1), int64: inputs are all but the last column,
    targets all but the first. The state is one global count of samples, saved with every
    checkpoint, so a run resumes exactly on any number of ranks.

    Args:
        corpus: "builtin", "stdlib", or a token file made by `zs data build`.
        seq_len: predicted tokens per row.
        batch_size: rows per micro-batch on each rank.
        val_fraction: part of the tokens kept for validation, rounded to whole documents where
            the corpus has several.
        seed: chooses the training order.
        num_workers: loader processes per rank.

    Example:
        >>> data = TokenDataModule("builtin", seq_len=256, batch_size=8)
        >>> Trainer(strategy="zero3", max_steps=100).fit(module, data)
    """

    def __init__(
        self,
        corpus: str | Path,
        *,
        seq_len: int,
        batch_size: int,
        val_fraction: float = 0.1,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.num_workers = num_workers
        self._tokens: TokenFile | None = None
        self._sampler: ResumableSampler | None = None

    @property
    def tokens(self) -> TokenFile:
        """The corpus, loaded on first use."""
        if self._tokens is None:
            self._tokens = load_corpus(self.corpus)
        return self._tokens

    @override
    def setup(self, stage: str) -> None:
        """Split the corpus; at "fit" the order starts from its first sample.

        Raises:
            ValueError: a split is too short for one row, or for one row per rank.
        """
        train_ids, val_ids = split(self.tokens, self.val_fraction)
        self.train_rows = Windows(train_ids, self.seq_len)
        self.val_rows = Windows(val_ids, self.seq_len)
        for name, rows in (("training", self.train_rows), ("validation", self.val_rows)):
            if not len(rows):
                raise ValueError(
                    f"data.seq_len = {self.seq_len}: must be shorter than the {name} part, "
                    f"{len(rows.ids)} tokens. Use shorter rows, or another data.val_fraction."
                )
        if stage == "fit":
            ranks = (self.trainer and self.trainer.distributed_sampler_kwargs) or {}
            self._sampler = ResumableSampler(self.train_rows, seed=self.seed, **ranks)
            global_batch = self.batch_size * self._sampler.num_replicas
            if global_batch > len(self.train_rows):
                raise ValueError(
                    f"data.batch_size = {self.batch_size}: must leave at least one batch in the "
                    f"{len(self.train_rows)} training rows of {self._sampler.num_replicas} ranks. "
                    f"Use at most {len(self.train_rows) // self._sampler.num_replicas}."
                )

    @override
    def train_dataloader(self) -> ResumableLoader:
        """Return this rank's loader, which goes on from the state."""
        return ResumableLoader(
            self.train_rows,
            sampler=self._train_sampler(),
            batch_size=self.batch_size,
            **self._loading(),
        )

    @override
    def val_dataloader(self) -> DataLoader:
        """Return the validation rows in order; Lightning divides them among the ranks."""
        return DataLoader(self.val_rows, batch_size=self.batch_size, num_workers=self.num_workers)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the global position in the training order."""
        return self._sampler.state_dict() if self._sampler else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            ValueError: the position belongs to other data or another seed.
        """
        if state_dict and self._sampler:
            self._sampler.load_state_dict(state_dict)

    def _loading(self) -> dict[str, Any]:
        # Only from pinned memory is the copy to a GPU asynchronous.
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return {"num_workers": self.num_workers, "pin_memory": on_gpu}

    def _train_sampler(self) -> ResumableSampler:
        if self._sampler is None:
            self.setup("fit")
        assert self._sampler is not None, "setup('fit') makes the sampler"
        return self._sampler


def load_corpus(corpus: str | Path) -> TokenFile:
    """Return a corpus by name, as bytes, or by the path of its token file.

    Raises:
        ValueError: no corpus of that name and no such file.
    """
    if corpus in CORPORA:
        return TokenFile.from_documents(CORPORA[str(corpus)](), ByteTokenizer())
    if not Path(corpus).is_file():
        raise ValueError(
            f"data.corpus = {str(corpus)!r}: must be {', '.join(CORPORA)} or an existing token "
            "file. Make one with `zs data build`."
        )
    return TokenFile.open(corpus)


def split(tokens: TokenFile, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Cut the last part off for validation, between documents where there are several.

    Returns:
        Views of the training and of the validation ids.
    """
    cut = round(len(tokens.ids) * (1 - val_fraction))
    if tokens.num_documents > 1:
        inner = tokens.offsets[1:-1].astype(np.int64)
        cut = int(inner[np.abs(inner - cut).argmin()])
    return tokens.ids[:cut], tokens.ids[cut:]
