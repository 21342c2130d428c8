"""A plain Lightning checkpoint: one file of `torch.save` with all that a Trainer keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.foreign import torch_file
from zero_strategy.checkpoint.foreign.found import Found, by_canonical_name, module_state
from zero_strategy.checkpoint.foreign.optimizers import COUNTED, is_counted, named_optimizer
from zero_strategy.checkpoint.foreign.parts import lone_file
from zero_strategy.checkpoint.foreign.settle import settled
from zero_strategy.checkpoint.foreign.unpickle import refuse


def read(path: Path, *, weights_only: bool, unsafe: bool) -> Found:
    """Read a file.

    Args:
        path: of the file.
        weights_only: leave optimizer states out.
        unsafe: run what its pickle says.

    Raises:
        RefusedError: no Trainer wrote it, or its optimizer counts parameters in a way that fits
            several names.
    """
    saved: Any = torch_file.read(lone_file(path), unsafe=unsafe)
    if not isinstance(saved, dict) or "pytorch-lightning_version" not in saved:
        refuse("must be a whole file that a Trainer saved; weights alone go into the module")
    if not isinstance(saved.get("state_dict"), dict):
        refuse("has no state_dict")
    weights = by_canonical_name(saved.pop("state_dict"))
    # Names the class of hyper-parameters, which are stored as plain data.
    saved.pop("hparams_type", None)
    optimizers, extra = saved.pop("optimizer_states", None), saved.pop("sharded_state", {})
    checkpoint: dict[str, Any] = {"state_dict": module_state(weights)}
    checkpoint["sharded_state"] = {key: module_state(of) for key, of in extra.items()}
    notes = []
    if optimizers and weights_only:
        notes.append(f"left out: states of {len(optimizers)} optimizers")
    elif isinstance(optimizers, list):
        checkpoint["optimizer_states"] = [
            named_optimizer(one, weights, f"optimizer_states[{index}]")
            for index, one in enumerate(optimizers)
        ]
        if any(map(is_counted, optimizers)):
            notes.append(COUNTED)
    return Found(checkpoint=settled(saved, "checkpoint") | checkpoint, notes=tuple(notes))
