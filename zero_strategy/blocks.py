"""Find the modules to shard as units.

A unit is gathered, computed and let go together. Too large and memory peaks, too small and the
collectives no longer hide under compute; the repeated block of a network is the right size.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_SMALLEST_SHARE = 0.05
"""A list of modules with a smaller share of the parameters is not worth its own collectives."""
_SMALLEST_LEAF = 0.01
"""A single layer with a smaller share of the parameters may as well wait for the root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The modules to shard, in the order in which they are registered."""

    modules: dict[str, nn.Module]
    """Qualified name -> unit. Everything else forms the root unit."""
    source: str
    """How they were found, for the printed plan."""
    leaves: tuple[str, ...] = ()
    """Units that are no block; their parameters may be used after their forward."""
    tied_out: tuple[str, ...] = ()
    """Blocks left in the root because they share parameters with another unit."""

    @property
    def class_names(self) -> str:
        """Class names of the units, for the printed plan."""
        return ", ".join(sorted({type(m).__name__ for m in self.modules.values()})) or "none"


def num_parameters(module: nn.Module) -> int:
    """Number of parameter elements, shared ones counted once."""
    return sum(p.numel() for p in module.parameters())


def find_units(
    module: nn.Module,
    blocks: Sequence[type[nn.Module]] | None,
    *,
    every_child: bool,
    large_leaves: bool = False,
) -> Units:
    """Choose the units of a module.

    Args:
        module: the user's module, not yet sharded.
        blocks: classes to shard, or None to find the repeated blocks.
        every_child: also make each direct child a unit (manual optimization runs its backward
            inside the root's forward, so the root must own no parameter).
        large_leaves: where the blocks are found, also make a unit of each module outside them that
            holds a large share itself, such as an embedding: its gradients then arrive before the
            end of the backward, where the root's do.
    Raises: ValueError: `blocks` names a class that does not occur, or `every_child` is impossible.
    """
    if blocks is not None:
        found, source = _instances(module, blocks), "blocks="
    else:
        found, source = _declared(module), "_no_split_modules"
        if not found:
            found, source = _repeated(module), "repeated blocks"
    if every_child:
        children = _callable_members("", module)
        _refuse_shared_children(children)
        found = {n: m for n, m in module.named_modules() if n in children or n in found}
    leaves = _large_leaves(module, found) if large_leaves and blocks is None else set()
    if leaves:
        found = {n: m for n, m in module.named_modules() if n in found or n in leaves}
    kept, tied_out = _without_tied(module, found)
    return Units(
        modules=kept,
        source=source if kept else "none found",
        leaves=tuple(n for n in kept if n in leaves),
        tied_out=tuple(n for n in tied_out if n not in leaves),
    )


def _instances(module: nn.Module, blocks: Sequence[type[nn.Module]]) -> dict[str, nn.Module]:
    found = {n: m for n, m in module.named_modules() if isinstance(m, tuple(blocks)) and n}
    missing = [b.__name__ for b in blocks if not any(isinstance(m, b) for m in found.values())]
    if missing:
        present = sorted({type(m).__name__ for m in module.modules()})
        raise ValueError(
            f"zero.blocks = {missing}: must be classes that occur in the module. "
            f"Present: {', '.join(present)}."
        )
    return found


def _declared(module: nn.Module) -> dict[str, nn.Module]:
    """Blocks named by Hugging Face's `_no_split_modules`."""
    names: set[str] = set()
    for kind in {base for sub in module.modules() for base in type(sub).__mro__}:
        # Models of one family inherit it.
        names.update(vars(kind).get("_no_split_modules") or ())
    return {
        n: m
        for n, m in module.named_modules()
        if type(m).__name__ in names and not isinstance(m, nn.ModuleList | nn.ModuleDict)
    }


def _repeated(module: nn.Module) -> dict[str, nn.Module]:
    """Members of the outermost lists that hold several modules of one class."""
    total = num_parameters(module)
    found: dict[str, nn.Module] = {}
    for name, sub in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(sub, nn.ModuleList | nn.Sequential) and _is_repetition(sub, total):
            found.update(_callable_members(name, sub))
    return found


def _callable_members(name: str, container: nn.Module) -> dict[str, nn.Module]:
    """Members of a container, and of containers among them, which have no forward to hook."""
    members: dict[str, nn.Module] = {}
    for key, member in container.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(member, nn.ModuleList | nn.ModuleDict):
            members.update(_callable_members(path, member))
        elif num_parameters(member):
            members[path] = member
    return members


def _is_repetition(container: nn.Module, total: int) -> bool:
    members = list(container.children())
    if len(members) < 2 or len({type(m) for m in members}) > 1:
        return False
    return num_parameters(container) >= max(_SMALLEST_SHARE * total, 1)


def _large_leaves(module: nn.Module, units: dict[str, nn.Module]) -> set[str]:
    least = max(_SMALLEST_LEAF * num_parameters(module), 1)
    return {
        name
        for name, sub in module.named_modules()
        if not any(f"{name}.".startswith(f"{unit}.") for unit in units)
        and not any(True for _ in sub.children())
        and num_parameters(sub) >= least
    }


def owners(module: nn.Module, units: dict[str, nn.Module]) -> dict[int, set[str]]:
    """id(parameter) -> innermost units that hold it; "" is the root."""
    owners: dict[int, set[str]] = defaultdict(set)
    for name, sub in module.named_modules(remove_duplicate=False):
        own = max((u for u in units if f"{name}.".startswith(f"{u}.")), key=len, default="")
        for parameter in sub.parameters(recurse=False):
            owners[id(parameter)].add(own)
    return owners


def unit_parameters(module: nn.Module, units: Units) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield each parameter once, under its first name, with its unit; "" is the root."""
    owner = owners(module, units.modules)
    for name, parameter in module.named_parameters():
        (unit,) = owner[id(parameter)]
        yield unit, name, parameter


def _without_tied(
    module: nn.Module, found: dict[str, nn.Module]
) -> tuple[dict[str, nn.Module], tuple[str, ...]]:
    """Leave every block that shares a parameter with another unit to the root."""
    kept = dict(found)
    while True:
        shared = {o for own in owners(module, kept).values() if len(own) > 1 for o in own}
        shared &= set(kept)
        if not shared:
            return kept, tuple(n for n in found if n not in kept)
        # A unit nested in a tied one would still separate its parameters from the root's.
        kept = {n: m for n, m in kept.items() if n not in shared}


def _refuse_shared_children(children: dict[str, nn.Module]) -> None:
    first: dict[int, str] = {}
    for name, child in children.items():
        for path, parameter in child.named_parameters():
            other = first.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(
                    f"{name}.{path} is shared with {other!r}: must belong to one direct child of "
                    "the LightningModule under manual optimization. Put both modules into one "
                    "nn.Module."
                )


def parameter_names(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Names and parameters, tied ones under each of their names."""
    return module.named_parameters(remove_duplicate=False)
