"""Hugging Face models under the strategy: loaded into shards, adapted, and exported again.

Needs the extra `hf`: `pip install zero-strategy[hf]`.
"""

from importlib.util import find_spec

if missing := [name for name in ("transformers", "peft") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"zero_strategy.hf needs {' and '.join(missing)}: must be installed. Use "
        "pip install 'zero-strategy[hf]'.",
        name=missing[0],
    )

from zero_strategy.hf.adapters import add_adapter, save_adapter
from zero_strategy.hf.export import export
from zero_strategy.hf.pretrained import from_config, from_pretrained

__all__ = ["add_adapter", "export", "from_config", "from_pretrained", "save_adapter"]
