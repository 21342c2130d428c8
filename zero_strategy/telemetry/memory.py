"""Peak memory of this process."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Highest use since the process started.

    Args:
        device: the rank's device.

    Returns: bytes allocated by tensors on a CUDA device; on the host, bytes resident. Nothing is
        reset, so that others may watch the same counter.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
