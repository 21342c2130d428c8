"""Random states of one rank: what is stored of them, and draws that must leave them as they are.

A run draws numbers in training, in evaluation, and where a loader starts a pass (DataLoader draws
a seed for its workers). Only the first kind is replayed by a run that resumes: it skips an
evaluation that was done, and starts a pass where the uninterrupted run was in the middle of one.
So the others get streams of their own (`apart`), seeded by what a resumed run knows too, and
training's stream does not depend on them. What is left to say is where that stream stood: at the
save, or, if a step had begun, before the batches of that step were loaded (`resuming.py`).

Streams of `apart` are seeded anew each time. To take back the draws alone would show an evaluation
the same numbers for ever where training itself draws none.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast, final

import numpy as np
import torch
from torch import Tensor

_WORDS = 624
"""Words of a Mersenne twister, which numpy's and Python's generators are."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """Where this rank's generators stand: torch's for the CPU and the device, numpy's, Python's.

    Generators that you made yourself are not among them.

    Cost: 75 us to take, no host sync.
    """

    cpu: Tensor
    device: Tensor | None
    numpy: dict[str, Any]
    python: tuple[Any, ...]

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Return the states as they are.

        Args:
            device: the accelerator that is trained on, or the CPU.
        """
        return cls(
            cpu=torch.get_rng_state(),
            device=None if device.type == "cpu" else _of(device).get_rng_state(device),
            numpy=cast(dict[str, Any], np.random.get_state(legacy=False)),
            python=random.getstate(),
        )

    def restore(self, device: torch.device) -> None:
        """Let the generators go on from these states."""
        torch.set_rng_state(self.cpu)
        if device.type != "cpu" and self.device is not None:
            _of(device).set_rng_state(self.device, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def plain(self) -> dict[str, Any]:
        """Return the states as numbers and bytes.

        Raises: ValueError: numpy's global generator was replaced by one of another kind.
        """
        kind = self.numpy["bit_generator"]
        if kind != "MT19937":
            raise ValueError(
                f"numpy's global generator is {kind}: must be MT19937 for its state to be saved. "
                "Leave np.random.set_bit_generator out, and use np.random.Generator objects."
            )
        twister = self.numpy["state"]
        version, words, gauss = self.python
        return {
            "cpu": self.cpu.numpy().tobytes(),
            "device": None if self.device is None else self.device.numpy().tobytes(),
            "numpy": {
                "key": _bytes(twister["key"]),
                "pos": int(twister["pos"]),
                "has_gauss": int(self.numpy["has_gauss"]),
                "gauss": float(self.numpy["gauss"]),
            },
            "python": {"version": version, "words": _bytes(words), "gauss": gauss},
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Self:
        """Return what `plain` was made of.

        Raises: ValueError: a state that no generator can have.
        """
        numpy, python = data["numpy"], data["python"]
        key, words = _words(numpy["key"]), _words(python["words"])
        # numpy takes any position, and would read beyond the key.
        fits = key.size == _WORDS and words.size == _WORDS + 1 and 0 <= numpy["pos"] <= _WORDS
        if not fits:
            raise ValueError(
                f"random state with {key.size} and {words.size} words at {numpy['pos']}: must be "
                f"those of a Mersenne twister. Choose another checkpoint."
            )
        return cls(
            cpu=_tensor(data["cpu"]),
            device=None if data["device"] is None else _tensor(data["device"]),
            numpy={
                "bit_generator": "MT19937",
                "state": {"key": key, "pos": numpy["pos"]},
                "has_gauss": numpy["has_gauss"],
                "gauss": numpy["gauss"],
            },
            python=(python["version"], tuple(words.tolist()), python["gauss"]),
        )


def _of(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _bytes(words: Any) -> bytes:
    return np.asarray(words, dtype="<u4").tobytes()


def _words(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def stream_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that the parts decide, on every machine alike."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(seed: int, device: torch.device) -> None:
    """Let all generators of this rank start anew."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        _of(device).manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def apart(seed: int, device: torch.device | None = None) -> Generator[RandomState, None, None]:
    """Draw from a stream of its own inside; gives the state that is there again afterwards.

    Args:
        seed: of the stream.
        device: whose generator is set apart too; None for the CPU's alone.
    """
    device = device or torch.device("cpu")
    outer = RandomState.now(device)
    reseed(seed, device)
    try:
        yield outer
    finally:
        outer.restore(device)
