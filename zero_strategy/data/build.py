"""From text and JSON Lines files to one token file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from zero_strategy.data.tokens import ByteTokenizer, TokenFile, Tokenizer, write_token_file

JSON_LINES = {".jsonl", ".ndjson"}


def build_token_file(
    out: str | Path,
    inputs: Iterable[str | Path],
    *,
    field: str = "text",
    tokenizer: Tokenizer | None = None,
) -> TokenFile:
    """Encode files in the given order.

    Args:
        out: the token file to write; it appears whole or not at all. Its folder is made.
        inputs: `.jsonl` or `.ndjson` files with one document per line, or text files that are one
            document each.
        field: key of the text in each JSON object.
        tokenizer: gives the ids; bytes by default.

    Returns:
        The new file, mapped.

    Raises:
        ValueError: `out` is an input, a folder, below a file, or holds something else than tokens;
            an input is missing, not UTF-8, or a line holds no such text; names the line.
    """
    paths = [Path(path) for path in inputs]
    _refuse_other_contents(Path(out), paths)
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(f"inputs = {missing}: must be existing files. Check the paths.")
    texts = (text for path in paths for text in documents(path, field))
    return write_token_file(out, texts, tokenizer or ByteTokenizer())


def _refuse_other_contents(out: Path, inputs: list[Path]) -> None:
    """Keep a forgotten output name from replacing a text."""
    if out.resolve() in {path.resolve() for path in inputs}:
        raise ValueError(f"out = '{out}': must not be an input. Name the token file first.")
    if out.is_dir():
        raise ValueError(
            f"out = '{out}': must be a token file or not exist, but is a folder. Name a file in "
            f"it, such as {out / 'tokens.tok'}."
        )
    if not out.exists():
        _refuse_folder(out)
        return
    try:
        TokenFile.open(out)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"out = '{out}': must be a token file or not exist, but holds something else. Name the "
            "token file first, before the inputs."
        ) from error


def _refuse_folder(out: Path) -> None:
    """Find out before the inputs are read that there can be no folder for the file."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise ValueError(
            f"out = '{out}': must lie in a folder, but {folder} is a file. Name the token file "
            "first, before the inputs."
        )


def documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of one file, reading JSON Lines one line at a time."""
    try:
        if path.suffix not in JSON_LINES:
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, field, f"{path}:{number}")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} must be UTF-8 text. Convert the file first."
        ) from error


def _text_of(line: str, field: str, place: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: must be one JSON object per line ({error.msg}).") from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        raise ValueError(
            f"{place}: must be an object with text under {field!r}. Name its key with --field."
        )
    return value[field]
