"""Pick the validation figures out of everything a run has logged."""

from collections.abc import Mapping

from torch import Tensor

_PREFIXES = ("val_", "val/", "valid_", "valid/", "validation_", "validation/")
_BITS_PER_BYTE = ("bpb", "bits_per_byte")


def validation_figures(logged: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics logged under a validation prefix, without it.

    Args:
        logged: name -> tensor, 0-dim; the loss is `val_loss` or `val/loss`, bits per byte
            `val_bits_per_byte` or `val_bpb`.

    Returns: name -> value; `loss` and `bits_per_byte` under these names.

    Cost: one host sync per figure.
    """
    figures = {}
    for name, value in logged.items():
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is not None and value.numel() == 1:
            short = name.removeprefix(prefix)
            figures["bits_per_byte" if short in _BITS_PER_BYTE else short] = float(value)
    return figures
