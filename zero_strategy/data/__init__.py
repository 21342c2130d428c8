"""Tokens on disk, an order that resumes exactly, and the Lightning data module around both."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zero_strategy.data.loader import ResumableLoader
from zero_strategy.data.sampler import ResumableSampler
from zero_strategy.data.tokens import ByteTokenizer, TokenFile, write_token_file

if TYPE_CHECKING:
    from zero_strategy.data.module import TokenDataModule

__all__ = [
    "ByteTokenizer",
    "ResumableLoader",
    "ResumableSampler",
    "TokenDataModule",
    "TokenFile",
    "write_token_file",
]


def __getattr__(name: str) -> Any:
    # The one part that needs Lightning is imported on first use.
    if name != "TokenDataModule":
        raise AttributeError(f"module 'zero_strategy.data' has no attribute {name!r}")
    return import_module("zero_strategy.data.module").TokenDataModule
