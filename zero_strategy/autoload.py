"""Make `Trainer(strategy="zero3")` work without an import of ours.

PyTorch calls `activate` at the end of `import torch` through its documented `torch.backends`
entry point. Lightning may be imported later or never, so nothing is imported here: a meta-path
finder waits for Lightning's strategy module and, once that has run, adds lazy factories to its
registry. `TORCH_DEVICE_BACKEND_AUTOLOAD=0` switches PyTorch's hook off; `import zero_strategy`
always works.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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


def _register(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    for name, options in PRESETS.items():
        if name not in registry:
            description = DESCRIPTIONS[int(options["stage"])]
            registry.register(name, _FACTORIES[module.__name__], description, **options)


class _RegisteringLoader(Loader):
    """Runs the real loader, then registers the names in the module it made."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            _register(module)
        except Exception as error:  # noqa: BLE001 - importing Lightning must not fail because of us
            sys.stderr.write(f"zero_strategy: strategy names not registered: {error!r}\n")


class _StrategyModuleFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _FACTORIES:
            return None
        others = [f for f in sys.meta_path if f is not self]
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


def activate() -> None:
    """Register the strategy names now, or as soon as Lightning is imported. Never raises.

    An exception here would turn into a failed `import torch` for every program on the machine.
    """
    try:
        for name in _FACTORIES:
            module = sys.modules.get(name)
            if module is not None and "StrategyRegistry" in vars(module):
                _register(module)
        if not any(isinstance(f, _StrategyModuleFinder) for f in sys.meta_path):
            sys.meta_path.insert(0, _StrategyModuleFinder())
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
