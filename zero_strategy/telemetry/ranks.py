"""Bring one row of figures from every rank to all ranks, in one small collective."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gather_rows(
    row: Sequence[float],
    *,
    global_rank: int,
    world_size: int,
    device: torch.device,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> list[list[float]]:
    """Collect a row from each rank, so that means, sums and extremes cost one all-reduce.

    A rank writes its row into a table of zeros; the sum of the tables is the whole table. Ranks
    that `sum_over_ranks` does not reach are left out.

    Args:
        row: this rank's figures; equally many on every rank.
        global_rank: place of the row.
        world_size: rows of the table.
        device: where the collective works.
        sum_over_ranks: all-reduce with "sum".

    Returns: the rows, by rank.

    Cost: all ranks must call it; one all-reduce of 8 * world_size * (len(row) + 1) bytes, one host
        sync.
    """
    # Counts of tokens need the 53 bits; Metal has no float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    table = torch.zeros(world_size, len(row) + 1, dtype=dtype)
    table[global_rank] = torch.tensor([1.0, *row], dtype=dtype)
    gathered = sum_over_ranks(table.to(device)).tolist()
    return [figures for present, *figures in gathered if present > 0]
