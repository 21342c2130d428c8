"""From YAML files and `key=value` words to one checked `RunConfig`.

A configuration may come from a stranger. Files hold plain values only: no tags, anchors,
interpolation or names to import; size, depth and number of files are bounded. Everything is
checked before Lightning is imported or any other process exists, and all problems are told at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero_strategy.config import refusal
from zero_strategy.experiments.rules import ConfigError
from zero_strategy.experiments.schema import RunConfig
from zero_strategy.presets import PRESETS

MAX_FILE_BYTES = 1 << 16
MAX_DEPTH = 8
MAX_NODES = 1000
MAX_FILES = 8
KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,3}")
# What other libraries call it.
SYNONYMS = {"gpu": "cuda", "fsdp": "zero3", "deepspeed": "zero3"}
PACKAGED = Path(__file__).parent / "configs"


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge and check a configuration.

    Args:
        file: a YAML file, or the name of a packaged one, such as "tiny.yaml". Its `defaults:`
            list names files relative to it, which are read first; later values win.
        overrides: `dotted.key=value` words, which win over files; values are YAML.

    Raises:
        ConfigError: lists every problem as `path = value: must be X. Do Y.`
    """
    file = Path(file)
    if not file.is_file() and (PACKAGED / file).is_file():
        file = PACKAGED / file
    tree = _read_file(file, (), [])
    for word in overrides:
        tree = _merged(tree, _read_override(word))
    problems: list[str] = []
    config = _build(RunConfig, tree, "", problems)
    if not problems:
        problems += config.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def save_config(config: RunConfig, path: Path) -> None:
    """Write every value, so that the file alone repeats the run."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


# Reading: from text to plain dictionaries.


def _read_file(file: Path, above: tuple[Path, ...], opened: list[Path]) -> dict[str, Any]:
    """Read a file over its defaults; `above` led to it, `opened` counts all files together."""
    if not file.is_file():
        known = sorted(path.name for path in PACKAGED.glob("*.yaml"))
        advice = f"Check the path, or use one of {', '.join(known)}."
        raise ConfigError(refusal("config file", str(file), ["an existing file"], advice))
    opened.append(file)
    if file.resolve() in above or len(opened) > MAX_FILES:
        must = f"one of at most {MAX_FILES} files, and no circle"
        raise ConfigError(refusal("defaults", str(file), [must], "Remove the entry."))
    if file.stat().st_size > MAX_FILE_BYTES:
        must = f"at most {MAX_FILE_BYTES} bytes"
        raise ConfigError(refusal("config file", str(file), [must], "Remove what is not needed."))
    text = file.read_text(encoding="utf-8", errors="replace")
    tree = _parse(text, str(file), lambda: OmegaConf.create(text))
    merged: dict[str, Any] = {}
    for name in _default_names(tree.pop("defaults", None)):
        below = _read_file(file.parent / name, (*above, file.resolve()), opened)
        merged = _merged(merged, below)
    return _merged(merged, tree)


def _default_names(value: object) -> list[str]:
    names = [] if value is None else value
    fine = isinstance(names, list) and all(
        isinstance(name, str) and not Path(name).is_absolute() and ".." not in Path(name).parts
        for name in names
    )
    if not fine:
        must = "a list of YAML files below the folder of this one"
        raise ConfigError(refusal("defaults", value, [must], "Use [base.yaml]."))
    return names  # pyright: ignore[reportReturnType]


def _read_override(word: str) -> dict[str, Any]:
    key, separator, text = word.partition("=")
    if not separator or not KEY.fullmatch(key):
        must = "dotted.key=value"
        raise ConfigError(refusal("override", word, [must], "Write it like optim.lr=3e-4."))
    return _parse(text, key, lambda: OmegaConf.from_dotlist([word]))


def _parse(text: str, where: str, build: Callable[[], object]) -> dict[str, Any]:
    """Return plain data. Every YAML event is looked at before anything is built from it."""
    try:
        for line, value, must, fix in _forbidden(text):
            raise ConfigError(refusal(f"{where}:{line}", value, [must], fix))
        # OmegaConf's reader knows 1e-3 as a number and refuses a key given twice.
        tree = OmegaConf.to_container(build())
    except AssertionError:
        tree = None  # OmegaConf asserts that a text is no lone number
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        must = f"well-formed YAML ({reason})"
        raise ConfigError(refusal(where, text[:80], [must], "Correct the text there.")) from error
    if not isinstance(tree, dict):
        raise ConfigError(refusal(where, text[:80], ["`key: value` lines"], "Add some."))
    return tree  # pyright: ignore[reportReturnType]


def _forbidden(text: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield the line of each construct that a configuration may not hold."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        line = event.start_mark.line + 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or count > MAX_NODES:
            must = f"at most {MAX_DEPTH} levels deep and {MAX_NODES} entries long"
            yield line, "...", must, "Remove what is not needed."
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor:
            must = "free of anchors and aliases"
            yield line, anchor, must, "Write the value out, or use `defaults:`."
        if tag:
            yield line, tag, "free of YAML tags", "Write a plain value."
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            must = "free of ${...}"
            yield line, event.value, must, "Write the value itself; nothing is interpolated."


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = _merged(old, value)
        else:
            result[key] = value
    return result


# Building: from plain dictionaries to the schema.


def _build(schema: type, tree: object, path: str, problems: list[str]) -> Any:
    """Return the section, or None where it is incomplete; tell what is wrong in `problems`."""
    prefix = f"{path}." if path else ""
    if not isinstance(tree, dict):
        problems.append(
            refusal(path, tree, ["a section of keys"], f"Put them under `{path}:`, one a line.")
        )
        return None
    before = len(problems)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    problems += [
        _unknown_key(f"{prefix}{key}", value) for key, value in tree.items() if key not in fields
    ]
    hints, values = get_type_hints(schema), {}
    for name, field in fields.items():
        if dataclasses.is_dataclass(hints[name]) and (name in tree or _is_required(field)):
            values[name] = _build(hints[name], tree.get(name, {}), f"{prefix}{name}", problems)
        elif name in tree:
            values[name] = _value(schema, name, hints[name], tree[name], prefix, problems)
        elif _is_required(field):
            must, fix = _wanted(hints[name])
            problems.append(refusal(f"{prefix}{name}", "missing", [f"set to {must}"], fix))
    if len(problems) > before:
        return None
    config = schema(**values)
    if path:
        problems += config.problems(path)
    return config


def _value(
    schema: type, name: str, hint: Any, value: object, prefix: str, problems: list[str]
) -> object:
    """Return one value by OmegaConf's type rules: 1 is a float, 3.7 no int, "3" no number."""
    node = OmegaConf.structured(schema)
    OmegaConf.set_readonly(node, False)
    try:
        OmegaConf.update(node, name, value)
        infinite = isinstance(node[name], float) and not math.isfinite(node[name])
        # OmegaConf would read numbers from text, and write text from numbers.
        kind_fits = isinstance(value, str) == _is_text(hint) and hint is not bool
        fits = not infinite and (value is None or kind_fits or isinstance(value, bool))
    except OmegaConfBaseException:
        fits = False
    if fits:
        return node[name]
    must, fix = _wanted(hint)
    preset = PRESETS.get(value, {}) if isinstance(value, str) and name == "strategy" else {}
    if preset.get("offload") == "disk":
        must = f"{must}; the disk tier is not part of this release"
        fix = f'Use "zero{preset["stage"]}_offload", which keeps the same state in host memory.'
    elif near := _nearest(str(value), [str(option) for option in get_args(hint)]):
        fix = f'Use "{near}".'
    problems.append(refusal(f"{prefix}{name}", value, [must], fix))
    return None


def _nearest(value: str, options: list[str]) -> str | None:
    """Return the option that was meant: its name elsewhere, its beginning, or one spelt alike."""
    value = SYNONYMS.get(value, value)
    same_start = [o for o in options if value and (o.startswith(value) or value.startswith(o))]
    near = same_start or difflib.get_close_matches(value, options, n=1)
    return near[0] if near else None


def _unknown_key(path: str, value: object) -> str:
    """Name the nearest key: first one of the same last name, then one spelt alike."""
    known = [*_sections(), *_paths(RunConfig)]
    leaf = path.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    fix = f"Use {near[0]}." if near else f"Known sections: {', '.join(_sections())}."
    return refusal(path, value, ["a known key"], fix)


@cache
def _paths(schema: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    found = []
    for field in dataclasses.fields(schema):
        path, hint = f"{prefix}{field.name}", hints[field.name]
        found += _paths(hint, f"{path}.") if dataclasses.is_dataclass(hint) else [path]
    return found


def _sections() -> list[str]:
    hints = get_type_hints(RunConfig)
    return [name for name, hint in hints.items() if dataclasses.is_dataclass(hint)]


def _is_text(hint: Any) -> bool:
    return str in (hint, *get_args(hint)) or get_origin(hint) is Literal


def _is_required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _wanted(hint: Any) -> tuple[str, str]:
    """Return what a value of this type must be, and how to write one."""
    if get_origin(hint) is Literal:
        options = get_args(hint)
        return f"one of {', '.join(options)}", f'Use "{options[0]}".'
    if NoneType in get_args(hint):
        must, fix = _wanted(next(kind for kind in get_args(hint) if kind is not NoneType))
        return f"{must}, or null", fix
    return {
        int: ("a whole number", "Write it like 8."),
        float: ("a finite number", "Write it like 0.1."),
        bool: ("true or false", "Write true or false."),
        str: ("text", "Write it in quotes."),
    }[hint]
