"""What a device can do at most, by the name the driver gives it."""

import re

# Dense bf16 matrix FLOP/s with fp32 accumulation, from the vendors' data sheets. Sheets that print
# only the figure "with sparsity" are halved. Order matters: the first entry whose words all occur
# in the device name wins, so a variant stands before its family.
_PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    # NVIDIA Blackwell data sheet: per GPU of HGX B200 and B300 2.25e15, of GB200 and GB300 2.5e15.
    ("GB300", 2.5e15),
    ("GB200", 2.5e15),
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    # NVIDIA H100 and H200 data sheets: SXM 1979e12, PCIe 1513e12, NVL 1671e12 with sparsity.
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756.5e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    # NVIDIA A100 and A800 data sheets: 312e12 in every form factor.
    ("A100", 312e12),
    ("A800", 312e12),
    # NVIDIA A30, A40, A10 and RTX A6000 data sheets: 330e12, 299.4e12, 250e12 and 309.7e12 with
    # sparsity.
    ("A30", 165e12),
    ("A40", 149.7e12),
    ("A10", 125e12),
    ("RTX A6000", 154.8e12),
    # NVIDIA L40S and L40 data sheets: dense. L4 and RTX 6000 Ada: 242e12, 728.5e12 with sparsity.
    ("L40S", 362.05e12),
    ("L40", 181.05e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364.2e12),
    # NVIDIA Ada, Ampere and Blackwell GeForce white papers, fp32 accumulation, dense.
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    # AMD CDNA 3 data sheet: 1307.4e12 for both.
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
)

# Cut-down chips that carry the name of the full one; a wrong peak is worse than none.
_CUT_DOWN = frozenset({"laptop", "mobile", "mig", "d", "max-q"})


def peak_bf16_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of one device.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it, "NVIDIA H100 80GB HBM3".

    Returns: FLOP/s, or None for a device not in the table, for a laptop part and for a MIG slice.

    Example:
        >>> peak_bf16_flops("NVIDIA A100-SXM4-80GB")
        312000000000000.0
    """
    words = set(re.split(r"[\s_/]+|-(?!q\b)", device_name.lower()))
    if words & _CUT_DOWN:
        return None
    for name, flops in _PEAK_BF16_FLOPS:
        if words.issuperset(name.lower().split()):
            return flops
    return None
