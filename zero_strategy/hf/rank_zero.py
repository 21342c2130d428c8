"""Weights by way of rank 0: for a transformers whose inside is not as `loading.py` knows it.

Slower, and rank 0 holds the whole model on its host for a while; what arrives is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, PreTrainedModel

from zero_strategy.hf.places import Places

_OF_THE_MODEL = ("dtype", "attn_implementation", "experts_implementation")


def build_on_meta(
    model_class: Any, folder: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[PreTrainedModel, FromRankZero]:
    """Build a model without values from its configuration alone.

    Args:
        model_class: a model class of transformers, or one of its `AutoModel...`.
        folder: with the model's files.
        options: of `from_pretrained`; those for the configuration, `dtype` and implementations.
    Returns: the model on the meta device, and what gives it its values.
    Raises: ValueError: an option that only transformers' own loading knows.
    """
    own = {name: options[name] for name in _OF_THE_MODEL if name in options}
    others = {name: value for name, value in options.items() if name not in own}
    config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **others)
    if unknown:
        raise ValueError(
            f"from_pretrained({', '.join(unknown)}=...): must be left out where rank 0 loads for "
            "all. Use transformers 5.24."
        )
    if own.get("dtype") == "auto":
        del own["dtype"]
    # The classes for one architecture have the method under a name of their own.
    build = vars(model_class).get("from_config") or model_class._from_config
    build = getattr(model_class, build.__name__)
    with torch.device("meta"):
        model = build(config, **own)
    # Linked like the files' names: derived buffers come from rank 0 too.
    return model.eval(), FromRankZero(model, lambda: model_class.from_pretrained(folder, **options))


@final
class FromRankZero:
    """The values of one model, which rank 0 loads as transformers does.

    Args:
        model: as it was built, on the meta device.
        load: loads it.
    """

    def __init__(self, model: PreTrainedModel, load: Callable[[], PreTrainedModel]) -> None:
        self._load = load
        self._places = Places(model, derived=True)

    def fills(self, module: nn.Module, name: str) -> bool:
        """Whether rank 0 has a tensor."""
        return self._places.holds(module, name)

    def fill(self, write: Callable[[Tensor, Tensor], None]) -> None:
        """Scatter the parameters and broadcast the buffers of rank 0, a tensor at a time.

        Cost: collective; the model's bytes, and on rank 0 its memory.
        """
        is_source = not dist.is_initialized() or dist.get_rank() == 0
        with torch.device("cpu"):
            whole = Places(self._load(), derived=True).by_name if is_source else None
        written: set[int] = set()
        for name, place in self._places.by_name.items():
            tensor = place.tensor
            if tensor.is_meta or id(tensor) in written:
                continue
            written.add(id(tensor))
            write(tensor, _received(tensor, whole[name].tensor if whole else None))


def _received(tensor: Tensor, whole: Tensor | None) -> Tensor:
    """Return this rank's elements of rank 0's tensor, in the dtype that the model holds."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # Under offload the module holds half of what is to come.
    dtype = torch.float32 if isinstance(tensor, DTensor) else held.dtype
    if whole is None:
        whole = torch.empty(tensor.shape, dtype=dtype, device=held.device)
    whole = whole.detach().to(held.device, dtype)
    if isinstance(tensor, DTensor):
        return distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
    if dist.is_initialized():
        dist.broadcast(whole, src=0)
    return whole
