"""What others write to the weights of an offloaded module, taken over by the state behind them.

The module holds the upper halves of fp32 weights. Who loads weights into it tells their values,
which are taken exactly. Who changes them in place leaves rounded ones, seen by the tensors' version
counters; a write through `parameter.data` goes past these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zero_strategy.gradient import local
from zero_strategy.kernels.adam import split
from zero_strategy.offload.engine import OffloadEngine
from zero_strategy.offloaded import as_shard


@final
class Writes:
    """Those of one sharded module.

    Args:
        parameters: name -> offloaded parameter.
        engine: gives the engine that holds the state.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], engine: Callable[[], OffloadEngine]
    ) -> None:
        self.runs = False
        """Whether a run has begun its first step."""
        self.was_written = False
        """Whether a weight was changed in place."""
        self._parameters, self._engine = parameters, engine
        self._names = {id(p): n for n, p in parameters.items()}
        self._versions: dict[str, int] = {}
        self._loaded: dict[str, Tensor] = {}
        """Weights that are about to be written to the module, and are the state's already."""
        self.note()

    def note(self) -> None:
        """Take the weights as they are for the state's own."""
        self._versions = {n: p._version for n, p in self._parameters.items()}

    def begin_step(self) -> None:
        """Before the forward of a micro-batch."""
        self.take_over()
        self._loaded.clear()
        self.runs = True

    def take_over(self) -> None:
        """Bring to the state what was changed in place, as far as bf16 holds it."""
        changed = [n for n, p in self._parameters.items() if p._version != self._versions[n]]
        # What was loaded is the state's already, unless it was changed again.
        loaded = {name: self._loaded.pop(name) for name in changed if name in self._loaded}
        same = {n for n, values in loaded.items() if torch.equal(values, self._weights(n))}
        written = [name for name in changed if name not in same]
        if written:
            self._take(written)
        if changed:
            self.note()

    def _take(self, written: Sequence[str]) -> None:
        self.was_written = True
        self._engine().flush()
        state = self._engine().state
        for name in written:
            if name in state.resident:
                self._take_resident(name)
            else:
                self._take_rounded(name, self._weights(name).cpu(), state.host.upper(name))

    def _take_rounded(self, name: str, values: Tensor, held: Tensor) -> None:
        """Take bf16 weights, (n,), where they are not those that are held for the fp32 ones."""
        changed = values != held
        if changed.any():
            state = self._engine().state
            master = state.master(name)
            changed = changed.to(master.device)
            master[changed] = values.to(master.device)[changed].float()
            state.write_master(name, master)

    def _take_resident(self, name: str) -> None:
        if self.runs:
            raise RuntimeError(
                f"{name} was written to while its fp32 weights are kept beside it on the device: "
                "must not be changed in place during a run, since which of its elements changed "
                "cannot be told. Use module.load_state_dict, or keep the state in host memory, "
                "with OffloadConfig(placement='host')."
            )
        warnings.warn(
            f"{name} was written to between two runs: its fp32 weights are now the bf16 ones. With "
            "module.load_state_dict they are what you load.",
            stacklevel=2,
        )
        self._engine().state.resident.take_weights(name)

    @torch.no_grad()
    def load(self, parameter: DTensor, values: DTensor) -> Tensor:
        """Take weights that are about to be loaded into a parameter, exactly.

        Of bf16 weights those are taken that differ from what the parameter holds: the rest would
        lose what the state knows beyond them.

        Args:
            parameter: of the sharded module.
            values: sharded like it, on any device.

        Returns: what the parameter is to hold of them.

        Raises:
            RuntimeError: gradients have arrived whose step was not decided.
        """
        name = self._names.get(id(parameter))
        if name is None:
            return values
        self._engine().flush()
        self.take_over()
        own, held = local(values).flatten(), self._weights(name)
        if own.dtype == torch.bfloat16:
            own = own.to(held.device)
            self._take_rounded(name, own, held)
        else:
            self._engine().state.write_master(name, own.float())
            own = halves(own.to(held.device, torch.float32))[0]
        # Torch writes it to the parameter, which is then no change by someone else.
        self._loaded[name] = own
        return as_shard(own, parameter, parameter.device_mesh)

    def _weights(self, name: str) -> Tensor:
        return local(self._parameters[name].detach()).flatten()


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves of fp32 weights, (n,) each."""
    upper = torch.empty_like(master, dtype=torch.bfloat16)
    lower = torch.empty_like(master, dtype=torch.int16)
    split(master, upper, lower)
    return upper, lower
