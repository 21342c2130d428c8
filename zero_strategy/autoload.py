"""Make `Trainer(strategy="zero3")` and `load_from_checkpoint(directory)` work without our import.

PyTorch calls `activate` at the end of `import torch` through its documented `torch.backends`
entry point. Lightning may be imported later or never, so nothing is imported here: a meta-path
finder waits for two modules of Lightning. Once they have run, it adds lazy factories to the
registry of strategies, and lets what reads the file of `load_from_checkpoint` read a directory of
ours too.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches PyTorch's hook off; `import zero_strategy` always works.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from zero_strategy.presets import DESCRIPTIONS, PRESETS


def _make(**options: Any) -> Any:
    from zero_strategy.strategy import ZeroStrategy

    return ZeroStrategy(**options)


def _refuse_legacy_package(**options: Any) -> Any:
    raise TypeError(
        f"strategy = 'zero{options['stage']}...' was given to pytorch_lightning.Trainer: must be "
        "lightning.pytorch.Trainer, because the two packages hold separate classes. Replace "
        "`import pytorch_lightning as pl` by `import lightning.pytorch as pl`."
    )


_FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": _make,
    "pytorch_lightning.strategies": _refuse_legacy_package,
}


def _reads_directories(module: Any) -> None:
    """Let the module's `pl_load` take a checkpoint directory, which it could not open."""
    load = module.pl_load

    def pl_load(path_or_url: Any, map_location: Any = None, **options: Any) -> Any:
        if isinstance(path_or_url, str | os.PathLike) and Path(path_or_url).is_dir():
            from zero_strategy.checkpoint.export import module_checkpoint

            return module_checkpoint(path_or_url, map_location)
        return load(path_or_url, map_location=map_location, **options)

    if load.__name__ != pl_load.__name__:
        module.pl_load = pl_load


def _register(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    for name, options in PRESETS.items():
        if name not in registry:
            description = DESCRIPTIONS[int(options["stage"])]
            registry.register(name, _FACTORIES[module.__name__], description, **options)


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    **dict.fromkeys(_FACTORIES, _register),
    "lightning.pytorch.core.saving": _reads_directories,
}
"""Module of Lightning -> what is done to it once it has run."""
_COMPLETE = {"lightning.pytorch.core.saving": "pl_load"}
"""What tells that a module has run, where it is not the registry."""


class _ChangingLoader(Loader):
    """Runs the real loader, then changes the module it made."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            _CHANGES[module.__name__](module)
        except Exception as error:  # noqa: BLE001 - importing Lightning must not fail because of us
            sys.stderr.write(f"zero_strategy: {module.__name__} not changed: {error!r}\n")


class _LightningFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        others = [f for f in sys.meta_path if f is not self]
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ChangingLoader(spec.loader)
                return spec
        return None


def activate() -> None:
    """Do what this file is for now, or as soon as Lightning is imported. Never raises.

    An exception here would turn into a failed `import torch` for every program on the machine.
    """
    try:
        for name, change in _CHANGES.items():
            module = sys.modules.get(name)
            if module is not None and _COMPLETE.get(name, "StrategyRegistry") in vars(module):
                change(module)
        if not any(isinstance(f, _LightningFinder) for f in sys.meta_path):
            sys.meta_path.insert(0, _LightningFinder())
    except Exception as error:  # noqa: BLE001 - see above
        sys.stderr.write(f"zero_strategy: not activated: {error!r}\n")


def explain() -> dict[str, str]:
    """Say for each strategy name whether Lightning knows it, and if not, why.

    Returns: name -> "registered" or the reason it is missing.
    """
    if importlib.util.find_spec("lightning") is None:
        return dict.fromkeys(PRESETS, "missing: the package `lightning` is not installed")
    from lightning.pytorch.strategies import StrategyRegistry

    def state(name: str) -> str:
        if name not in StrategyRegistry:
            return "missing: import zero_strategy before lightning, or update this package"
        if PRESETS[name].get("offload") == "disk":
            return "registered; the disk tier is not part of this release"
        return "registered"

    return {name: state(name) for name in PRESETS}
