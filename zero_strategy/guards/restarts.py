"""What a run that torchrun starts again must be told beforehand."""

from __future__ import annotations

import os
from collections.abc import Mapping


def check_restarts(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to start where a restart after a rank's death would fail.

    torchrun lets its workers meet in the store that it uses itself. There the workers of a restart
    find the addresses of the dead ones, and most restarts fail or hang.

    Raises: ValueError: torchrun restarts workers, and they share its store.
    """
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts > 0 and shares_store:
        raise ValueError(
            f"torchrun --max-restarts = {restarts}: must come with an own store for each start, "
            "else workers that start again meet the addresses of dead ones. Launch by "
            "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ...`, or with --max-restarts=0."
        )
