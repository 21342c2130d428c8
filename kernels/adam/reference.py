"""Adam over split master weights in plain torch: the truth, and the fallback without a compiler.

Each chunk is joined to fp32 temporaries, stepped by torch's own fused optimizer, and split again.
With AVX2 or AVX-512 torch's vector body does the operations of `csrc/adam.c` in the same order, so
the two agree bitwise. Its scalar tail fuses another product in `v`, hence the padding below; and
without those instruction sets torch fuses nothing and differs in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.adam import adam as torch_adam

from zero_strategy.kernels.adam.state import AdamState, Pending

# Bounds the temporaries, about 20 bytes for each element of a chunk; the fastest size measured.
CHUNK = 1 << 18
# The largest number of floats in a vector of torch's CPU kernels.
VECTOR = 16
# The sum of squares folds blocks of this many elements, as rows of lanes.
BLOCK, LANES = 1 << 16, 256


class ReferenceAdam:
    """The passes in torch; `split` and `join` work on any device, the others on the CPU."""

    name = "reference"

    @torch.no_grad()
    def run(
        self,
        state: AdamState,
        *,
        commit: Pending | None,
        preview: Pending | None,
        wire: Tensor | None,
        threads: int | None,
    ) -> None:
        """Commit one step, preview one into `wire`, or both; torch chooses the threads."""
        for start, length in _chunks(state.length):
            part = state.narrow(start, length)
            if commit is not None:
                p, m, v = _stepped(part, commit, start)
                self.split(p, part.upper, part.lower)
                _store(part.m, m)
                _store(part.v, v)
            if preview is not None and wire is not None:
                p, _, _ = _stepped(part, preview, start)
                _store(wire.narrow(0, start, length), p)

    @torch.no_grad()
    def split(self, master: Tensor, upper: Tensor, lower: Tensor) -> None:
        """Write the halves of fp32 weights."""
        for start, length in _chunks(master.numel()):
            bits = _bits(master.narrow(0, start, length))
            _narrow_into(upper.narrow(0, start, length), bits)
            # The copy keeps the low 16 bits.
            lower.narrow(0, start, length).copy_(bits)

    @torch.no_grad()
    def join(self, upper: Tensor, lower: Tensor) -> Tensor:
        """Return the fp32 weights of two halves."""
        bits = upper.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits.add_(lower).view(torch.float32)

    @torch.no_grad()
    def sum_of_squares(self, grad: Tensor, *, threads: int | None) -> Tensor:
        """Return the fp64 sum of squares, in the order of the C kernel."""
        of_block: list[float] = []
        for start, length in _chunks(grad.numel()):
            values = grad.narrow(0, start, length).double()
            blocks = pad(values, (0, -length % BLOCK)).view(-1, BLOCK // LANES, LANES).square_()
            lanes = torch.zeros(len(blocks), LANES, dtype=torch.float64)
            for row in blocks.unbind(1):
                lanes += row
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = lanes[:, :half] + lanes[:, half:]
            of_block += lanes.flatten().tolist()
        return torch.tensor(math.fsum(of_block), dtype=torch.float64)


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, CHUNK):
        yield start, min(CHUNK, length - start)


def _stepped(part: AdamState, pending: Pending, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fp32 weights and moments of a chunk after one step; the state is kept."""
    length = part.length
    master = ReferenceAdam().join(part.upper, part.lower)
    grad = pending.grad.narrow(0, start, length).float() * pending.scale
    p, g, m, v = (
        pad(values.float(), (0, -length % VECTOR)) for values in (master, grad, part.m, part.v)
    )
    adam = pending.adam
    torch_adam(
        [p],
        [g],
        [m],
        [v],
        [],
        [torch.tensor(adam.step - 1, dtype=torch.float32)],
        fused=True,
        foreach=False,
        amsgrad=False,
        beta1=adam.beta1,
        beta2=adam.beta2,
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        maximize=False,
        decoupled_weight_decay=adam.decoupled,
    )
    return p[:length], m[:length], v[:length]


def _store(out: Tensor, values: Tensor) -> None:
    """Write fp32 values, rounded where `out` is bf16."""
    if out.dtype == torch.float32:
        out.copy_(values)
    else:
        _narrow_into(out, _bits(values))


def _bits(values: Tensor) -> Tensor:
    """Return the bits of fp32 values; every NaN becomes one, whose rounding is a NaN too."""
    return values.masked_fill(values.isnan(), math.nan).view(torch.int32)


def _narrow_into(out: Tensor, bits: Tensor) -> None:
    """Write bits of fp32 as bf16, rounded half away from zero."""
    out.view(torch.int16).copy_(bits.add(0x8000).bitwise_right_shift_(16))
