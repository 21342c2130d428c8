"""Token ids in one memory-mapped file, with the start of every document.

Layout, little-endian: a header of 64 bytes, the ids of all documents one after another (uint16 or
uint32), zeros up to a multiple of 8, then one uint64 offset per document and one past the last.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

MAGIC = b"ZSTOKENS"
VERSION = 1
# magic, version, bytes per id, vocab_size, num_tokens, num_documents, num_bytes, zero padding
HEADER = struct.Struct("<8sIIQQQQ16x")
ITEM_TYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Tokenizer(Protocol):
    """What turns a document's text into ids below `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of one document, 1-D and unsigned, with its separator."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, and `START` = 256 at the start of each document."""

    START = 256
    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        """Return START and the bytes of the text, uint16, (1 + num_bytes,)."""
        ids = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)
        return np.concatenate((np.array([self.START], np.uint16), ids.astype(np.uint16)))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; START vanishes, broken UTF-8 shows as U+FFFD."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFile:
    """The tokens of a corpus, mapped from a file or held in memory.

    Attributes:
        ids: all tokens, (num_tokens,), uint16 or uint32, little-endian.
        offsets: where each document starts, and the end of the last, (num_documents + 1,), uint64.
        num_bytes: UTF-8 bytes of the text; bits per byte are counted with it.
        vocab_size: ids lie below it.
    """

    ids: np.ndarray
    offsets: np.ndarray
    num_bytes: int
    vocab_size: int

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Return the ids of one document, a view."""
        return self.ids[int(self.offsets[index]) : int(self.offsets[index + 1])]

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Map a file, after every size in its header was checked against the file's length.

        Raises:
            ValueError: the file is no token file, of another version, cut short or inconsistent.

        Cost: reads the header and the offsets; ids are read when they are used.
        """
        path = Path(path)
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            file_bytes = os.fstat(file.fileno()).st_size
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise _refused(path, "must be a token file. Make one with `zs data build`.")
        _, version, item_bytes, vocab_size, num_tokens, num_documents, num_bytes = HEADER.unpack(
            head
        )
        if version != VERSION or item_bytes not in ITEM_TYPES:
            raise _refused(
                path,
                f"must have version {VERSION} and 2 or 4 bytes per id, it has version {version} "
                f"and {item_bytes}. Build it again with `zs data build`.",
            )
        offsets_start = _aligned(HEADER.size + num_tokens * item_bytes)
        expected_bytes = offsets_start + 8 * (num_documents + 1)
        if file_bytes != expected_bytes or num_tokens == 0:
            raise _refused(
                path,
                f"must hold {expected_bytes} bytes and at least one token by its header, it holds "
                f"{file_bytes} bytes. It was cut short or damaged: copy or build it again.",
            )
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        ids_end = HEADER.size + num_tokens * item_bytes
        ids = mapped[HEADER.size : ids_end].view(ITEM_TYPES[item_bytes])
        offsets = np.array(mapped[offsets_start:].view("<u8"))
        if offsets[0] != 0 or offsets[-1] != num_tokens or (offsets[1:] < offsets[:-1]).any():
            raise _refused(path, "must have rising document offsets. Build it again.")
        return cls(ids=ids, offsets=offsets, num_bytes=num_bytes, vocab_size=vocab_size)

    @classmethod
    def from_documents(cls, texts: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
        """Encode documents in memory, with no file.

        Raises:
            ValueError: there is no text.
        """
        parts, num_bytes = [], 0
        for text in texts:
            parts.append(tokenizer.encode(text))
            num_bytes += len(text.encode(errors="replace"))
        if not num_bytes:
            raise ValueError("texts = []: must hold text. Give at least one non-empty document.")
        return cls(
            ids=np.concatenate(parts),
            offsets=np.cumsum([0, *map(len, parts)], dtype=np.uint64),
            num_bytes=num_bytes,
            vocab_size=tokenizer.vocab_size,
        )


def write_token_file(path: str | Path, texts: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Encode documents one by one into a file, which appears whole or not at all.

    Args:
        path: where the file goes; its folder is made.
        texts: the documents; read once, so a generator of any length will do.
        tokenizer: gives the ids; their width follows from its vocab_size.

    Returns:
        The new file, mapped.

    Raises:
        ValueError: there is no text, or an id is not below vocab_size.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            _write(file, texts, tokenizer)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    return TokenFile.open(path)


def _write(file: BinaryIO, texts: Iterable[str], tokenizer: Tokenizer) -> None:
    item_bytes = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    offsets, num_bytes = [0], 0
    file.seek(HEADER.size)
    for text in texts:
        ids = tokenizer.encode(text)
        if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
            raise ValueError(
                f"tokenizer.encode(...).max() = {ids.max()}: must be below vocab_size = "
                f"{tokenizer.vocab_size}. Correct the tokenizer's vocab_size."
            )
        file.write(ids.astype(ITEM_TYPES[item_bytes]).tobytes())
        offsets.append(offsets[-1] + len(ids))
        num_bytes += len(text.encode(errors="replace"))
    if not num_bytes:
        raise ValueError("texts = []: must hold text. Give at least one non-empty document.")
    file.seek(_aligned(HEADER.size + offsets[-1] * item_bytes))
    file.write(np.array(offsets, dtype="<u8").tobytes())
    file.seek(0)
    counts = (offsets[-1], len(offsets) - 1, num_bytes)
    file.write(HEADER.pack(MAGIC, VERSION, item_bytes, tokenizer.vocab_size, *counts))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def _refused(path: Path, requirement: str) -> ValueError:
    return ValueError(f"token file = {str(path)!r}: {requirement}")
